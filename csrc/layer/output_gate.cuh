// A6 (end) and A7: merge a head's splits in key order, norm over the head, times the sigmoid of the output gate.
#pragma once
#include "attention.cuh"
#include "scalar.cuh"

namespace output_gate {

// One warp: lane l has dimensions 2l and 2l + 1.
DEVICE void run_unit(const Params& p, const attention::Range& range, int row, int head) {
    const int position = static_cast<int>(global_load(p.positions + row));
    const int size = attention::split_size(p, position);
    const int oldest = position - p.window + 1 < 0 ? 0 : position - p.window + 1;
    // The row's own splits, counted from its own first one: company must not change the order of anything.
    const int first = oldest / size - range.first_split(size);
    const int splits = range.splits(size) - first;
    const int64_t at = static_cast<int64_t>(row * cfg::HEADS + head) * p.max_splits + first;
    const float2* state = reinterpret_cast<const float2*>(p.attention_state) + at;
    const float* sums = p.attention_sums + at * cfg::HEAD_DIM + 2 * lane_index();

    // Lane i knows the maxima and totals of splits i, i + 32, ...
    constexpr int TURNS = (cfg::SPLITS_CAP + 2 + WARP - 1) / WARP;
    float2 part[TURNS];
    float top = -infinity();
#pragma unroll
    for (int turn = 0; turn < TURNS; ++turn) {
        const int split = turn * WARP + lane_index();
        part[turn] = split < splits ? global_load(state + split) : float2{-infinity(), 0.f};
        top = part[turn].x > top ? part[turn].x : top;
    }
#pragma unroll
    for (int step = 16; step > 0; step /= 2) {
        const float other = shuffle_xor(top, step);
        top = other > top ? other : top;
    }
    float total = 0.f, low = 0.f, high = 0.f;
#pragma unroll
    for (int turn = 0; turn < TURNS; ++turn) {
        const float weight = part[turn].x == -infinity() ? 0.f : exponential_base2(part[turn].x - top);
        total += part[turn].y * weight;
        const int here = splits - turn * WARP < WARP ? splits - turn * WARP : WARP;
#pragma unroll 8
        for (int split = 0; split < here; ++split) {
            const float2 sum = global_load(
                reinterpret_cast<const float2*>(sums + static_cast<int64_t>(turn * WARP + split) * cfg::HEAD_DIM));
            const float scale = bits_float(shuffle(float_bits(weight), split));
            low += sum.x * scale;
            high += sum.y * scale;
        }
    }
    total = warp_sum(total);
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
