// B5: attention of the block's rows over the draft's paged context and over the block itself, split over key ranges.
// Key index i < length is position i of the context; length + r is row r of the block. A split covers KV_SPLIT
// consecutive indices, counted from key 0.
#pragma once
#include "instr/mma.cuh"
#include "layer/gemm.cuh"
#include "products.cuh"

namespace attention {

constexpr int GROUP = cfg::HEADS / cfg::KV_HEADS;       // query heads per KV head
constexpr int KEYS = 16;                                // keys in flight per warp
constexpr int SLICES = cfg::HEAD_DIM / 32;              // a lane has eight of every 32 dimensions
constexpr int SIDES = 2, SIDE_SLICES = SLICES / SIDES;  // sums of half the dimensions are all that registers can hold
static_assert(cfg::KV_SPLIT % KEYS == 0, "a split is whole chunks of keys");

struct Range {
    int length, first, end;

    DEVICE explicit Range(const Params& p) {
        length = global_load(p.length);
        end = length + p.rows;
        first = length - cfg::WINDOW + 1 < 0 ? 0 : length - cfg::WINDOW + 1;
    }
    DEVICE int first_split() const { return first / cfg::KV_SPLIT; }
    DEVICE int splits() const { return (end - 1) / cfg::KV_SPLIT + 1 - first_split(); }
    // Row `row` of the block and key index `key`.
    DEVICE bool sees(int row, int key) const {
        if (key >= end) return false;
        if (key < length) return length + row - key < cfg::WINDOW;
        return !cfg::CAUSAL || key - length <= row;
    }
};

// Where a key lies: a slot of the cache (>= 0), row r of the block (-2 - r), or nowhere (-1): of a key that nobody
// sees, zeros stand in, so that no stale slot is ever read.
DEVICE int place_of(const Params& p, const Range& range, int index) {
    if (index < range.first || index >= range.end) return -1;
    return index < range.length ? global_load(p.page_table + index) : -2 - (index - range.length);
}

// This lane's dimensions of a key or a value: 32 slice + 8 t .., from the cache or from the block's rows.
DEVICE uint4 load_slice(const uint16_t* cache, const uint16_t* rows, int place, int kv_head, int slice) {
    if (place == -1) return uint4{0u, 0u, 0u, 0u};
    const int line = (place >= 0 ? place : -2 - place) * cfg::KV_HEADS + kv_head;
    const int unit = line * (cfg::HEAD_DIM / 8) + lane_index() % 4 + 4 * slice;
    return global_load(reinterpret_cast<const uint4*>(place >= 0 ? cache : rows) + unit);
}

// One warp: queries of tile `tile` against split `split` of KV head `kv_head`; half `side` of the values' dimensions.
DEVICE void run_unit(const Params& p, const Range& range, int split, int kv_head, int tile, int side) {
    const int g = lane_index() / 4, t = lane_index() % 4;
    const int split_first = (range.first_split() + split) * cfg::KV_SPLIT;
    int ahead = place_of(p, range, split_first + lane_index() % KEYS);  // of the next chunk's keys, one per lane
    int row[2], head[2];
    uint4 query[2][SLICES] = {};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int pair = tile * 16 + g + 8 * half;
        row[half] = pair / GROUP;
        head[half] = kv_head * GROUP + pair % GROUP;
        if (row[half] < p.rows) {
            const uint16_t* q = p.query + (row[half] * cfg::HEADS + head[half]) * cfg::HEAD_DIM + 8 * t;
#pragma unroll
            for (int slice = 0; slice < SLICES; ++slice) {
                query[half][slice] = global_load(reinterpret_cast<const uint4*>(q + 32 * slice));
            }
        }
    }
    float out[4 * SIDE_SLICES][4];
    clear(out);
    float highest[2] = {-infinity(), -infinity()}, total[2] = {0.f, 0.f};
    const int split_end = split_first + cfg::KV_SPLIT < range.end ? split_first + cfg::KV_SPLIT : range.end;

