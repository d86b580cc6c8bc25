// Math side of the experts' tasks, and the finishing warp.
#pragma once
#include "expert_load.cuh"

namespace experts {

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
