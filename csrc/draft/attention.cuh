// B5: attention of the block's rows over the draft's paged context and over the block itself.
// Key index i < length is position i of the context, split over ranges of KV_SPLIT indices counted from key 0. The rows
// of the block are the split after the last one of the context.
// The context does not depend on the launch, so the loaders bring a split's keys and values of one head into a stage of
// the ring long before the queries exist.
#pragma once
#include "instr/mma.cuh"
#include "layer/gemm.cuh"
#include "products.cuh"
#include "tokens.cuh"

namespace attention {

constexpr int GROUP = cfg::HEADS / cfg::KV_HEADS;                          // query heads per KV head
constexpr int KEYS = 16;                                                   // keys in flight per warp
constexpr int SLICES = cfg::HEAD_DIM / 32;                                 // a lane has eight of every 32 dimensions
constexpr int SIDES = 2, SIDE_SLICES = SLICES / SIDES;                     // two warps share the dimensions of the sums
constexpr int LINE_BYTES = cfg::HEAD_DIM * 2;                              // a head's key or value
constexpr uint32_t VALUES_AT = cfg::KV_SPLIT / 2 * (2 * LINE_BYTES + 64);  // in a stage, behind the keys
static_assert(cfg::KV_SPLIT % WARP == 0, "the lanes of a loader look after as many keys each");
static_assert(2 * VALUES_AT <= cfg::STAGE_BYTES, "a stage holds the keys and values of a split");
static_assert(cfg::ROW_CAP <= KEYS, "the block's own keys are one chunk");

struct Range {
    int length, first;

    DEVICE explicit Range(const Params& p) {
        length = global_load(p.length);
        first = length - cfg::WINDOW + 1 < 0 ? 0 : length - cfg::WINDOW + 1;
    }
    DEVICE int first_split() const { return first / cfg::KV_SPLIT; }
    DEVICE int context_splits() const { return length == 0 ? 0 : (length - 1) / cfg::KV_SPLIT + 1 - first_split(); }
    DEVICE int splits() const { return context_splits() + 1; }
    DEVICE int first_key(int split) const { return (first_split() + split) * cfg::KV_SPLIT; }
    DEVICE bool holds(int index) const { return index >= first && index < length; }
};

// The context's units, one per split and KV head, and after them the block's, one per KV head, are dealt to the CTAs.
DEVICE int context_units(const Range& range) { return range.context_splits() * cfg::KV_HEADS; }

// One loader: its half (keys or values) of this CTA's stages. cache: [slots, KV_HEADS, HEAD_DIM].
DEVICE void load_context(const Params& p, Ring& ring, const uint16_t* cache, uint32_t half_at, uint64_t policy) {
    const Range range(p);
    const int units = context_units(range);
    for (int unit = cta_index(); unit < units; unit += cfg::SMS) {
        const int first = range.first_key(unit / cfg::KV_HEADS), head = unit % cfg::KV_HEADS;
        int slot[cfg::KV_SPLIT / WARP];
        int found = 0;
#pragma unroll
        for (int turn = 0; turn < cfg::KV_SPLIT / WARP; ++turn) {
            const int index = first + turn * WARP + lane_index();
            slot[turn] = range.holds(index) ? global_load(p.page_table + index) : -1;
            found += population_count(warp_ballot(slot[turn] >= 0));
        }
        ring.wait_empty(p);
        if (elect_one()) mbarrier_arrive_expect(ring.full(), found * LINE_BYTES);
        warp_sync();
#pragma unroll
        for (int turn = 0; turn < cfg::KV_SPLIT / WARP; ++turn) {
            if (slot[turn] < 0) continue;
            const int64_t line = static_cast<int64_t>(slot[turn]) * cfg::KV_HEADS + head;
            bulk_load(ring.weights() + half_at + row_offset<LINE_BYTES>(turn * WARP + lane_index()),
                      cache + line * cfg::HEAD_DIM, LINE_BYTES, ring.full(), policy);
        }
        ring.next();
    }
}

// Keys of one split of the context, in a stage. Of a key outside the window zeros stand in: nothing was loaded.
struct ContextKeys {
    const Range& range;
    uint32_t stage;
    int first;  // index of key 0

    DEVICE int count() const { return range.length - first < cfg::KV_SPLIT ? range.length - first : cfg::KV_SPLIT; }
    DEVICE bool sees(int row, int key) const {
        return range.holds(first + key) && range.length + row - first - key < cfg::WINDOW;
    }
    DEVICE uint4 slice(uint32_t half_at, int key, int slice) const {
        if (!range.holds(first + key)) return uint4{0u, 0u, 0u, 0u};
        return shared_load<uint4>(stage + half_at + row_offset<LINE_BYTES>(key) + slice * 64 + lane_anew() % 4 * 16);
    }
    DEVICE uint4 key_slice(int key, int index) const { return slice(0, key, index); }
    DEVICE uint4 value_slice(int key, int index) const { return slice(VALUES_AT, key, index); }
};

// The block's own keys, in buffers of the launch.
struct BlockKeys {
    const Params& p;
    int kv_head;

