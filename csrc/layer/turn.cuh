// The arithmetic of attention, wherever the keys and values of a turn lie: scores, online softmax, weighted values, for
// one m16 tile of (row, query head) pairs and KEYS keys.
#pragma once
#include "instr/convert.cuh"
#include "instr/mma.cuh"
#include "rows.cuh"

namespace attention {

constexpr int GROUP = cfg::HEADS / cfg::KV_HEADS;  // query heads per KV head
constexpr int KEYS = cfg::FP8_CACHE ? 32 : 16;     // of a turn of a warp; 32 bf16 keys and values spill registers
constexpr int KEY_BLOCKS = KEYS / 8;
constexpr int FETCHED = 64;  // bytes that a prefetch brings into L2, at least
constexpr int LINE_BYTES = cfg::KV_HEADS * cfg::HEAD_DIM * (cfg::FP8_CACHE ? 1 : 2);  // of a slot in a cache
static_assert(cfg::MIN_SPLIT % KEYS == 0, "a split is whole turns");

// Eight of a key's or value's dimensions as they are stored, and the 16-bit format they are multiplied in: e4m3 fits
// into f16 as it is, by one instruction for two, and so do normed queries but for the smallest.
struct CachedBf16 {
    uint4 bits;

    DEVICE uint4 pairs() const { return bits; }
    DEVICE static uint4 query(const uint4& q) { return q; }
    DEVICE static uint32_t pack(float low, float high) { return pack_bf16x2(low, high); }
    DEVICE static void multiply(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0,
                                uint32_t b1) {
        mma_bf16(c, a0, a1, a2, a3, b0, b1);
    }
};
struct CachedFp8 {
    uint2 bits;

    DEVICE uint4 pairs() const {
        return uint4{e4m3x2_to_f16x2(bits.x & 0xffffu), e4m3x2_to_f16x2(bits.x >> 16),
                     e4m3x2_to_f16x2(bits.y & 0xffffu), e4m3x2_to_f16x2(bits.y >> 16)};
    }
    DEVICE static uint32_t query(uint32_t q) { return pack(bf16_to_float(q & 0xffffu), bf16_to_float(q >> 16)); }
    DEVICE static uint4 query(const uint4& q) { return uint4{query(q.x), query(q.y), query(q.z), query(q.w)}; }
    DEVICE static uint32_t pack(float low, float high) { return pack_f16x2(low, high); }
    DEVICE static void multiply(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0,
                                uint32_t b1) {
        mma_f16(c, a0, a1, a2, a3, b0, b1);
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

// The keys, or the values, of a turn. Lane 4g + t has dimensions 8t.. and 32 + 8t.. of the keys g, g + 8, ...
struct Turn {
    Cached block[KEY_BLOCKS][2];

    DEVICE uint4 pairs(int i, int part) const { return block[i][part].pairs(); }
    // own: this lane's first dimensions in slot 0; slots: of the keys g, g + 8, ...
    DEVICE void load(const uint8_t* own, const int32_t (&slots)[KEY_BLOCKS]) {
#pragma unroll
        for (int i = 0; i < KEY_BLOCKS; ++i) {
            const Cached* at = reinterpret_cast<const Cached*>(own + static_cast<int64_t>(slots[i]) * LINE_BYTES);
            block[i][0].bits = global_load(&at[0].bits);
            block[i][1].bits = global_load(&at[4].bits);
        }
    }
};

// slot: lane i's is that of key i.
DEVICE void deal_slots(int32_t slot, int32_t (&slots)[KEY_BLOCKS]) {
#pragma unroll
    for (int i = 0; i < KEY_BLOCKS; ++i) {
        slots[i] = static_cast<int32_t>(shuffle(static_cast<uint32_t>(slot), i * 8 + lane_index() / 4));
    }
}

// Slot of the key at `index`. Where nobody sees a key, the nearest one that somebody sees stands in for it, so that no
// stale slot is ever read.
DEVICE int32_t slot_of(const Params& p, const Rows& rows, int index) {
    index = index < rows.end ? index : rows.end - 1;
    index = index > rows.first ? index : rows.first;
    if (index < rows.length) return global_load(p.page_table + index);
    return static_cast<int32_t>(global_load(p.slots + (index - rows.length)));
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

// Scores of what half `half` of the tile does not see become -infinity. seen: bit 8 block + c is this lane's column c.
DEVICE void hide(uint32_t seen, int half, float (&score)[KEY_BLOCKS][4]) {
#pragma unroll
    for (int block = 0; block < KEY_BLOCKS; ++block) {
#pragma unroll
        for (int c = 0; c < 2; ++c) {
            if ((seen >> (8 * block + c) & 1u) == 0u) score[block][2 * half + c] = -infinity();
        }
    }
}

// Queries of a tile and what its rows see; rows beyond the step's have zeros, and see nothing.
struct Tile {
    uint4 query[2][2] = {};
    RowView view[2];

    DEVICE Tile(const Params& p, const Rows& rows, int shift, int kv_head, int tile) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const Pair pair(kv_head, tile, half);
            view[half] = RowView(p, rows, pair.row, shift);
            if (pair.row < p.rows) {
                const uint16_t* q =
                    p.query + (pair.row * cfg::HEADS + pair.head) * cfg::HEAD_DIM + 8 * (lane_index() % 4);
                query[half][0] = Cached::query(global_load(reinterpret_cast<const uint4*>(q)));
                query[half][1] = Cached::query(global_load(reinterpret_cast<const uint4*>(q + 32)));
            }
        }
    }
};

// keys.pairs(block, part): as Turn has them.
template <class Keys>
DEVICE void score_keys(const Tile& tile, const Keys& keys, float (&score)[KEY_BLOCKS][4]) {
    clear(score);
#pragma unroll
    for (int part = 0; part < 2; ++part) {
        const uint4 low = tile.query[0][part], high = tile.query[1][part];
#pragma unroll
        for (int block = 0; block < KEY_BLOCKS; ++block) {
            const uint4 k = keys.pairs(block, part);
            Cached::multiply(score[block], low.x, high.x, low.y, high.y, k.x, k.y);
            Cached::multiply(score[block], low.z, high.z, low.w, high.w, k.z, k.w);
        }
    }
}

// What the rows of the tile do not see of the keys from `first` on.
DEVICE void hide_unseen(const Rows& rows, const Tile& tile, int first, float (&score)[KEY_BLOCKS][4]) {
    const uint32_t seen[2] = {tile.view[0].seen(rows, first), tile.view[1].seen(rows, first)};
    if (!all_lanes((seen[0] & seen[1] & lowest_bits(KEYS)) == lowest_bits(KEYS))) {
        const int t = lane_index() % 4;
        hide(seen[0] >> (2 * t), 0, score);
        hide(seen[1] >> (2 * t), 1, score);
    }
}

// The row operand of the product with the values: the layout of the scores' sums is its layout, two key blocks at a
// time.
struct Weights {
    uint32_t a0, a1, a2, a3;