    for (int first = split_first; first < split_end; first += KEYS) {
        // Lane g looks after keys g and g + 8. Values are asked for first: they arrive while the scores are made.
        const uint32_t here = static_cast<uint32_t>(ahead);
        ahead = place_of(p, range, first + KEYS + lane_index() % KEYS);
        const int place[2] = {static_cast<int>(shuffle(here, g)), static_cast<int>(shuffle(here, 8 + g))};
        uint4 value[2][SIDE_SLICES];
#pragma unroll
        for (int block = 0; block < 2; ++block) {
#pragma unroll
            for (int slice = 0; slice < SIDE_SLICES; ++slice) {
                value[block][slice] =
                    load_slice(p.value_cache, p.block_values, place[block], kv_head, side * SIDE_SLICES + slice);
            }
        }
        float score[2][4];
        clear(score);
#pragma unroll
        for (int block = 0; block < 2; ++block) {
            warp_sync();  // keeps the second block's loads from being hoisted above the first's: registers are short
#pragma unroll
            for (int slice = 0; slice < SLICES; ++slice) {
                const uint4 k = load_slice(p.key_cache, p.block_keys, place[block], kv_head, slice);
                const uint4 low = query[0][slice], high = query[1][slice];
                mma_bf16(score[block], low.x, high.x, low.y, high.y, k.x, k.y);
                mma_bf16(score[block], low.z, high.z, low.w, high.w, k.z, k.w);
            }
        }
        // Online softmax in base 2; a row's maximum and sum lie in the four lanes that share g.
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float top = highest[half];
#pragma unroll
            for (int block = 0; block < 2; ++block) {
#pragma unroll
                for (int c = 0; c < 2; ++c) {
                    const bool seen = row[half] < p.rows && range.sees(row[half], first + block * 8 + 2 * t + c);
                    float& s = score[block][2 * half + c];
                    s = seen ? s * cfg::SCORE_SCALE_LOG2 : -infinity();
                    top = s > top ? s : top;
                }
            }
#pragma unroll
            for (int step = 1; step < 4; step *= 2) {
                const float other = shuffle_xor(top, step);
                top = other > top ? other : top;
            }
            const bool none = top == -infinity();
            const float shrink = none ? 1.f : exponential_base2(highest[half] - top);
            highest[half] = top;
            float sum = 0.f;
#pragma unroll
            for (int block = 0; block < 2; ++block) {
#pragma unroll
                for (int c = 0; c < 2; ++c) {
                    float& s = score[block][2 * half + c];
                    s = none ? 0.f : exponential_base2(s - top);
                    sum += s;
                }
            }
#pragma unroll
            for (int step = 1; step < 4; step *= 2) sum += shuffle_xor(sum, step);
            total[half] = total[half] * shrink + sum;
#pragma unroll
            for (int i = 0; i < 4 * SIDE_SLICES; ++i) {
                out[i][2 * half] *= shrink;
                out[i][2 * half + 1] *= shrink;
            }
        }
        // The scores' sum layout is the layout of the next product's row operand. Values are transposed across the
        // warp: word i of slice s transposes to dimensions 32 s + 8 (n / 2) + 2 i + n % 2.
        const uint32_t a0 = pack_bf16x2(score[0][0], score[0][1]), a1 = pack_bf16x2(score[0][2], score[0][3]);
        const uint32_t a2 = pack_bf16x2(score[1][0], score[1][1]), a3 = pack_bf16x2(score[1][2], score[1][3]);
#pragma unroll
        for (int slice = 0; slice < SIDE_SLICES; ++slice) {
            const uint4 v0 = value[0][slice], v1 = value[1][slice];
            mma_bf16(out[slice * 4 + 0], a0, a1, a2, a3, transpose_8x8(v0.x), transpose_8x8(v1.x));
            mma_bf16(out[slice * 4 + 1], a0, a1, a2, a3, transpose_8x8(v0.y), transpose_8x8(v1.y));
            mma_bf16(out[slice * 4 + 2], a0, a1, a2, a3, transpose_8x8(v0.z), transpose_8x8(v1.z));
            mma_bf16(out[slice * 4 + 3], a0, a1, a2, a3, transpose_8x8(v0.w), transpose_8x8(v1.w));
        }
    }

#pragma unroll
    for (int half = 0; half < 2; ++half) {
        if (row[half] >= p.rows) continue;
        const int64_t at = static_cast<int64_t>(row[half] * cfg::HEADS + head[half]) * cfg::MAX_SPLITS + split;
        float* sums = p.attention_sums + at * cfg::HEAD_DIM + 32 * side * SIDE_SLICES + 8 * t;
#pragma unroll
        for (int slice = 0; slice < SIDE_SLICES; ++slice) {
#pragma unroll
            for (int i = 0; i < 4; i += 2) {
                const float (&a)[4] = out[slice * 4 + i];
                const float (&b)[4] = out[slice * 4 + i + 1];
                global_store(reinterpret_cast<float4*>(sums + 32 * slice + 2 * i),
                             float4{a[2 * half], a[2 * half + 1], b[2 * half], b[2 * half + 1]});
            }
        }
        if (t == 0 && side == 0) {
            global_store(reinterpret_cast<float2*>(p.attention_state) + at, float2{highest[half], total[half]});
        }
    }
}