    DEVICE int count() const { return p.rows; }
    DEVICE bool sees(int row, int key) const { return key < p.rows && (!cfg::CAUSAL || key <= row); }
    DEVICE uint4 slice(const uint16_t* rows, int key, int slice) const {
        if (key >= p.rows) return uint4{0u, 0u, 0u, 0u};
        const int line = key * cfg::KV_HEADS + kv_head;
        return global_load(reinterpret_cast<const uint4*>(rows + line * cfg::HEAD_DIM) + 4 * slice + lane_anew() % 4);
    }
    DEVICE uint4 key_slice(int key, int index) const { return slice(p.block_keys, key, index); }
    DEVICE uint4 value_slice(int key, int index) const { return slice(p.block_values, key, index); }
};

// One warp: queries of tile `tile` against one split of one KV head; half `side` of the values' dimensions.
template <class Keys>
DEVICE void run_unit(const Params& p, const Keys& keys, int split, int kv_head, int tile, int side) {
    const int g = lane_anew() / 4, t = lane_anew() % 4;
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
    const int count = keys.count();

    for (int first = 0; first < count; first += KEYS) {
        // Lane g looks after keys g and g + 8.
        float score[2][4];
        clear(score);
#pragma unroll
        for (int slice = 0; slice < SLICES; ++slice) {
            warp_sync();  // keeps the next slice's loads behind this one's: registers are short
            const uint4 low = query[0][slice], high = query[1][slice];
#pragma unroll
            for (int block = 0; block < 2; ++block) {
                const uint4 k = keys.key_slice(first + block * 8 + g, slice);
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
                    const bool seen = row[half] < p.rows && keys.sees(row[half], first + block * 8 + 2 * t + c);
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
            warp_sync();
            const uint4 v0 = keys.value_slice(first + g, side * SIDE_SLICES + slice);
            const uint4 v1 = keys.value_slice(first + 8 + g, side * SIDE_SLICES + slice);
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

DEVICE void run(const Params& p, Ring& ring, uint32_t epoch) {
    wait_counter_math(p, protocol::Counter::HEADS_READY, epoch);
    const Range range(p);
    const int context = context_units(range), warps = (p.rows * GROUP + 15) / 16 * SIDES;
    for (int unit = cta_index(); unit < context + cfg::KV_HEADS; unit += cfg::SMS) {
        const int split = unit / cfg::KV_HEADS, head = unit % cfg::KV_HEADS;
        if (unit < context) {
            ring.wait_full(p);
            const ContextKeys keys{range, ring.weights(), range.first_key(split)};
            for (int turn = warp_index(); turn < warps; turn += cfg::MATH_WARPS) {
                run_unit(p, keys, split, head, turn / SIDES, turn % SIDES);
            }
            ring.release();
        } else {
            for (int turn = warp_index(); turn < warps; turn += cfg::MATH_WARPS) {
                run_unit(p, BlockKeys{p, head}, split, head, turn / SIDES, turn % SIDES);
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
    constexpr int AHEAD = 11;  // loads in flight
#pragma unroll
    for (int turn = 0; turn < TURNS; ++turn) {
        const float share = mine[turn].x == -infinity() ? 0.f : exponential_base2(mine[turn].x - top);
        const int here = splits - turn * WARP < WARP ? splits - turn * WARP : WARP;
        for (int first = 0; first < here; first += AHEAD) {
            float4 sum[AHEAD];
#pragma unroll
            for (int i = 0; i < AHEAD; ++i) {
                const int64_t split = turn * WARP + first + i;
                sum[i] = first + i < here ? global_load(reinterpret_cast<const float4*>(sums + split * cfg::HEAD_DIM))
                                          : float4{0.f, 0.f, 0.f, 0.f};
            }
#pragma unroll
            for (int i = 0; i < AHEAD; ++i) {
                if (first + i >= here) break;
                const float weight = bits_float(shuffle(float_bits(share), first + i));
                total += bits_float(shuffle(float_bits(mine[turn].y), first + i)) * weight;
                o = float4{o.x + sum[i].x * weight, o.y + sum[i].y * weight, o.z + sum[i].z * weight,
                           o.w + sum[i].w * weight};
            }
        }
    }
    tokens::store(p.attended, row, head * cfg::HEAD_DIM + 4 * lane_index(),
                  float4{o.x / total, o.y / total, o.z / total, o.w / total});
}

DEVICE void merge(const Params& p, uint32_t epoch) {
    wait_counter_math(p, protocol::Counter::ATTENTION, epoch);
    const Range range(p);
    constexpr int UNITS = cfg::ROW_CAP * cfg::HEADS;
    for (int unit = cta_index() + cfg::SMS * warp_index(); unit < UNITS; unit += cfg::SMS * cfg::MATH_WARPS) {
        const int row = unit / cfg::HEADS, head = unit % cfg::HEADS;
        if (row < p.rows) {
            merge_unit(p, range, row, head);
        } else {
            tokens::clear(p.attended, row, head * cfg::HEAD_DIM + 4 * forget_on_blackwell(lane_index()));
        }
    }
    arrive_math(p, protocol::Counter::ATTENDED);
}

}  // namespace attention
