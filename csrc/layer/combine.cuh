// F11, F12: every expert's row is normed by itself (weight first), then the weighted sum in slot order.
#pragma once
#include "experts.cuh"

namespace combine {

// Line of slot `slot` of a row, or -1 when the expert lives on another rank.
DEVICE int line_of(const Params& p, int row, int slot) {
    const int expert = global_load(p.route_ids + row * cfg::TOP_K + slot) - p.first_expert;
    return expert >= 0 && expert < cfg::LOCAL_EXPERTS ? routing::Table::line(row, expert) : -1;
}

static_assert(cfg::TOP_K <= WARP, "a lane looks after a slot");
constexpr int BATCH = 3;  // lines whose values a thread holds at once

// A thread has the same columns of all lines, so they are read once: squares first, then the weighted sum.
DEVICE void combine_row(const Params& p, uint32_t epoch, int row) {
    using Columns = RowColumns<cfg::MOE_HIDDEN>;
    const GammaColumns<cfg::MOE_HIDDEN> gamma(p.post_expert_norm);
    const int slot = lane_index() < cfg::TOP_K ? lane_index() : 0;
    const int line = line_of(p, row, slot);
    const float omega = global_load(p.route_weights + row * cfg::TOP_K + slot);
    wait_counter_math(p, protocol::Counter::EXPERT_OUTPUT, epoch);
    float4 sum[Columns::GROUPS] = {};
    uint32_t left = warp_ballot(lane_index() < cfg::TOP_K && line >= 0), turn = 0;
#pragma unroll 1
    for (; left != 0u; turn ^= 1u) {
        bool there[BATCH];
        float weight[BATCH];
        float4 y[BATCH][Columns::GROUPS];
#pragma unroll
        for (int i = 0; i < BATCH; ++i) {
            there[i] = left != 0u;
            const int from = there[i] ? lowest_bit(left) : 0;
            left &= left - 1u;
            weight[i] = bits_float(shuffle(float_bits(omega), from));
            const float* values =
                p.expert_output + static_cast<int64_t>(shuffle(static_cast<uint32_t>(line), from)) * cfg::MOE_HIDDEN;
            if (there[i]) {
                for_columns<cfg::MOE_HIDDEN>([&](int group, int column) { y[i][group] = load_f32x4(values + column); });
            }
        }
        // [2 turns][line][warp] sums of squares of (1 + w) y; turns alternate, so one barrier is enough.
        const uint32_t squares_at = cfg::REDUCE_AT + turn * (BATCH * cfg::MATH_WARPS * 4);
#pragma unroll
        for (int i = 0; i < BATCH; ++i) {
            if (!there[i]) break;
            float squares = 0.f;
            for_columns<cfg::MOE_HIDDEN>([&](int group, int) {
                y[i][group] = times(y[i][group], gamma.centred(group));
                squares += square_sum(y[i][group]);
            });
            squares = output_gate::warp_sum(squares);
            if (lane_index() == 0) shared_store(squares_at + (i * cfg::MATH_WARPS + warp_index()) * 4, squares);
        }
        math_barrier();
#pragma unroll
        for (int i = 0; i < BATCH; ++i) {
            if (!there[i]) break;
            float squares = 0.f;
#pragma unroll
            for (int warp = 0; warp < cfg::MATH_WARPS; ++warp) {
                squares += shared_load<float>(squares_at + (i * cfg::MATH_WARPS + warp) * 4);
            }
            const float scale = reciprocal_root(squares / cfg::MOE_HIDDEN + cfg::POST_EPS);
            for_columns<cfg::MOE_HIDDEN>([&](int group, int) {
                const float4 m = times(y[i][group], scale);
                float4& s = sum[group];
                s = float4{s.x + weight[i] * m.x, s.y + weight[i] * m.y, s.z + weight[i] * m.z,
                           s.w + weight[i] * m.w};
            });
        }
    }
    uint16_t* out = p.combined + row * cfg::MOE_HIDDEN;
    Exchange::combined_experts(
        p, epoch, row, [&](int group, int) { return sum[group]; },
        [&](int column, const uint2& columns) { global_store(reinterpret_cast<uint2*>(out + column), columns); });
}

DEVICE void run(const Params& p, uint32_t epoch) {
    boundary::for_owned_rows(p, protocol::Counter::COMBINED, 3, [&](int row) { combine_row(p, epoch, row); });
}

}  // namespace combine
