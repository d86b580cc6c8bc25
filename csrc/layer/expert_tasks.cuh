// F8-F10: the experts. A task is one expert and one block of its outputs over the whole K, so nothing about a row's
// sums depends on how many experts or rows are active. All gate/up tasks come first, then the down tasks in the same
// expert order; one list, dealt round the CTAs.
#pragma once
#include "load.cuh"
#include "marlin.cuh"
#include "routing.cuh"

namespace experts {

struct GateUp {
    static constexpr int N = 2 * cfg::MOE_INTER, K = cfg::MOE_HIDDEN, SEGMENTS = 2;  // segments: gate rows, up rows
    static constexpr int TILES = cfg::GATE_UP_TILES, K_PARTS = cfg::GATE_UP_K_PARTS, BOXES = cfg::GATE_UP_BOXES,
                         CHUNK = cfg::GATE_UP_CHUNK;
};
struct Down {
    static constexpr int N = cfg::MOE_HIDDEN, K = cfg::MOE_INTER, SEGMENTS = 1;
    static constexpr int TILES = cfg::DOWN_TILES, K_PARTS = cfg::DOWN_K_PARTS, BOXES = cfg::DOWN_BOXES,
                         CHUNK = cfg::DOWN_CHUNK;
};

template <class G>
struct Shape {
    static constexpr int ROWS = cfg::NVFP4 ? G::TILES * 64 : BLOCK_ROWS;  // weight rows of a task, all segments
    static constexpr int SEGMENT_ROWS = ROWS / G::SEGMENTS;
    static constexpr int BLOCKS = G::N / ROWS;
    // The inputs come in units of which a stage holds one (BF16), or one to BOXES (NVFP4).
    static constexpr int UNIT = cfg::NVFP4 ? marlin::Box<G>::STEPS * 16 : G::CHUNK;
    static constexpr int UNITS = G::K / UNIT;
    static_assert(G::N % ROWS == 0 && G::K % UNIT == 0, "tasks tile the expert");
};

// One of the two products, as a value: what differs between them is chosen while the kernel runs, so that one piece of
// code serves both and is there already when the second begins.
struct Product {
    bool gate_up;

    DEVICE int choose(int of_gate_up, int of_down) const {
        return of_gate_up == of_down || gate_up ? of_gate_up : of_down;
    }
    DEVICE int k() const { return choose(GateUp::K, Down::K); }
    DEVICE int blocks() const { return choose(Shape<GateUp>::BLOCKS, Shape<Down>::BLOCKS); }
    DEVICE int unit() const { return choose(Shape<GateUp>::UNIT, Shape<Down>::UNIT); }
    DEVICE int units() const { return choose(Shape<GateUp>::UNITS, Shape<Down>::UNITS); }
    DEVICE int rows() const { return choose(Shape<GateUp>::ROWS, Shape<Down>::ROWS); }
    // Units of a stage of a task whose expert has `count` rows.
    DEVICE int stage_units(int count) const {
        if constexpr (cfg::NVFP4) {
            return marlin::stage_boxes(choose(GateUp::BOXES, Down::BOXES), unit() * 2, count);
        } else {
            return 1;
        }
    }
    DEVICE int stage_bytes(int units) const { return rows() * unit() * units / 16 * (cfg::NVFP4 ? 9 : 32); }  // weights
};
constexpr Product GATE_UP{true}, DOWN{false};

// body(product) for gate/up, then for down.
template <class Body>
DEVICE void for_products(Body body) {
#pragma unroll 1
    for (int turn = 0; turn < 2; ++turn) body(Product{turn == 0});
}

// One expert task of this CTA.
struct Task {
    int index, block, expert;  // index: of the expert in the table
    uint32_t rows;             // its rows, as a set
    int count;
};

// Walks this CTA's tasks of one product. Gate/up tasks are dealt round the CTAs, so some CTAs have one more than
// others. Down tasks are smaller: the first of them go to the others, as many as weigh as much as one gate/up task, the
// rest to all. The first experts come first either way, so that a down task finds its activations ready.
struct Tasks {
    static constexpr int GATE_UP_WORK = Shape<GateUp>::ROWS * GateUp::K, DOWN_WORK = Shape<Down>::ROWS * Down::K;
    static constexpr int RATIO = GATE_UP_WORK > DOWN_WORK ? (GATE_UP_WORK + DOWN_WORK / 2) / DOWN_WORK : 1;
    Product product;
    int at, stride, stop;  // of the stretch of the list that is being dealt
    int end;

    DEVICE explicit Tasks(Product product) : product(product) {
        const int active = routing::Table::active();
        end = active * product.blocks();
        at = cta_index();
        stride = cfg::SMS;
        stop = end;
        if (cfg::SEPARATE || product.gate_up) return;
        const int late = active * Shape<GateUp>::BLOCKS % cfg::SMS;  // CTAs with a gate/up task more
        if (late == 0) return;
        stride = cfg::SMS - late;
        stop = RATIO * stride < end ? RATIO * stride : end;
        at = cta_index() < late ? stop : cta_index() - late;
    }
    DEVICE bool next(Task& task) {
        if (at >= stop) {
            if (stop == end) return false;
            at = stop + cta_index();
            stride = cfg::SMS;
            stop = end;
            if (at >= end) return false;
        }
        task.index = static_cast<int>(static_cast<uint32_t>(at) / static_cast<uint32_t>(product.blocks()));
        task.block = at - task.index * product.blocks();
        task.expert = routing::Table::expert(task.index);
        task.rows = routing::Table::rows_of(task.expert);
        task.count = population_count(task.rows);
        at += stride;
        return true;
    }
};

// A down task needs all of its expert's activations: one flag per gate/up task holds the tag of the launch that wrote
// it last. Tags are odd, so that a flag nobody ever wrote (0) is no launch's.
DEVICE uint32_t activation_tag(uint32_t epoch) { return 2u * epoch + 1u; }

DEVICE uint32_t* activation_flags(const Params& p, int index) { return p.flags + index * Shape<GateUp>::BLOCKS; }

}  // namespace experts
