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
    // Units of a stage of a task whose expert has `count` rows.
    DEVICE static int stage_units(int count) {
        if constexpr (cfg::NVFP4) {
            return marlin::stage_boxes<G>(count);
        } else {
            return 1;
        }
    }
    DEVICE static int stage_bytes(int units) { return ROWS * UNIT * units / 16 * (cfg::NVFP4 ? 9 : 32); }  // weights
    // Row of the expert's matrix that row `local` of block `block` is.
    DEVICE static int weight_row(int block, int local) {
        return local / SEGMENT_ROWS * (G::N / G::SEGMENTS) + block * SEGMENT_ROWS + local % SEGMENT_ROWS;
    }
};

// One expert task of this CTA.
struct Task {
    int index, block, expert;  // index: of the expert in the table
    uint32_t rows;             // its rows, as a set
    int count;
};

// Walks this CTA's tasks of one product. Gate/up tasks are dealt round the CTAs, so some CTAs have one more than
// others. Down tasks are smaller: the first of them go to the others, as many as weigh as much as one gate/up task, the
// rest to all. The first experts come first either way, so that a down task finds its activations ready.
template <class G>
struct Tasks {
    static constexpr int GATE_UP_WORK = Shape<GateUp>::ROWS * GateUp::K, DOWN_WORK = Shape<Down>::ROWS * Down::K;
    static constexpr int RATIO = GATE_UP_WORK > DOWN_WORK ? (GATE_UP_WORK + DOWN_WORK / 2) / DOWN_WORK : 1;
    int at, stride, stop;  // of the stretch of the list that is being dealt
    int end;

    DEVICE Tasks() {
        const int active = routing::Table::active();
        end = active * Shape<G>::BLOCKS;
        at = cta_index();
        stride = cfg::SMS;
        stop = end;
        if constexpr (G::SEGMENTS == 1) {
            const int late = active * Shape<GateUp>::BLOCKS % cfg::SMS;  // CTAs with a gate/up task more
            if (cfg::SEPARATE || late == 0) return;
            stride = cfg::SMS - late;
            stop = RATIO * stride < end ? RATIO * stride : end;
            at = cta_index() < late ? stop : cta_index() - late;
        }
    }
    DEVICE bool next(Task& task) {
        if (at >= stop) {
            if (stop == end) return false;
            at = stop + cta_index();
            stride = cfg::SMS;
            stop = end;
            if (at >= end) return false;
        }
        task.index = at / Shape<G>::BLOCKS;
        task.block = at % Shape<G>::BLOCKS;
        task.expert = routing::Table::expert(task.index);
        task.rows = routing::Table::rows_of(task.expert);
        task.count = population_count(task.rows);
        at += stride;
        return true;
    }
};

template <class G>
DEVICE void load_weight_stage(const Params& p, const Ring& ring, const Task& task, int unit, int units,
                              uint64_t policy) {
    constexpr bool GATE_UP = G::SEGMENTS == 2;
    if constexpr (cfg::NVFP4) {
        marlin::load_stage<G>(ring, p.expert_boxes + (GATE_UP ? 0 : 2 * 128), task.expert, task.block, unit, units,
                              policy);
    } else {
        using S = Shape<G>;
        constexpr int ROW_BYTES = S::UNIT * 2;
        if (!elect_one()) return;
        mbarrier_arrive_expect(ring.full(), S::ROWS * ROW_BYTES);
        const uint16_t* base = static_cast<const uint16_t*>(GATE_UP ? p.gate_up : p.down) +
                               static_cast<int64_t>(task.expert) * G::N * G::K + unit * S::UNIT;
#pragma unroll 16
        for (int row = 0; row < S::ROWS; ++row) {
            bulk_load(ring.weights() + row_offset<ROW_BYTES>(row),
                      base + static_cast<int64_t>(S::weight_row(task.block, row)) * G::K, ROW_BYTES, ring.full(),
                      policy);
        }
    }
}

// Before load_weights, while there is time.
DEVICE void prepare_boxes(const Params& p) {
    if constexpr (cfg::NVFP4) {
        for (int i = 0; i < 4; ++i) acquire_boxes(p.expert_boxes + i * 128);
    }
}

