// Attention over long splits: keys and values pass through shared memory, many turns ahead, in stages of the ring that
// the weight loader leaves alone until attention gives them back. Same units, turns and order of sums as run_unit, so
// the same bits. A team of warps shares the turns of one unit after another: all its warps copy, each computes a tile.
#pragma once
#include <type_traits>

#include "attention.cuh"
#include "instr/async_copy.cuh"
#include "instr/mbarrier.cuh"

namespace attention {

constexpr bool STAGED = cfg::LENT_STAGES > 0;
constexpr int STAGED_SHIFT = STAGED ? log2_of(cfg::STAGED_SPLIT) : 31;
constexpr int HEAD_BYTES = LINE_BYTES / cfg::KV_HEADS, PIECES = HEAD_BYTES / 16;  // of one head's key or value
constexpr int SIDE_BYTES = KEYS * HEAD_BYTES, TURN_BYTES = 2 * SIDE_BYTES;        // keys, then values
constexpr int HELD_TURNS = 16;                                                    // of all teams together
constexpr int BATCH = 4;                                                          // turns whose slots are asked for
constexpr int LENT_BYTES = HELD_TURNS * TURN_BYTES + cfg::MATH_WARPS * BATCH * WARP * 4;
constexpr int MOST_TILES = (cfg::ROW_CAP * GROUP + 15) / 16;
static_assert(!STAGED || cfg::MATH_WARPS == 8, "teams are halves, quarters or all of eight warps");
static_assert(!STAGED || LENT_BYTES <= cfg::LENT_STAGES * cfg::STAGE_BYTES, "turns and slots fit the lent stages");

// Whether a launch of this layer may find splits that long; the weight loader asks before it may know the length.
DEVICE bool borrows_stages(const Params& p) {
    return STAGED_SHIFT == MIN_SHIFT || (p.window - 1) >> (STAGED_SHIFT - 1) >= cfg::SPLITS_CAP;
}

struct Team {
    int shift, index, warp;  // 2^shift warps; number of the team; this warp's number in it
    int tile;                // this warp's, of as many as there are warps

    // At least two warps, of which one copies only where there is a single tile. Teams deal their tiles so that the
    // warps that compute spread over the SM's schedulers.
    DEVICE explicit Team(int tiles) {
        shift = tiles <= 2 ? 1 : tiles <= 4 ? 2 : 3;
        index = warp_index() >> shift;
        warp = warp_index() & (warps() - 1);
        tile = (warp + (index << shift >> 2)) & (warps() - 1);
    }
    DEVICE int warps() const { return 1 << shift; }
    DEVICE int teams() const { return cfg::MATH_WARPS >> shift; }
    DEVICE int depth() const { return HELD_TURNS / 8 << shift; }  // turns that it holds
    DEVICE uint32_t turn_at(int place) const { return cfg::LENT_AT + (index * depth() + place) * TURN_BYTES; }
    DEVICE int next(int place) const { return (place + 1) & (depth() - 1); }
    DEVICE void meet() const { barrier_sync(3 + index, warps() * WARP); }
    // This thread's copies of the oldest turn under way have landed.
    DEVICE void wait_oldest() const {
        static_assert(HELD_TURNS == 16, "a team holds 4, 8 or 16 turns");
        if (shift == 1) {
            wait_copies<2>();
        } else if (shift == 2) {
            wait_copies<6>();
        } else {
            wait_copies<14>();
        }
    }
};

// The units of a team, in order: (split, KV head) pairs are dealt to the teams of all CTAs; where a team has fewer
// warps than there are tiles, it goes over a pair several times.
struct Units {
    const Rows& rows;
    int pairs, shift, first_pair, pair_step, passes;

