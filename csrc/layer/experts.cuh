// F8-F10: the experts. A task is one expert and one block of its outputs over the whole K, so nothing about a row's
// sums depends on how many experts or rows are active. All gate/up tasks come first, then the down tasks in the same
// expert order; one list, dealt round the CTAs.
#pragma once
#include <type_traits>

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

// BF16: rows of the expert's matrix, sixteen side by side at a time, which are of one segment.
DEVICE void load_rows_of(const Params& p, const Ring& ring, const Product& product, const Task& task, int unit,
                         uint64_t policy) {
    constexpr int AT_ONCE = 16, SEGMENT_ROWS = Shape<GateUp>::SEGMENT_ROWS;
    static_assert(cfg::NVFP4 || (SEGMENT_ROWS % AT_ONCE == 0 && Shape<Down>::ROWS == BLOCK_ROWS), "groups of rows");
    if (!elect_one()) return;
    const int row_bytes = product.unit() * 2;
    mbarrier_arrive_expect(ring.full(), BLOCK_ROWS * row_bytes);
    const char* matrix = static_cast<const char*>(product.gate_up ? p.gate_up : p.down);
    const int64_t stride = product.k() * 2;
    const int64_t first = static_cast<int64_t>(task.expert) * product.choose(GateUp::N, Down::N);
#pragma unroll 1
    for (int local = 0; local < BLOCK_ROWS; local += AT_ONCE) {
        const int row = product.gate_up ? local / SEGMENT_ROWS * (GateUp::N / 2) + task.block * SEGMENT_ROWS +
                                              local % SEGMENT_ROWS
                                        : task.block * BLOCK_ROWS + local;
        const char* source = matrix + (first + row) * stride + unit * row_bytes;
        const uint32_t to = ring.weights() + row_offset(local, row_bytes);
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
            bulk_load(to + row_offset(i, row_bytes), source + i * stride, row_bytes, ring.full(), policy);
        }
    }
}

// Before load_weights, while there is time.
DEVICE void prepare_boxes(const Params& p) {
    if constexpr (cfg::NVFP4) {
#pragma unroll 1
        for (int i = 0; i < 4; ++i) acquire_boxes(p.expert_boxes + i * 128);
    }
}

// A ring asked for at once by all SMs comes as a whole, and token rows queue behind it; half a stage's time apart, the
// first stage comes first.
constexpr uint32_t FIRST_STAGES_APART_NS = 500;

DEVICE void load_weights(const Params& p, Ring& ring, Product product, uint64_t policy) {
    Tasks tasks(product);
    int early = product.gate_up ? cfg::STAGES - 1 : 0;  // stages to ask for before the first is used
    for (Task task; tasks.next(task);) {
        const int units = product.stage_units(task.count);
#pragma unroll 1
        for (int unit = 0; unit < product.units(); unit += units) {
            ring.wait_empty(p);
            if constexpr (cfg::NVFP4) {
                const auto matrix = product.gate_up ? marlin::Matrix::of<GateUp>(p.expert_boxes)
                                                    : marlin::Matrix::of<Down>(p.expert_boxes + 2 * 128);
                marlin::load_stage<(GateUp::BOXES > Down::BOXES ? GateUp::BOXES : Down::BOXES)>(
                    ring, matrix, task.expert, task.block, unit, units, policy);
            } else {
                load_rows_of(p, ring, product, task, unit, policy);
            }
            mark(p, Point::ISSUED, product.stage_bytes(units) / 16);
            if (early > 0) {
                --early;
                sleep_nanoseconds(FIRST_STAGES_APART_NS);
            }
            ring.next();
        }
    }
}

// A down task needs all of its expert's activations: one flag per gate/up task holds the tag of the launch that wrote
// it last. Tags are odd, so that a flag nobody ever wrote (0) is no launch's.
DEVICE uint32_t activation_tag(uint32_t epoch) { return 2u * epoch + 1u; }

