// A6 (end) and A7: merge a head's splits, norm over the head, times the sigmoid of the output gate.
#pragma once
#include "attention.cuh"
#include "row.cuh"

namespace output_gate {

// A team of warps has one (row, head). Half a warp is a chain: it takes every CHAINS-th of the row's own splits,
// counted from the row's first, a lane four dimensions; chains are joined in order. So company changes the order of
// nothing.
constexpr int TEAM = 4, TEAMS = cfg::MATH_WARPS / TEAM;
constexpr int CHAIN_LANES = cfg::HEAD_DIM / 4, CHAINS = TEAM * WARP / CHAIN_LANES;
constexpr int BATCH = 9;  // splits of a chain in flight: 2048 keys in one go
static_assert(CHAIN_LANES * 2 == WARP, "a warp is two chains");

// A chain in shared memory: sums of the dimensions, maximum, total. Two turns lie side by side, so that one barrier per
// turn is enough.
constexpr uint32_t CHAIN_BYTES = (cfg::HEAD_DIM + 4) * 4;
static_assert(2 * TEAMS * CHAINS * CHAIN_BYTES <= cfg::MERGE_BYTES, "the chains of two turns fit the reduction buffer");
DEVICE uint32_t chain_at(int turn, int chain) {
    const int team = warp_index() / TEAM;
    return cfg::REDUCE_AT + (((turn & 1) * TEAMS + team) * CHAINS + chain) * CHAIN_BYTES;
}

DEVICE float factor(float maximum, float top) { return top == -infinity() ? 0.f : exponential_base2(maximum - top); }

// This chain's part of the `splits` splits of a (row, head), of which `line` is the first.
DEVICE void merge_chain(const Params& p, int64_t line, int splits, int turn) {
    const int chain = warp_index() % TEAM * 2 + lane_index() / CHAIN_LANES, lane = lane_index() % CHAIN_LANES;
    float top = -infinity(), total = 0.f;
    float4 sum{0.f, 0.f, 0.f, 0.f};
#pragma unroll 1
    for (int from = chain; from < splits; from += CHAINS * BATCH) {
        float2 state[BATCH];
        float4 more[BATCH];
        float higher = top;
#pragma unroll
        for (int i = 0; i < BATCH; ++i) {
            const int64_t at = line + from + CHAINS * i;
            const bool there = from + CHAINS * i < splits;
            state[i] = float2{-infinity(), 0.f};
            more[i] = float4{0.f, 0.f, 0.f, 0.f};
            if (there) {
                state[i] = global_load(reinterpret_cast<const float2*>(p.attention_state) + at);
                more[i] = global_load(reinterpret_cast<const float4*>(p.attention_sums) + at * CHAIN_LANES + lane);
            }
        }
#pragma unroll
        for (int i = 0; i < BATCH; ++i) higher = larger(higher, state[i].x);
        const float shrink = factor(top, higher);
        top = higher;
        total *= shrink;
        sum = times(sum, shrink);
#pragma unroll
        for (int i = 0; i < BATCH; ++i) {
            const float scale = factor(state[i].x, top);
            total += state[i].y * scale;
            sum.x += more[i].x * scale;
            sum.y += more[i].y * scale;
            sum.z += more[i].z * scale;
            sum.w += more[i].w * scale;
        }
    }
    const uint32_t at = chain_at(turn, chain);
    shared_store(at + lane * 16, sum);
    if (lane == 0) shared_store(at + cfg::HEAD_DIM * 4, float2{top, total});
}

// One warp: joins the chains; lane l has dimensions 2l and 2l + 1.
DEVICE void finish(const Params& p, int row, int head, uint32_t gate, int turn) {
    float2 state[CHAINS];
    float top = -infinity(), total = 0.f, low = 0.f, high = 0.f;
#pragma unroll
    for (int chain = 0; chain < CHAINS; ++chain) {
        state[chain] = shared_load<float2>(chain_at(turn, chain) + cfg::HEAD_DIM * 4);
        top = larger(top, state[chain].x);
    }
#pragma unroll
    for (int chain = 0; chain < CHAINS; ++chain) {
        const float2 sum = shared_load<float2>(chain_at(turn, chain) + lane_index() * 8);
        const float scale = factor(state[chain].x, top);
        total += state[chain].y * scale;
        low += sum.x * scale;
        high += sum.y * scale;
    }
    const float part = 1.f / total;
    low = round_bf16(low * part);
    high = round_bf16(high * part);
    const float scale = reciprocal_root(warp_sum(low * low + high * high) / cfg::HEAD_DIM + cfg::RMS_EPS);
    const float gated_low = low * scale * sigmoid(bf16_to_float(gate & 0xffffu));
    const float gated_high = high * scale * sigmoid(bf16_to_float(gate >> 16));
    uint32_t* gated = reinterpret_cast<uint32_t*>(p.gated) + (row * cfg::HEADS + head) * WARP + lane_index();
    global_store(gated, pack_bf16x2(gated_low, gated_high));
}

DEVICE void run(const Params& p, const attention::Rows& rows) {
    const int units = p.rows * cfg::HEADS;
    int unit = cta_index() + cfg::SMS * (warp_index() / TEAM);
#pragma unroll 1
    for (int turn = 0; turn * cfg::SMS * TEAMS < units; ++turn, unit += cfg::SMS * TEAMS) {
        const bool here = unit < units;
        const int row = here ? unit / cfg::HEADS : 0, head = unit % cfg::HEADS;
        const int position = rows.position_of(row), shift = rows.shift_of(row);
        const int oldest = position - p.window + 1 < 0 ? 0 : position - p.window + 1;
        const int first = (oldest >> shift) - rows.first_split(shift);
        const int splits = here ? rows.splits(shift) - first : 0;
        uint32_t gate = 0u;
        if (here) gate = global_load(reinterpret_cast<const uint32_t*>(p.gate) + unit * WARP + lane_index());
        merge_chain(p, static_cast<int64_t>(unit) * p.max_splits + first, splits, turn);
        math_barrier();
        if (here && warp_index() % TEAM == 0) finish(p, row, head, gate, turn);
    }
}

}  // namespace output_gate
