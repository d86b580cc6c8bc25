// A6: attention of the step's rows over the paged cache, split over key ranges (flash decoding).
// A split covers SPLIT consecutive key indices, counted from key 0; a row's partial of a split depends on that row's
// query, position and mask alone. Key index i < length is position i of the committed sequence; length + r is row r of
// this step.
#pragma once
#include "instr/convert.cuh"
#include "instr/mma.cuh"
#include "wait.cuh"

namespace attention {

constexpr int GROUP = cfg::HEADS / cfg::KV_HEADS;        // query heads per KV head
constexpr int TILES = (cfg::ROW_CAP * GROUP + 15) / 16;  // m16 tiles of (row, query head) pairs
constexpr int KEYS = 32;                                 // keys in flight per warp
constexpr int KEY_BLOCKS = KEYS / 8;
static_assert(cfg::KV_SPLIT % KEYS == 0, "a split is whole chunks of keys");

// The key range [first, end) that any row of the step sees, and its splits.
struct Range {
    int length, first, end;

    DEVICE explicit Range(const Params& p) {
        length = global_load(p.length);
        end = length + p.rows;
        first = length;
        for (int row = 0; row < p.rows; ++row) {
            const int seen = static_cast<int>(global_load(p.positions + row)) - p.window + 1;
            first = seen < first ? seen : first;
        }
        first = first < 0 ? 0 : first;
    }
    DEVICE int first_split() const { return first / cfg::KV_SPLIT; }
    DEVICE int splits() const { return (end - 1) / cfg::KV_SPLIT + 1 - first_split(); }
};

// What decides which keys a row sees.
struct RowView {
    int position;
    uint32_t ancestors;

    DEVICE RowView(const Params& p, int row) {
        const bool real = row < p.rows;
        position = real ? static_cast<int>(global_load(p.positions + row)) : -1;
        ancestors = real ? global_load(p.ancestors + row) : 0u;
    }
    DEVICE bool sees(const Params& p, const Range& range, int key) const {
        if (position < 0 || key >= range.end) return false;
        if (key < range.length) return position - key < p.window;
        const int row = key - range.length;
        return ((ancestors >> row) & 1u) != 0u &&
               position - static_cast<int>(global_load(p.positions + row)) < p.window;
    }
};

// Eight of a key's or value's dimensions as bf16 pairs.
DEVICE uint4 load_cached(const void* cache, int64_t element) {
    if constexpr (cfg::FP8_CACHE) {
        const uint2 bytes = global_load(reinterpret_cast<const uint2*>(static_cast<const uint8_t*>(cache) + element));
        return uint4{e4m3x2_to_bf16x2(bytes.x & 0xffffu), e4m3x2_to_bf16x2(bytes.x >> 16),
                     e4m3x2_to_bf16x2(bytes.y & 0xffffu), e4m3x2_to_bf16x2(bytes.y >> 16)};
    } else {
        return global_load(reinterpret_cast<const uint4*>(static_cast<const uint16_t*>(cache) + element));
    }
}

// One warp: queries of tile `tile` against split `split` of KV head `kv_head`.
DEVICE void run_unit(const Params& p, const Range& range, int split, int kv_head, int tile) {
    const int g = lane_index() / 4, t = lane_index() % 4;
    int row[2], head[2];
    uint4 query[2][2] = {};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int pair = tile * 16 + g + 8 * half;
        row[half] = pair / GROUP;
        head[half] = kv_head * GROUP + pair % GROUP;
        if (row[half] < p.rows) {
            const uint16_t* q = p.query + (row[half] * cfg::HEADS + head[half]) * cfg::HEAD_DIM + 8 * t;
            query[half][0] = global_load(reinterpret_cast<const uint4*>(q));
            query[half][1] = global_load(reinterpret_cast<const uint4*>(q + 32));
        }
    }
    const RowView view[2] = {RowView(p, row[0]), RowView(p, row[1])};

    float out[8][4];
    clear(out);
    float highest[2] = {-infinity(), -infinity()}, total[2] = {0.f, 0.f};
    const int split_first = (range.first_split() + split) * cfg::KV_SPLIT;
    const int split_end = split_first + cfg::KV_SPLIT < range.end ? split_first + cfg::KV_SPLIT : range.end;