DEVICE uint32_t* activation_flags(const Params& p, int index) { return p.flags + index * Shape<GateUp>::BLOCKS; }

DEVICE void wait_activations(const Params& p, int index, uint32_t epoch) {
    if constexpr (cfg::SEPARATE) return;
    const uint32_t* flags = activation_flags(p, index);
#pragma unroll 1
    for (int block = lane_index(); block < Shape<GateUp>::BLOCKS; block += WARP) {
        spin_until(p, static_cast<uint32_t>(protocol::Site::EXPERT_ACTIVATION), activation_tag(epoch),
                   [&](uint32_t& seen) {
                       seen = load_acquire(flags + block);
                       return seen == activation_tag(epoch);
                   });
    }
    warp_sync();
    fence_generic_to_async();
}

// Column c of a task's product is the expert's c-th row: its line of x (gate/up) or of the activations (down).
DEVICE void load_tokens(const Params& p, Ring& ring, Product product, uint32_t epoch, uint64_t policy) {
    Tasks tasks(product);
    for (Task task; tasks.next(task);) {
        const uint16_t* lines = p.expert_input;
        uint32_t rows = task.rows;
        if (!product.gate_up) {
            wait_activations(p, task.index, epoch);
            lines = p.activated + static_cast<int64_t>(routing::Table::first_line(task.index)) * Down::K;
            rows = (1u << task.count) - 1u;
        }
        const int units = product.stage_units(task.count), row_bytes = units * product.unit() * 2;
#pragma unroll 1
        for (int unit = 0; unit < product.units(); unit += units) {
            ring.wait_empty(p);
            if (elect_one()) {
                mbarrier_arrive_expect(ring.full(), task.count * row_bytes);
                uint32_t left = rows;
#pragma unroll COLUMN_TILES  // one by one, sixteen rows would take as long as the stage's weights
                for (int column = 0; column < task.count; ++column, left &= left - 1u) {
                    bulk_load(ring.tokens() + row_offset(column, row_bytes),
                              lines + lowest_bit(left) * product.k() + unit * product.unit(), row_bytes, ring.full(),
                              policy);
                }
            }
            ring.next();
        }
    }
}

// ---- math warps: sums of a task, left in the reduction buffer as [k parts, ROWS] rows ----

// The buffer changes hands twice a task: parked by the math warps, taken by the finishing warp. `task` counts.
DEVICE void wait_sums_taken(const Params& p, int task) {
    if (task > 0) wait_mbarrier(p, cfg::SUMS_TAKEN_AT, (task - 1) & 1, protocol::Site::SUMS_TAKEN);
}

// NVFP4. Stages that hold as many boxes as one can. A piece of code for each product: with distances between tiles that
// are no constants, one for both cost 5 us of 180.
template <class G, int NT>
DEVICE void accumulate_whole_stages(const Params& p, Ring& ring, int warp, int lane, bool busy, int count,
                                    float (&acc)[4][NT][4]) {
    using L = marlin::LayoutOf<G>;
    constexpr int BOXES = L::BOXES, LAST = (BOXES + 1) / 2;  // half a stage at a time fits the registers
    const marlin::Lanes<L, NT> lanes(marlin::Place::of<G>(warp), lane, count, BOXES);
#pragma unroll 1
    for (int unit = 0; unit < Shape<G>::UNITS; unit += BOXES) {
        ring.wait_full(p);
        if (!busy) {
            ring.release();
            continue;
        }
        if constexpr (LAST < BOXES) marlin::Held<L, BOXES - LAST, NT>(ring, lanes, 0).multiply(acc);
        const marlin::Held<L, LAST, NT> held(ring, lanes, BOXES - LAST);
        ring.release();
        held.multiply(acc);
    }
}

