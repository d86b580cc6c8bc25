// A6: attention of the step's rows over the paged cache, split over key ranges (flash decoding).
// Key index i < length is position i of the committed sequence; length + r is row r of this step. A split is a run of
// keys at fixed indices, counted from key 0, whose size follows from the row's own position; so a row's partial of a
// split depends on that row's query, position and mask alone.
#pragma once
#include "instr/convert.cuh"
#include "instr/mma.cuh"
#include "wait.cuh"

namespace attention {

constexpr int GROUP = cfg::HEADS / cfg::KV_HEADS;  // query heads per KV head
constexpr int KEYS = cfg::FP8_CACHE ? 32 : 16;     // in flight per warp; 32 bf16 keys and values spill registers
constexpr int KEY_BLOCKS = KEYS / 8;
static_assert(cfg::MIN_SPLIT % KEYS == 0, "a split is whole chunks of keys");

// Keys per split for a row at `position`: small, so that short contexts spread over the SMs, doubling from where there
// would be more than SPLITS_CAP of them.
DEVICE int split_size(const Params& p, int position) {
    const int keys = position < p.window ? position + 1 : p.window;
    int size = cfg::MIN_SPLIT;
    while (keys > size * cfg::SPLITS_CAP) size *= 2;
    return size;
}

// The key range [first, end) that any row of the step sees.
struct Range {
    int length, first, end, small_size, large_size;

    DEVICE explicit Range(const Params& p) {
        length = global_load(p.length);
        end = length + p.rows;
        int lowest = 0x7fffffff, highest = 0;
#pragma unroll
        for (int row = 0; row < cfg::ROW_CAP; ++row) {
            const int position = row < p.rows ? static_cast<int>(global_load(p.positions + row)) : -1;
            if (position < 0) continue;
            lowest = position < lowest ? position : lowest;
            highest = position > highest ? position : highest;
        }
        first = lowest - p.window + 1;
        first = first < 0 ? 0 : (first < length ? first : length);
        // Rows of a step may lie on both sides of a doubling; the two sizes differ then.
        small_size = split_size(p, lowest);
        large_size = split_size(p, highest);
    }
    DEVICE int first_split(int size) const { return first / size; }
    DEVICE int splits(int size) const { return (end - 1) / size + 1 - first_split(size); }
};

// Which keys a row sees: committed ones from `oldest` on, and a set of the step's own rows.
struct RowView {
    int oldest = 0x7fffffff;
    uint32_t own = 0;

    // A row whose splits have another size sees nothing: it is done with the units of that size.
    DEVICE RowView(const Params& p, int row, int size) {
        if (row >= p.rows) return;
        const int position = static_cast<int>(global_load(p.positions + row));
        if (split_size(p, position) != size) return;
        oldest = position - p.window + 1;
        const uint32_t ancestors = global_load(p.ancestors + row);
        for (int other = 0; other < p.rows; ++other) {
            const bool near = position - static_cast<int>(global_load(p.positions + other)) < p.window;
            if (near) own |= ancestors & (1u << other);
        }
    }
    DEVICE bool present() const { return own != 0u; }  // every row sees itself
    DEVICE bool sees(const Range& range, int key) const {
        if (key < range.length) return key >= oldest;
        return key < range.end && ((own >> (key - range.length)) & 1u) != 0u;
    }
};

// Eight of a key's or value's dimensions: fp8 as it is stored, which halves the registers of what is in flight.
struct CachedBf16 {
    uint4 bits;

    DEVICE static CachedBf16 load(const void* cache, int64_t element) {
        return {global_load(reinterpret_cast<const uint4*>(static_cast<const uint16_t*>(cache) + element))};
    }
    DEVICE uint4 pairs() const { return bits; }
};
struct CachedFp8 {
    uint2 bits;

    DEVICE static CachedFp8 load(const void* cache, int64_t element) {
        return {global_load(reinterpret_cast<const uint2*>(static_cast<const uint8_t*>(cache) + element))};
    }
    DEVICE uint4 pairs() const {
        return uint4{e4m3x2_to_bf16x2(bits.x & 0xffffu), e4m3x2_to_bf16x2(bits.x >> 16),
                     e4m3x2_to_bf16x2(bits.y & 0xffffu), e4m3x2_to_bf16x2(bits.y >> 16)};
    }
};
template <bool FP8>
struct CachedAs {
    using Type = CachedBf16;
};
template <>
struct CachedAs<true> {
    using Type = CachedFp8;
};
using Cached = CachedAs<cfg::FP8_CACHE>::Type;

// Slots of the keys first + 8 block + g; -1 where no row sees a key, so that no stale slot is ever read.
DEVICE void load_slots(const Params& p, const Range& range, int first, int32_t (&slot)[KEY_BLOCKS]) {
#pragma unroll
    for (int block = 0; block < KEY_BLOCKS; ++block) {
        const int index = first + block * 8 + lane_index() / 4;
        slot[block] = -1;
        if (index >= range.first && index < range.end) {
            slot[block] = index < range.length ? global_load(p.page_table + index)
                                               : static_cast<int32_t>(global_load(p.slots + (index - range.length)));
        }
    }
}

// The (row, query head) pair of a lane: row g (half 0) or g + 8 (half 1) of an m16 tile.
struct Pair {
    int row, head;