    DEVICE Units(const Rows& rows, int shift, int tiles, const Team& team) : rows(rows), shift(shift) {
        pairs = rows.splits(shift) * cfg::KV_HEADS;
        first_pair = cta_index() + cfg::SMS * team.index;
        pair_step = cfg::SMS * team.teams();
        passes = MOST_TILES <= cfg::MATH_WARPS ? 1 : (tiles + team.warps() - 1) / team.warps();
    }
    DEVICE int pair(int number) const { return first_pair + number / passes * pair_step; }
    DEVICE bool has(int number) const { return pair(number) < pairs; }
    DEVICE int kv_head(int number) const { return pair(number) % cfg::KV_HEADS; }
    DEVICE int split(int number) const { return pair(number) / cfg::KV_HEADS; }
    DEVICE int first_key(int number) const { return (rows.first_split(shift) + split(number)) << shift; }
    DEVICE int end_key(int number) const {
        const int end = first_key(number) + (1 << shift);
        return end < rows.end ? end : rows.end;
    }
    DEVICE int tile(int number, const Team& team) const { return number % passes * team.warps() + team.tile; }
};

// Where 16 bytes of a head's key or value lie in a turn's keys or values: the pieces of a head are permuted, so that
// neither the lanes that read neighbouring keys nor those that read one piece of eight keys meet in a bank.
DEVICE uint32_t piece_at(int key, int piece) {
    const int low = cfg::FP8_CACHE ? key >> 2 & 1 : key >> 1 & 3, high = cfg::FP8_CACHE ? key >> 1 & 1 : key & 1;
    return static_cast<uint32_t>(key * HEAD_BYTES + (piece ^ (low | high * (PIECES / 2))) * 16);
}

// Copies a team's turns, one after another through all its units. Slots are asked for up to four turns at once, into
// registers; when their time comes they pass through a place in shared memory that each warp has for itself.
struct Feed {
    const Params& p;
    const Rows& rows;
    const Units& units;
    const Team& team;
    int number = -1, key = 0, end = 0;     // of the turn whose slots come next
    int place = 0;                         // where the next copy goes
    int32_t ahead[BATCH] = {};             // lane i: slot of key i of a turn; of the turns after those in shared memory
    int turn = 0, turns = 0, kv_head = 0;  // next of the turns whose slots are in shared memory
    int ahead_turns = 0, ahead_kv_head = 0;

    DEVICE Feed(const Params& p, const Rows& rows, const Units& units, const Team& team)
        : p(p), rows(rows), units(units), team(team) {
        ask();
    }
    DEVICE void ask() {
        if (key >= end) {
            ++number;
            if (!units.has(number)) {
                ahead_turns = 0;
                return;
            }
            key = units.first_key(number);
            end = units.end_key(number);
            ahead_kv_head = units.kv_head(number);
        }
        const int left = (end - key + KEYS - 1) / KEYS;
        ahead_turns = left < BATCH ? left : BATCH;
#pragma unroll
        for (int i = 0; i < BATCH; ++i) ahead[i] = slot_of(p, rows, key + i * KEYS + lane_index());
        key += ahead_turns * KEYS;
    }
    DEVICE void copy() {
        const uint32_t slots = cfg::LENT_AT + HELD_TURNS * TURN_BYTES + warp_index() * BATCH * WARP * 4;
        if (turn == turns) {
            warp_sync();
#pragma unroll
            for (int i = 0; i < BATCH; ++i) shared_store(slots + (i * WARP + lane_index()) * 4, ahead[i]);
            warp_sync();
            turn = 0;
            turns = ahead_turns;
            kv_head = ahead_kv_head;
            ask();
        }
        if (turn < turns) {
            constexpr uint32_t SIDE_PIECES = KEYS * PIECES;
            const uint32_t to = team.turn_at(place);
#pragma unroll 1
            for (uint32_t i = team.warp * WARP + lane_index(); i < 2 * SIDE_PIECES; i += team.warps() * WARP) {
                const uint32_t of_key = i % SIDE_PIECES / PIECES, piece = i % PIECES, side = i / SIDE_PIECES;
                const void* cache = side == 0 ? p.key_cache : p.value_cache;
                const int64_t line = shared_load<int32_t>(slots + (turn * WARP + of_key) * 4);
                copy_async(to + side * SIDE_BYTES + piece_at(of_key, piece),
                           static_cast<const uint8_t*>(cache) + kv_head * HEAD_BYTES + piece * 16 + line * LINE_BYTES);
            }
            ++turn;
        }
        commit_copies();
        place = team.next(place);
    }
};

// The keys of a turn in shared memory, in the layout of Turn.
struct HeldKeys {
    uint32_t at;

