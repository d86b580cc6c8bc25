// Weights of a row's ids as integers, their sums, and where a running sum passes a target.
// exp((z - top) / temperature) is computed in fp32 and cut to multiples of 2^-44 of the largest. Integer sums have no
// order: a row's sums and draws are the same bits however the work is dealt out.
#pragma once
#include "instr/convert.cuh"
#include "request.cuh"
#include "together.cuh"

namespace mass {

using together::cta_barrier;
using together::shuffle_wide;
using together::Team;
using together::warp_sum;
using together::WARPS;

constexpr float ONE = 0x1p44f;
constexpr int SEGMENT = 256;  // ids; a lane has eight of them, in two groups of four
constexpr int SEGMENTS = (cfg::VOCAB + SEGMENT - 1) / SEGMENT;
static_assert(cfg::VOCAB % 4 == 0 && cfg::VOCAB <= (1 << 19), "groups of four, and a total below 2^63");

// Order of logits as unsigned integers; neither is NaN.
DEVICE uint32_t key_of(float z) {
    const uint32_t bits = float_bits(z + 0.f);  // -0 equals 0
    return (bits >> 31) != 0u ? ~bits : bits | 0x80000000u;
}
DEVICE float of_key(uint32_t key) { return bits_float((key >> 31) != 0u ? key & 0x7fffffffu : ~key); }

// One row under a temperature.
struct Row {
    const float* logits;
    float top, per_nat;

    DEVICE uint64_t weight(float z) const { return static_cast<uint64_t>(exponential((z - top) * per_nat) * ONE); }
};

// Sum over the lanes up to this one.
DEVICE uint64_t warp_prefix(uint64_t value) {
#pragma unroll
    for (int step = 1; step < WARP; step *= 2) {
        const uint64_t before = shuffle_wide(value, lane_index() >= step ? lane_index() - step : 0);
        if (lane_index() >= step) value += before;
    }
    return value;
}
DEVICE int first_lane(bool predicate) {
    const uint32_t bits = warp_ballot(predicate);
    return bits == 0u ? WARP : population_count((bits & (0u - bits)) - 1u);
}

// Calls body(id, z) for the four ids of every group this lane has in `segment`, which is this warp's.
template <class Body>
DEVICE void for_ids(const Row& row, int segment, Body body) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int id = segment * SEGMENT + half * (SEGMENT / 2) + lane_index() * 4;
        if (id >= cfg::VOCAB) continue;
        const float4 z = global_load(reinterpret_cast<const float4*>(row.logits + id));
        body(id, z.x);
        body(id + 1, z.y);
        body(id + 2, z.z);
        body(id + 3, z.w);
    }
}

// Calls body(segment) for the segments of this warp; the row's CTAs share them.
template <class Body>
DEVICE void for_segments(const Team& team, Body body) {
    const int first = team.share * WARPS + warp_index();
#pragma unroll 2
    for (int segment = first; segment < SEGMENTS; segment += cfg::SHARES * WARPS) body(segment);
}

// Leaves the segments' sums of value(id, z), an integer, in memory and returns the total. All CTAs of the row.
template <class Value>
DEVICE uint64_t sum_segments(Team& team, const Row& row, Value value) {
    uint64_t mine = 0;
    for_segments(team, [&](int segment) {
        uint64_t sum = 0;
        for_ids(row, segment, [&](int id, float z) { sum += value(id, z); });
        sum = warp_sum(sum);
        if (lane_index() == 0) {
            global_store(team.p.segment_sums + team.row * SEGMENTS + segment, sum);
            mine += sum;
        }
    });
    return team.sum(mine);
}

// The leader's threads, after sum_segments: the sums into its shared memory.
DEVICE void fetch_segments(const Team& team) {
    for (int i = thread_index(); i < SEGMENTS; i += cfg::THREADS) {
        shared_store(cfg::SEGMENTS_AT + i * 8, global_load(team.p.segment_sums + team.row * SEGMENTS + i));
    }
    cta_barrier();
}

// One warp of the leader, after fetch_segments of the same values: the first id whose running sum exceeds `target`,
// which is below the total.
template <class Value>
DEVICE int find(const Row& row, uint64_t target, Value value) {
    constexpr int PER_LANE = (SEGMENTS + WARP - 1) / WARP;
    const int first = lane_index() * PER_LANE;
    uint64_t sum = 0;
    for (int i = first; i < first + PER_LANE && i < SEGMENTS; ++i) {
        sum += shared_load<uint64_t>(cfg::SEGMENTS_AT + i * 8);
    }
    const uint64_t upto = warp_prefix(sum);
    const int lane = first_lane(upto > target);
    uint64_t before = shuffle_wide(upto - sum, lane);
    int segment = lane * PER_LANE;
    if (segment >= SEGMENTS) return cfg::VOCAB - 1;  // no total at all: a request whose numbers make no sense
    for (; segment + 1 < SEGMENTS; ++segment) {
        const uint64_t next = before + shared_load<uint64_t>(cfg::SEGMENTS_AT + segment * 8);
        if (next > target) break;
        before = next;
    }
    for (int step = 0; step < SEGMENT / WARP; ++step) {
        const int id = segment * SEGMENT + step * WARP + lane_index();
        const bool there = id < cfg::VOCAB;
        const uint64_t here = there ? value(id, global_load(row.logits + (there ? id : 0))) : 0u;
        const uint64_t running = before + warp_prefix(here);
        const int found = first_lane(running > target);
        if (found < WARP) return segment * SEGMENT + step * WARP + found;
        before = shuffle_wide(running, WARP - 1);
    }
    return cfg::VOCAB - 1;
}

// `find` by the leader's first warp; the id in all of the leader's threads.
template <class Value>
DEVICE int locate(const Row& row, uint64_t target, Value value) {
    if (warp_index() == 0) {
        const int id = find(row, target, value);
        if (lane_index() == 0) shared_store(cfg::FOUND_AT, id);
    }
    cta_barrier();
    const int id = shared_load<int>(cfg::FOUND_AT);
    cta_barrier();
    return id;
}

// floor(u * total) for u = bits * 2^-24: the first running sum above it is the first above u * total.
DEVICE uint64_t fraction(uint32_t bits, uint64_t total) {
    return (total >> 24) * bits + (((total & 0xffffffu) * bits) >> 24);
}

}  // namespace mass
