// F11, F12: every expert's row is normed by itself (weight first), then the weighted sum in slot order.
#pragma once
#include "experts.cuh"

namespace combine {

// Sum of squares of ((1 + w) y) over one line, by one warp.
DEVICE float line_squares(const Params& p, const float* line) {
    float squares = 0.f;
#pragma unroll 16
    for (int column = lane_index() * 4; column < cfg::MOE_HIDDEN; column += WARP * 4) {
        squares += square_sum(times(load_f32x4(line + column), centred_gamma(p.post_expert_norm + column)));
    }
    return output_gate::warp_sum(squares);
}

// Line of slot `slot` of a row, or -1 when the expert lives on another rank.
DEVICE int line_of(const Params& p, int row, int slot) {
    const int expert = global_load(p.route_ids + row * cfg::TOP_K + slot) - p.first_expert;
    return expert >= 0 && expert < cfg::LOCAL_EXPERTS ? routing::Table::line(row, expert) : -1;
}

DEVICE void combine_row(const Params& p, uint32_t epoch, int row) {
    const uint32_t scale_at = cfg::REDUCE_AT;  // [TOP_K] the norm's factors, then lines, then omegas
    for (int slot = warp_index(); slot < cfg::TOP_K; slot += cfg::MATH_WARPS) {
        const int line = line_of(p, row, slot);
        float factor = 0.f;
        if (line >= 0) {
            const float squares = line_squares(p, p.expert_output + static_cast<int64_t>(line) * cfg::MOE_HIDDEN);
            factor = reciprocal_root(squares / cfg::MOE_HIDDEN + cfg::POST_EPS);
        }
        if (lane_index() == 0) {
            shared_store(scale_at + slot * 4, factor);
            shared_store(scale_at + (cfg::TOP_K + slot) * 4, line);
            shared_store(scale_at + (2 * cfg::TOP_K + slot) * 4,
                         global_load(p.route_weights + row * cfg::TOP_K + slot));
        }
    }
    math_barrier();
    const auto local = [&](int column) {
        const float4 gamma = centred_gamma(p.post_expert_norm + column);
        float4 sum{0.f, 0.f, 0.f, 0.f};
        float4 y[cfg::TOP_K];
#pragma unroll
        for (int slot = 0; slot < cfg::TOP_K; ++slot) {
            const int line = shared_load<int>(scale_at + (cfg::TOP_K + slot) * 4);
            y[slot] = float4{0.f, 0.f, 0.f, 0.f};
            if (line >= 0)
                y[slot] = load_f32x4(p.expert_output + static_cast<int64_t>(line) * cfg::MOE_HIDDEN + column);
        }
#pragma unroll
        for (int slot = 0; slot < cfg::TOP_K; ++slot) {
            const float4 m = times(times(y[slot], gamma), shared_load<float>(scale_at + slot * 4));
            const float omega = shared_load<float>(scale_at + (2 * cfg::TOP_K + slot) * 4);
            sum = float4{sum.x + omega * m.x, sum.y + omega * m.y, sum.z + omega * m.z, sum.w + omega * m.w};
        }
        return sum;
    };
    Exchange::combined_experts(p, epoch, row, local, [&](int, int column, const float4& sum) {
        store_bf16x4(p.combined + row * cfg::MOE_HIDDEN + column, sum);
    });
}

DEVICE void run(const Params& p, uint32_t epoch) {
    using protocol::Counter;
    boundary::for_owned_rows(
        p, Counter::COMBINED, [&] { wait_counter_math(p, Counter::EXPERT_OUTPUT, epoch); },
        [&](int row, auto ready) {
            ready();
            combine_row(p, epoch, row);
        });
}

}  // namespace combine