    DEVICE uint4 pairs(int block, int part) const {
        const int g = lane_index() / 4, byte = lane_index() % 4 * static_cast<int>(sizeof(Cached));
        const uint32_t own = piece_at(g, byte / 16) + byte % 16;
        const uint32_t from = at + block * 8 * HEAD_BYTES + (own ^ (part * (HEAD_BYTES / 2)));
        if constexpr (cfg::FP8_CACHE) {
            const uint2 bytes = shared_load<uint2>(from);
            const uint2 low = e4m3x4_to_f16x4(bytes.x), high = e4m3x4_to_f16x4(bytes.y);
            return uint4{low.x, low.y, high.x, high.y};
        } else {
            return shared_load<uint4>(from);
        }
    }
};

// Adds a turn's values, which lie in shared memory from `at` on. They are transposed as they are read, 16 keys and two
// pieces of a head at a time; sums are those of Sums::add_values in other registers: `out` holds, for a piece and with
// fp8 each parity of a dimension, the eight dimensions of that kind.
DEVICE void add_held_values(Sums& sums, const float (&score)[KEY_BLOCKS][4], uint32_t at) {
    const int matrix = lane_index() / 8, key = matrix % 2 * 8 + lane_index() % 8;
    const uint32_t own = piece_at(key, matrix / 2);
#pragma unroll
    for (int two = 0; two < KEY_BLOCKS / 2; ++two) {
        const Weights a(score, two);
#pragma unroll
        for (int pair = 0; pair < PIECES / 2; ++pair) {
            const uint4 v = shared_load_transposed(at + two * 16 * HEAD_BYTES + (own ^ (pair * 32)));
            if constexpr (cfg::FP8_CACHE) {  // a word: two dimensions of two keys
                const uint2 v0 = e4m3x4_to_f16x4(deal_bytes(v.x)), v1 = e4m3x4_to_f16x4(deal_bytes(v.y));
                const uint2 v2 = e4m3x4_to_f16x4(deal_bytes(v.z)), v3 = e4m3x4_to_f16x4(deal_bytes(v.w));
                a.multiply(sums.out[4 * pair], v0.x, v1.x);
                a.multiply(sums.out[4 * pair + 1], v0.y, v1.y);
                a.multiply(sums.out[4 * pair + 2], v2.x, v3.x);
                a.multiply(sums.out[4 * pair + 3], v2.y, v3.y);
            } else {
                a.multiply(sums.out[2 * pair], v.x, v.y);
                a.multiply(sums.out[2 * pair + 1], v.z, v.w);
            }
        }
    }
}

// As Sums::store, from where add_held_values leaves the sums.
DEVICE void store_held(const Params& p, Sums& sums, const Tile& tile, int kv_head, int index, int split) {
    const int t = lane_index() % 4;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        float& total = sums.total[half];
        total += shuffle_xor(total, 1);
        total += shuffle_xor(total, 2);
        if (!tile.view[half].present()) continue;
        const Pair pair(kv_head, index, half);
        const int64_t at = static_cast<int64_t>(pair.row * cfg::HEADS + pair.head) * p.max_splits + split;
        float* to = p.attention_sums + at * cfg::HEAD_DIM;
#pragma unroll
        for (int i = 0; i < 8; i += cfg::FP8_CACHE ? 2 : 1) {
            const float (&a)[4] = sums.out[i];
            if constexpr (cfg::FP8_CACHE) {
                const float (&b)[4] = sums.out[i + 1];
                global_store(reinterpret_cast<float4*>(to + 8 * i + 4 * t),
                             float4{a[2 * half], b[2 * half], a[2 * half + 1], b[2 * half + 1]});
            } else {
                global_store(reinterpret_cast<float2*>(to + 8 * i + 2 * t), float2{a[2 * half], a[2 * half + 1]});
            }
        }
        if (t == 0) {
            global_store(reinterpret_cast<float2*>(p.attention_state) + at,
                         float2{sums.highest[half] * cfg::SCORE_SCALE_LOG2, total});
        }
    }
}