    DEVICE Pair(int kv_head, int tile, int half) {
        const int pair = tile * 16 + lane_index() / 4 + 8 * half;
        row = pair / GROUP;
        head = kv_head * GROUP + pair % GROUP;
    }
};

// One warp: queries of tile `tile` against split `split` (of `size` keys) of KV head `kv_head`.
DEVICE void run_unit(const Params& p, const Range& range, int size, int split, int kv_head, int tile) {
    const int g = lane_index() / 4, t = lane_index() % 4;
    const int split_first = (range.first_split(size) + split) * size;
    const int split_end = split_first + size < range.end ? split_first + size : range.end;
    int32_t slot[KEY_BLOCKS];
    load_slots(p, range, split_first, slot);
    uint4 query[2][2] = {};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const Pair pair(kv_head, tile, half);
        if (pair.row < p.rows) {
            const uint16_t* q = p.query + (pair.row * cfg::HEADS + pair.head) * cfg::HEAD_DIM + 8 * t;
            query[half][0] = global_load(reinterpret_cast<const uint4*>(q));
            query[half][1] = global_load(reinterpret_cast<const uint4*>(q + 32));
        }
    }
    const RowView view[2] = {RowView(p, Pair(kv_head, tile, 0).row, size),
                             RowView(p, Pair(kv_head, tile, 1).row, size)};

    float out[8][4];
    clear(out);
    float highest[2] = {-infinity(), -infinity()}, total[2] = {0.f, 0.f};
    for (int first = split_first; first < split_end; first += KEYS) {
        Cached key[KEY_BLOCKS][2] = {}, value[KEY_BLOCKS][2] = {};
#pragma unroll
        for (int block = 0; block < KEY_BLOCKS; ++block) {
            if (slot[block] >= 0) {
                const int64_t element =
                    (static_cast<int64_t>(slot[block]) * cfg::KV_HEADS + kv_head) * cfg::HEAD_DIM + 8 * t;
#pragma unroll
                for (int part = 0; part < 2; ++part) {
                    key[block][part] = Cached::load(p.key_cache, element + 32 * part);
                    value[block][part] = Cached::load(p.value_cache, element + 32 * part);
                }
            }
        }
        load_slots(p, range, first + KEYS, slot);  // of the next turn, while this one waits for its keys
        float score[KEY_BLOCKS][4];
        clear(score);
#pragma unroll
        for (int block = 0; block < KEY_BLOCKS; ++block) {
#pragma unroll
            for (int part = 0; part < 2; ++part) {
                const uint4 low = query[0][part], high = query[1][part], k = key[block][part].pairs();
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
                    const bool seen = view[half].sees(range, first + block * 8 + 2 * t + c);
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
                const uint4 v0 = value[2 * two][part].pairs(), v1 = value[2 * two + 1][part].pairs();
                mma_bf16(out[part * 4 + 0], a0, a1, a2, a3, transpose_8x8(v0.x), transpose_8x8(v1.x));
                mma_bf16(out[part * 4 + 1], a0, a1, a2, a3, transpose_8x8(v0.y), transpose_8x8(v1.y));
                mma_bf16(out[part * 4 + 2], a0, a1, a2, a3, transpose_8x8(v0.z), transpose_8x8(v1.z));
                mma_bf16(out[part * 4 + 3], a0, a1, a2, a3, transpose_8x8(v0.w), transpose_8x8(v1.w));
            }
        }
    }

#pragma unroll
    for (int half = 0; half < 2; ++half) {
        if (!view[half].present()) continue;
        const Pair pair(kv_head, tile, half);
        const int64_t at = static_cast<int64_t>(pair.row * cfg::HEADS + pair.head) * p.max_splits + split;
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
DEVICE void run_size(const Params& p, const Range& range, int size) {
    const int pairs = range.splits(size) * cfg::KV_HEADS;
    const int tiles = (p.rows * GROUP + 15) / 16;
    int turn = 0;
    for (int pair = cta_index(); pair < pairs; pair += cfg::SMS) {
        for (int tile = 0; tile < tiles; ++tile, ++turn) {
            if (turn % cfg::MATH_WARPS == warp_index()) {
                run_unit(p, range, size, pair / cfg::KV_HEADS, pair % cfg::KV_HEADS, tile);
            }
        }
    }
}

DEVICE void run(const Params& p) {
    const Range range(p);
#pragma unroll 1
    for (int size = range.small_size; size <= range.large_size; size *= 2) run_size(p, range, size);
    arrive_math(p, protocol::Counter::ATTENTION);
}

}  // namespace attention
