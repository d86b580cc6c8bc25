// A6 (end) and A7: merge a head's splits in key order, norm over the head, times the sigmoid of the output gate.
#pragma once
#include "attention.cuh"
#include "scalar.cuh"

namespace output_gate {

constexpr int64_t UNITS_CAP = static_cast<int64_t>(cfg::ROW_CAP) * cfg::HEADS;

// One warp: lane l has dimensions 2l and 2l + 1.
DEVICE void run_unit(const Params& p, const attention::Range& range, int row, int head) {
    const int position = static_cast<int>(global_load(p.positions + row));
    const int oldest = position - p.window + 1 < 0 ? 0 : position - p.window + 1;
    const int first = oldest / cfg::KV_SPLIT - range.first_split();
    const int splits = range.splits();
    const int64_t at = static_cast<int64_t>(row * cfg::HEADS + head) * p.max_splits;
    const float2* state = reinterpret_cast<const float2*>(p.attention_state) + at;
    const float* sums = p.attention_sums + at * cfg::HEAD_DIM + 2 * lane_index();

    float top = -infinity();
    for (int split = first; split < splits; ++split) {
        const float highest = global_load(state + split).x;
        top = highest > top ? highest : top;
    }
    float total = 0.f, low = 0.f, high = 0.f;
#pragma unroll 4
    for (int split = first; split < splits; ++split) {
        const float2 part = global_load(state + split);
        const float2 sum =
            global_load(reinterpret_cast<const float2*>(sums + static_cast<int64_t>(split) * cfg::HEAD_DIM));
        const float weight = part.x == -infinity() ? 0.f : exponential_base2(part.x - top);
        total += part.y * weight;
        low += sum.x * weight;
        high += sum.y * weight;
    }
    low = bf16_to_float(float_to_bf16(low / total));
    high = bf16_to_float(float_to_bf16(high / total));
    const float scale = reciprocal_root(warp_sum(low * low + high * high) / cfg::HEAD_DIM + cfg::RMS_EPS);
    const int element = (row * cfg::HEADS + head) * cfg::HEAD_DIM + 2 * lane_index();
    const uint32_t gate = global_load(reinterpret_cast<const uint32_t*>(p.gate + element));
    const float gated_low = low * scale * sigmoid(bf16_to_float(gate & 0xffffu));
    const float gated_high = high * scale * sigmoid(bf16_to_float(gate >> 16));
    global_store(reinterpret_cast<uint32_t*>(p.gated + element), pack_bf16x2(gated_low, gated_high));
}

DEVICE void run(const Params& p, uint32_t epoch) {
    wait_counter_math(p, protocol::Counter::ATTENTION, epoch);
    const attention::Range range(p);
    const int units = p.rows * cfg::HEADS;
    for (int unit = cta_index() + cfg::SMS * warp_index(); unit < units; unit += cfg::SMS * cfg::MATH_WARPS) {
        run_unit(p, range, unit / cfg::HEADS, unit % cfg::HEADS);
    }
    arrive_math(p, protocol::Counter::GATED);
}

}  // namespace output_gate