// Stages of fewer boxes, because the expert has many rows.
template <class L, int NT>
DEVICE void accumulate_by_box(const Params& p, Ring& ring, const marlin::Lanes<L, NT>& lanes, bool busy, int units,
                              int boxes, float (&acc)[4][NT][4]) {
#pragma unroll 1
    for (int unit = 0; unit < units; unit += boxes) {
        ring.wait_full(p);
        if (busy) {
#pragma unroll 1
            for (int box = 0; box < boxes; ++box) marlin::Held<L, 1, NT>(ring, lanes, box).multiply(acc);
        }
        ring.release();
    }
}

template <int NT>
DEVICE void accumulate_boxes(const Params& p, Ring& ring, Product product, int count, int number) {
    using ForGateUp = marlin::LayoutOf<GateUp>;
    using ForDown = marlin::LayoutOf<Down>;
    const int warp = warp_anew(), lane = lane_anew();
    const int sharing = product.choose(ForGateUp::WARPS, ForDown::WARPS);
    const bool busy = sharing == cfg::MATH_WARPS || warp < sharing;  // small experts leave warps without a share
    const int boxes = product.stage_units(count);
    const auto place = product.gate_up ? marlin::Place::of<GateUp>(warp) : marlin::Place::of<Down>(warp);
    float acc[4][NT][4];
#pragma unroll
    for (int i = 0; i < 4; ++i) clear(acc[i]);
    if (boxes == product.choose(GateUp::BOXES, Down::BOXES)) {
        if (product.gate_up) {
            accumulate_whole_stages<GateUp>(p, ring, warp, lane, busy, count, acc);
        } else {
            accumulate_whole_stages<Down>(p, ring, warp, lane, busy, count, acc);
        }
    } else if (std::is_same_v<ForGateUp, ForDown> || product.gate_up) {
        const marlin::Lanes<ForGateUp, NT> lanes(place, lane, count, boxes);
        accumulate_by_box(p, ring, lanes, busy, product.units(), boxes, acc);
    } else {
        const marlin::Lanes<ForDown, NT> lanes(place, lane, count, boxes);
        accumulate_by_box(p, ring, lanes, busy, product.units(), boxes, acc);
    }
    wait_sums_taken(p, number);
    const int row = place.k_part * product.rows() + place.tile * 64;
#pragma unroll
    for (int i = 0; i < 4; ++i)
        if (busy) park(acc[i], row + i * 16);
}

// BF16.
template <int CHUNK, int NT>
DEVICE void accumulate_chunks(const Params& p, Ring& ring, int chunks, int number) {
    const ChunkShare<CHUNK, 2> share;
    float acc[NT][4];
    clear(acc);
#pragma unroll 1
    for (int chunk = 0; chunk < chunks; ++chunk) {
        ring.wait_full(p);
        const HeldChunk<CHUNK, NT> held(ring.weights() + share.weights, ring.tokens() + share.tokens);
        ring.release();
        held.multiply(acc);
    }
    wait_sums_taken(p, number);
    park(acc, warp_anew() * 16);
}

template <int NT>
DEVICE void accumulate_task(const Params& p, Ring& ring, Product product, int count, int number) {
    if constexpr (cfg::NVFP4) {
        accumulate_boxes<NT>(p, ring, product, count, number);
    } else {
        if (GateUp::CHUNK == Down::CHUNK || product.gate_up) {
            accumulate_chunks<GateUp::CHUNK, NT>(p, ring, product.units(), number);
        } else {
            accumulate_chunks<Down::CHUNK, NT>(p, ring, product.units(), number);
        }
    }
    arrive_warp(cfg::SUMS_PARKED_AT);
}

// number: of tasks before these.
DEVICE int accumulate_tasks(const Params& p, Ring& ring, Product product, int number) {
    Tasks tasks(product);
    for (Task task; tasks.next(task); ++number) {
        if (COLUMN_TILES == 1 || task.count <= 8) {
            accumulate_task<1>(p, ring, product, task.count, number);
        } else {
            accumulate_task<COLUMN_TILES>(p, ring, product, task.count, number);
        }
        mark(p, Point::TASK, task.index * product.blocks() + task.block);
    }
    return number;
}