    for (int first = split_first; first < split_end; first += KEYS) {
        // Lane g holds key g of each block of eight; keys nobody sees are zeros, so that no stale slot is ever read.
        uint4 key[KEY_BLOCKS][2] = {}, value[KEY_BLOCKS][2] = {};
#pragma unroll
        for (int block = 0; block < KEY_BLOCKS; ++block) {
            const int index = first + block * 8 + g;
            if (index >= range.first && index < range.end) {
                const int64_t slot = index < range.length ? static_cast<int64_t>(global_load(p.page_table + index))
                                                          : global_load(p.slots + (index - range.length));
                const int64_t element = (slot * cfg::KV_HEADS + kv_head) * cfg::HEAD_DIM + 8 * t;
#pragma unroll
                for (int part = 0; part < 2; ++part) {
                    key[block][part] = load_cached(p.key_cache, element + 32 * part);
                    value[block][part] = load_cached(p.value_cache, element + 32 * part);
                }
            }
        }
        float score[KEY_BLOCKS][4];
        clear(score);
#pragma unroll
        for (int block = 0; block < KEY_BLOCKS; ++block) {
#pragma unroll
            for (int part = 0; part < 2; ++part) {
                const uint4 low = query[0][part], high = query[1][part], k = key[block][part];
                mma_bf16(score[block], low.x, high.x, low.y, high.y, k.x, k.y);
                mma_bf16(score[block], low.z, high.z, low.w, high.w, k.z, k.w);
            }
        }
        // Online softmax in base 2; a row's maximum and sum lie in the four lanes that share g.
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float top = highest[half];
#pragma unroll
            for (int block = 0; block < KEY_BLOCKS; ++block) {
#pragma unroll
                for (int c = 0; c < 2; ++c) {
                    const bool seen = view[half].sees(p, range, first + block * 8 + 2 * t + c);
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
            for (int block = 0; block < KEY_BLOCKS; ++block) {
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
            for (int i = 0; i < 8; ++i) {
                out[i][2 * half] *= shrink;
                out[i][2 * half + 1] *= shrink;
            }
        }
        // The scores' sum layout is the layout of the next product's row operand, two key blocks at a time; values are
        // transposed across the warp. Word i of half `part` transposes to dimensions 32 part + 8 (n / 2) + 2 i + n % 2.
#pragma unroll
        for (int two = 0; two < KEY_BLOCKS / 2; ++two) {
            const float (&s0)[4] = score[2 * two];
            const float (&s1)[4] = score[2 * two + 1];
            const uint32_t a0 = pack_bf16x2(s0[0], s0[1]), a1 = pack_bf16x2(s0[2], s0[3]);
            const uint32_t a2 = pack_bf16x2(s1[0], s1[1]), a3 = pack_bf16x2(s1[2], s1[3]);
#pragma unroll
            for (int part = 0; part < 2; ++part) {
                const uint4 v0 = value[2 * two][part], v1 = value[2 * two + 1][part];
                mma_bf16(out[part * 4 + 0], a0, a1, a2, a3, transpose_8x8(v0.x), transpose_8x8(v1.x));
                mma_bf16(out[part * 4 + 1], a0, a1, a2, a3, transpose_8x8(v0.y), transpose_8x8(v1.y));
                mma_bf16(out[part * 4 + 2], a0, a1, a2, a3, transpose_8x8(v0.z), transpose_8x8(v1.z));
                mma_bf16(out[part * 4 + 3], a0, a1, a2, a3, transpose_8x8(v0.w), transpose_8x8(v1.w));
            }
        }
    }

#pragma unroll
    for (int half = 0; half < 2; ++half) {
        if (row[half] >= p.rows) continue;
        const int64_t at = static_cast<int64_t>(row[half] * cfg::HEADS + head[half]) * p.max_splits + split;
        float* sums = p.attention_sums + at * cfg::HEAD_DIM + 8 * t;
#pragma unroll
        for (int part = 0; part < 2; ++part) {
#pragma unroll
            for (int i = 0; i < 4; i += 2) {
                const float (&a)[4] = out[part * 4 + i];
                const float (&b)[4] = out[part * 4 + i + 1];
                global_store(reinterpret_cast<float4*>(sums + 32 * part + 2 * i),
                             float4{a[2 * half], a[2 * half + 1], b[2 * half], b[2 * half + 1]});
            }
        }
        if (t == 0) {
            global_store(reinterpret_cast<float2*>(p.attention_state) + at, float2{highest[half], total[half]});
        }
    }
}

// All units of this CTA: (split, KV head) pairs are dealt to the CTAs, query tiles to the warps.
DEVICE void run(const Params& p) {
    const Range range(p);
    const int pairs = range.splits() * cfg::KV_HEADS;
    const int tiles = (p.rows * GROUP + 15) / 16;
    int turn = 0;
    for (int pair = cta_index(); pair < pairs; pair += cfg::SMS) {
        for (int tile = 0; tile < tiles; ++tile, ++turn) {
            if (turn % cfg::MATH_WARPS == warp_index()) {
                run_unit(p, range, pair / cfg::KV_HEADS, pair % cfg::KV_HEADS, tile);
            }
        }
    }
    arrive_math(p, protocol::Counter::ATTENTION);
}

}  // namespace attention