// (split, KV head) pairs are dealt to the CTAs, query tiles to the warps.
DEVICE void run(const Params& p, uint32_t epoch) {
    wait_counter_math(p, protocol::Counter::HEADS_READY, epoch);
    const Range range(p);
    const int pairs = range.splits() * cfg::KV_HEADS;
    const int tiles = (p.rows * GROUP + 15) / 16;
    int turn = 0;
    for (int pair = cta_index(); pair < pairs; pair += cfg::SMS) {
        for (int unit = 0; unit < tiles * SIDES; ++unit, ++turn) {
            if (turn % cfg::MATH_WARPS == warp_index()) {
                run_unit(p, range, pair / cfg::KV_HEADS, pair % cfg::KV_HEADS, unit / SIDES, unit % SIDES);
            }
        }
    }
    arrive_math(p, protocol::Counter::ATTENTION);
}

// One warp merges the splits of one head of one row in key order: lane l has dimensions 4l .. 4l + 3.
DEVICE void merge_unit(const Params& p, const Range& range, int row, int head) {
    static_assert(cfg::HEAD_DIM == 4 * WARP, "four dimensions per lane");
    const int64_t at = static_cast<int64_t>(row * cfg::HEADS + head) * cfg::MAX_SPLITS;
    const float2* state = reinterpret_cast<const float2*>(p.attention_state) + at;
    const float* sums = p.attention_sums + at * cfg::HEAD_DIM + 4 * lane_index();
    // Lane l looks after the states of splits l, l + 32, ...
    constexpr int TURNS = (cfg::MAX_SPLITS + WARP - 1) / WARP;
    const int splits = range.splits();
    float2 mine[TURNS];
    float top = -infinity();
#pragma unroll
    for (int turn = 0; turn < TURNS; ++turn) {
        const int split = turn * WARP + lane_index();
        mine[turn] = split < splits ? global_load(state + split) : float2{-infinity(), 0.f};
        top = mine[turn].x > top ? mine[turn].x : top;
    }
#pragma unroll
    for (int step = 16; step > 0; step /= 2) {
        const float other = shuffle_xor(top, step);
        top = other > top ? other : top;
    }
    float total = 0.f;
    float4 o{0.f, 0.f, 0.f, 0.f};
#pragma unroll
    for (int turn = 0; turn < TURNS; ++turn) {
        const float share = mine[turn].x == -infinity() ? 0.f : exponential_base2(mine[turn].x - top);
        const int here = splits - turn * WARP < WARP ? splits - turn * WARP : WARP;
#pragma unroll 8
        for (int i = 0; i < here; ++i) {
            const int64_t split = turn * WARP + i;
            const float4 sum = global_load(reinterpret_cast<const float4*>(sums + split * cfg::HEAD_DIM));
            const float weight = bits_float(shuffle(float_bits(share), i));
            total += bits_float(shuffle(float_bits(mine[turn].y), i)) * weight;
            o = float4{o.x + sum.x * weight, o.y + sum.y * weight, o.z + sum.z * weight, o.w + sum.w * weight};
        }
    }
    uint16_t* out = p.attended + (row * cfg::HEADS + head) * cfg::HEAD_DIM + 4 * lane_index();
    global_store(reinterpret_cast<uint2*>(out),
                 uint2{pack_bf16x2(o.x / total, o.y / total), pack_bf16x2(o.z / total, o.w / total)});
}

DEVICE void merge(const Params& p, uint32_t epoch) {
    wait_counter_math(p, protocol::Counter::ATTENTION, epoch);
    const Range range(p);
    const int units = p.rows * cfg::HEADS;
    for (int unit = cta_index() + cfg::SMS * warp_index(); unit < units; unit += cfg::SMS * cfg::MATH_WARPS) {
        merge_unit(p, range, unit / cfg::HEADS, unit % cfg::HEADS);
    }
    arrive_math(p, protocol::Counter::ATTENDED);
}

}  // namespace attention