    DEVICE Weights(const float (&score)[KEY_BLOCKS][4], int two) {
        const float (&s0)[4] = score[2 * two];
        const float (&s1)[4] = score[2 * two + 1];
        a0 = Cached::pack(s0[0], s0[1]), a1 = Cached::pack(s0[2], s0[3]);
        a2 = Cached::pack(s1[0], s1[1]), a3 = Cached::pack(s1[2], s1[3]);
    }
    DEVICE void multiply(float (&sum)[4], uint32_t b0, uint32_t b1) const {
        Cached::multiply(sum, a0, a1, a2, a3, b0, b1);
    }
};

// A tile's sums over the keys so far.
struct Sums {
    float highest[2], total[2], out[8][4];

    DEVICE Sums() {
        clear(out);
        highest[0] = highest[1] = -infinity();
        total[0] = total[1] = 0.f;
    }

    // Online softmax in base 2: scores become weights. A row's maximum lies in the four lanes that share g, its sum is
    // spread over them.
    DEVICE void weigh(float (&score)[KEY_BLOCKS][4]) {
        float base[2], shrink[2];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float top = highest[half];
#pragma unroll
            for (int block = 0; block < KEY_BLOCKS; ++block) {
                top = larger(top, larger(score[block][2 * half], score[block][2 * half + 1]));
            }
#pragma unroll
            for (int step = 1; step < 4; step *= 2) top = larger(top, shuffle_xor(top, step));
            base[half] = top == -infinity() ? 0.f : top * cfg::SCORE_SCALE_LOG2;
            // Exactly 1 where nothing changed, which the product fused with the difference would not give: a turn in
            // which a row sees nothing is there or not, as the other rows have it.
            shrink[half] =
                top == highest[half] ? 1.f : exponential_base2(highest[half] * cfg::SCORE_SCALE_LOG2 - base[half]);
            highest[half] = top;
        }
        if (!all_lanes(shrink[0] == 1.f && shrink[1] == 1.f)) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                total[half] *= shrink[half];
#pragma unroll
                for (int i = 0; i < 8; ++i) {
                    out[i][2 * half] *= shrink[half];
                    out[i][2 * half + 1] *= shrink[half];
                }
            }
        }
#pragma unroll
        for (int block = 0; block < KEY_BLOCKS; ++block) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                float& s = score[block][i];
                s = exponential_base2(s * cfg::SCORE_SCALE_LOG2 - base[i / 2]);
                total[i / 2] += s;
            }
        }
    }

    // Values are transposed across the warp. Word i of half `part` transposes to dimensions
    // 32 part + 8 (n / 2) + 2 i + n % 2.
    template <class Values>
    DEVICE void add_values(const float (&score)[KEY_BLOCKS][4], const Values& values) {
#pragma unroll
        for (int two = 0; two < KEY_BLOCKS / 2; ++two) {
            const Weights a(score, two);
#pragma unroll
            for (int part = 0; part < 2; ++part) {
                const uint4 v0 = values.pairs(2 * two, part), v1 = values.pairs(2 * two + 1, part);
                float (&o)[8][4] = out;
                a.multiply(o[part * 4 + 0], transpose_8x8(v0.x), transpose_8x8(v1.x));
                a.multiply(o[part * 4 + 1], transpose_8x8(v0.y), transpose_8x8(v1.y));
                a.multiply(o[part * 4 + 2], transpose_8x8(v0.z), transpose_8x8(v1.z));
                a.multiply(o[part * 4 + 3], transpose_8x8(v0.w), transpose_8x8(v1.w));
            }
        }
    }

    // The partial of split `split`, for the rows of the tile that have it.
    DEVICE void store(const Params& p, const Tile& tile, int kv_head, int index, int split) {
        const int t = lane_index() % 4;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            total[half] += shuffle_xor(total[half], 1);
            total[half] += shuffle_xor(total[half], 2);
            if (!tile.view[half].present()) continue;
            const Pair pair(kv_head, index, half);
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
                global_store(reinterpret_cast<float2*>(p.attention_state) + at,
                             float2{highest[half] * cfg::SCORE_SCALE_LOG2, total[half]});
            }
        }
    }
};

}  // namespace attention