// ---- the finishing warp: what becomes of the sums, while the math warps go on ----

template <class G>
DEVICE float task_sum(int local, int column) {
    constexpr int PARTS = cfg::NVFP4 ? G::K_PARTS : K_PARTS;
    float sum = shared_load<float>(reduce_at(local, column));
#pragma unroll
    for (int part = 1; part < PARTS; ++part)
        sum += shared_load<float>(reduce_at(part * Shape<G>::ROWS + local, column));
    return sum;
}

// F8, F9: gate and up of the same outputs meet here. NVFP4: fp32 up to the one rounding of the result; BF16 experts
// round both products as well (specification, section 4.1).
DEVICE void finish_gate_up(const Params& p, const Task& task) {
    using S = Shape<GateUp>;
    constexpr int PAIRS = S::SEGMENT_ROWS / 2;
    const float gate_scale = marlin::global_scale(p.gate_scale, task.expert),
                up_scale = marlin::global_scale(p.up_scale, task.expert);
    uint16_t* lines = p.activated + static_cast<int64_t>(routing::Table::first_line(task.index)) * cfg::MOE_INTER;
#pragma unroll 1
    for (int i = lane_index(); i < PAIRS * task.count; i += WARP) {
        const int local = i % PAIRS * 2, column = i / PAIRS;
        float value[2];
#pragma unroll
        for (int side = 0; side < 2; ++side) {
            float gate = task_sum<GateUp>(local + side, column) * gate_scale;
            float up = task_sum<GateUp>(S::SEGMENT_ROWS + local + side, column) * up_scale;
            if constexpr (!cfg::NVFP4) {
                gate = round_bf16(gate);
                up = round_bf16(up);
            }
            value[side] = gate * output_gate::sigmoid(gate) * up;
        }
        const int at = routing::expert_position(task.block * S::SEGMENT_ROWS + local);
        global_store(reinterpret_cast<uint32_t*>(lines + static_cast<int64_t>(column) * cfg::MOE_INTER + at),
                     pack_bf16x2(value[0], value[1]));
    }
}

// F10: expert_output [lines, MOE_HIDDEN] in fp32; BF16 experts hold bf16 values in it.
DEVICE void finish_down(const Params& p, const Task& task) {
    using S = Shape<Down>;
    const float scale = marlin::global_scale(p.down_scale, task.expert);
    float* lines = p.expert_output + static_cast<int64_t>(routing::Table::first_line(task.index)) * cfg::MOE_HIDDEN +
                   task.block * S::ROWS;
#pragma unroll 1
    for (int i = lane_index(); i < S::ROWS * task.count; i += WARP) {
        const int local = i % S::ROWS, column = i / S::ROWS;
        float y = task_sum<Down>(local, column) * scale;
        if constexpr (!cfg::NVFP4) y = round_bf16(y);
        global_store(lines + static_cast<int64_t>(column) * cfg::MOE_HIDDEN + local, y);
    }
}

DEVICE int finish_tasks(const Params& p, Product product, uint32_t epoch, int number) {
    Tasks tasks(product);
    for (Task task; tasks.next(task); ++number) {
        wait_mbarrier(p, cfg::SUMS_PARKED_AT, number & 1, protocol::Site::SUMS_PARKED);
        if (product.gate_up) {
            finish_gate_up(p, task);
        } else {
            finish_down(p, task);
        }
        arrive_warp(cfg::SUMS_TAKEN_AT);
        if (!cfg::SEPARATE && product.gate_up && lane_index() == 0)
            store_release(activation_flags(p, task.index) + task.block, activation_tag(epoch));
    }
    return number;
}

DEVICE void finish(const Params& p, uint32_t epoch) {
    int number = 0;
    for_products([&](Product product) { number = finish_tasks(p, product, epoch, number); });
    warp_sync();
    if (lane_index() == 0) add_release(counter_address(p, protocol::Counter::EXPERT_OUTPUT), 1u);
}

}  // namespace experts