// All units of this CTA.
DEVICE void run_staged(const Params& p, const Rows& rows) {
    const int tiles = (p.rows * GROUP + 15) / 16;
    const Team team(tiles);
#pragma unroll 1
    for (int shift = rows.small_shift; shift <= rows.large_shift; ++shift) {
        const Units units(rows, shift, tiles, team);
        Feed feed(p, rows, units, team);
#pragma unroll 1
        for (int turn = 1; turn < team.depth(); ++turn) feed.copy();
        int place = 0;
#pragma unroll 1
        for (int number = 0; units.has(number); ++number) {
            const int tile = units.tile(number, team), kv_head = units.kv_head(number);
            const Tile queries(p, rows, shift, kv_head, tile);
            const int oldest = warp_maximum(queries.view[0].oldest > queries.view[1].oldest ? queries.view[0].oldest
                                                                                            : queries.view[1].oldest);
            Sums sums;
            const int end = units.end_key(number);
#pragma unroll 1
            for (int first = units.first_key(number); first < end; first += KEYS) {
                team.wait_oldest();
                // Then the turn is whole, and everybody has read the one before it.
                team.meet();
                feed.copy();
                if (tile < tiles) {
                    const uint32_t at = team.turn_at(place);
                    float score[KEY_BLOCKS][4];
                    score_keys(queries, HeldKeys{at}, score);
                    if (first < oldest || first + KEYS > rows.length) hide_unseen(rows, queries, first, score);
                    sums.weigh(score);
                    add_held_values(sums, score, at + SIDE_BYTES);
                }
                place = team.next(place);
            }
            if (tile < tiles) store_held(p, sums, queries, kv_head, tile, units.split(number));
        }
        team.meet();  // before the copies of other splits
    }
}

// The attention of a launch; short splits take their keys and values straight into registers.
DEVICE void run_any(const Params& p, const Rows& rows) {
    if (rows.large_shift >= STAGED_SHIFT) {
        run_staged(p, rows);
        arrive_warp(cfg::LENT_BACK_AT);
    } else {
        arrive_warp(cfg::LENT_BACK_AT);
        run(p, rows);
    }
}

// The weight loader's ring when the last stages are lent to attention for its first lap.
struct LendingRing : Ring {
    bool lent;

    DEVICE explicit LendingRing(const Params& p) : lent(borrows_stages(p)) {}
    DEVICE void wait_empty(const Params& p) {
        if (lent && slot == cfg::STAGES - cfg::LENT_STAGES) take_back(p);
        Ring::wait_empty(p);
    }
    DEVICE void take_back(const Params& p) {
        wait_mbarrier(p, cfg::LENT_BACK_AT, 0, protocol::Site::LENT_BACK);
        fence_generic_to_async();
        lent = false;
    }
};

// The weight loader's ring where attention never borrows.
struct OwnRing : Ring {
    static constexpr bool lent = false;

    DEVICE explicit OwnRing(const Params&) {}
    DEVICE void take_back(const Params&) {}
};

using LoaderRing = std::conditional_t<STAGED, LendingRing, OwnRing>;

}  // namespace attention