template <class G>
DEVICE void load_weights(const Params& p, Ring& ring, uint64_t policy) {
    Tasks<G> tasks;
    for (Task task; tasks.next(task);) {
        const int units = Shape<G>::stage_units(task.count);
        for (int unit = 0; unit < Shape<G>::UNITS; unit += units) {
            ring.wait_empty(p);
            load_weight_stage<G>(p, ring, task, unit, units, policy);
            mark(p, Point::ISSUED, Shape<G>::stage_bytes(units) / 16);
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
template <class G>
DEVICE void load_tokens(const Params& p, Ring& ring, uint32_t epoch, uint64_t policy) {
    using S = Shape<G>;
    Tasks<G> tasks;
    for (Task task; tasks.next(task);) {
        const uint16_t* lines = p.expert_input;
        if constexpr (G::SEGMENTS == 1) {
            wait_activations(p, task.index, epoch);
            lines = p.activated + static_cast<int64_t>(routing::Table::first_line(task.index)) * G::K;
        }
        const int units = S::stage_units(task.count), row_bytes = units * S::UNIT * 2;
        for (int unit = 0; unit < S::UNITS; unit += units) {
            ring.wait_empty(p);
            if (elect_one()) {
                mbarrier_arrive_expect(ring.full(), task.count * row_bytes);
                uint32_t left = task.rows;
                for (int column = 0; column < task.count; ++column, left &= left - 1u) {
                    const int line = G::SEGMENTS == 1 ? column : lowest_bit(left);
                    bulk_load(ring.tokens() + row_offset(column, row_bytes),
                              lines + static_cast<int64_t>(line) * G::K + unit * S::UNIT, row_bytes, ring.full(),
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

template <class G, int NT>
DEVICE void accumulate_task(const Params& p, Ring& ring, int count, int number) {
    using S = Shape<G>;
    if constexpr (cfg::NVFP4) {
        constexpr int BUSY_WARPS = G::TILES * G::K_PARTS;  // small experts leave warps without a share
        const int thread = forget(thread_index());
        const bool busy = BUSY_WARPS == cfg::MATH_WARPS || thread / WARP < BUSY_WARPS;
        const int boxes = S::stage_units(count);
        const marlin::Lanes<G, NT> lanes(thread / WARP, thread % WARP, count, boxes * S::UNIT * 2);
        float acc[4][NT][4];
#pragma unroll
        for (int i = 0; i < 4; ++i) clear(acc[i]);
        for (int unit = 0; unit < S::UNITS; unit += boxes) {
            ring.wait_full(p);
            if (busy && boxes == G::BOXES) {
                constexpr int LAST = (G::BOXES + 1) / 2;  // half a stage at a time fits the registers
                if constexpr (LAST < G::BOXES) marlin::Held<G, G::BOXES - LAST, NT>(ring, lanes, 0).multiply(acc);
                const marlin::Held<G, LAST, NT> held(ring, lanes, G::BOXES - LAST);
                ring.release();
                held.multiply(acc);
                continue;
            }
            if (busy) {
#pragma unroll 1
                for (int box = 0; box < boxes; ++box) marlin::Held<G, 1, NT>(ring, lanes, box).multiply(acc);
            }
            ring.release();
        }
        wait_sums_taken(p, number);
        const int tile = thread / WARP % G::TILES, k_part = thread / WARP / G::TILES;
#pragma unroll
        for (int i = 0; i < 4; ++i)
            if (busy) park(acc[i], k_part * S::ROWS + tile * 64 + i * 16);
    } else {
        const ChunkShare<S::UNIT, 2> share;
        float acc[NT][4];
        clear(acc);
        for (int unit = 0; unit < S::UNITS; ++unit) {
            ring.wait_full(p);
            accumulate_bf16<S::UNIT>(acc, ring.weights() + share.weights, ring.tokens() + share.tokens);
            ring.release();
        }
        wait_sums_taken(p, number);
        park(acc, warp_index() / BLOCK_TILES * S::ROWS + warp_index() % BLOCK_TILES * 16);
    }
    arrive_warp(cfg::SUMS_PARKED_AT);
}

// number: of tasks before these.
template <class G>
DEVICE int accumulate_tasks(const Params& p, Ring& ring, int number) {
    Tasks<G> tasks;
    for (Task task; tasks.next(task); ++number) {
        if (COLUMN_TILES == 1 || task.count <= 8) {
            accumulate_task<G, 1>(p, ring, task.count, number);
        } else {
            accumulate_task<G, COLUMN_TILES>(p, ring, task.count, number);
        }
        mark(p, Point::TASK, task.index * Shape<G>::BLOCKS + task.block);
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
    for (int i = lane_index(); i < S::ROWS * task.count; i += WARP) {
        const int local = i % S::ROWS, column = i / S::ROWS;
        float y = task_sum<Down>(local, column) * scale;
        if constexpr (!cfg::NVFP4) y = round_bf16(y);
        global_store(lines + static_cast<int64_t>(column) * cfg::MOE_HIDDEN + local, y);
    }
}

template <class G>
DEVICE int finish_tasks(const Params& p, uint32_t epoch, int number) {
    Tasks<G> tasks;
    for (Task task; tasks.next(task); ++number) {
        wait_mbarrier(p, cfg::SUMS_PARKED_AT, number & 1, protocol::Site::SUMS_PARKED);
        if constexpr (G::SEGMENTS == 2) {
            finish_gate_up(p, task);
        } else {
            finish_down(p, task);
        }
        arrive_warp(cfg::SUMS_TAKEN_AT);
        if (!cfg::SEPARATE && G::SEGMENTS == 2 && lane_index() == 0)
            store_release(activation_flags(p, task.index) + task.block, activation_tag(epoch));
    }
    return number;
}

DEVICE void finish(const Params& p, uint32_t epoch) {
    finish_tasks<Down>(p, epoch, finish_tasks<GateUp>(p, epoch, 0));
    warp_sync();
    if (lane_index() == 0) add_release(counter_address(p, protocol::Counter::EXPERT_OUTPUT), 1u);
}

}  // namespace experts
