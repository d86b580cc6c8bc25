// A6: attention of the step's rows over the paged cache, split over key ranges (flash decoding).
// Key index i < length is position i of the committed sequence; length + r is row r of this step. A split is a run of
// keys at fixed indices, counted from key 0, whose size follows from the row's own position; so a row's partial of a
// split depends on that row's query, position and mask alone.
#pragma once
#include "turn.cuh"

namespace attention {

// One warp: queries of tile `tile` against split `split` (of 2^shift keys) of KV head `kv_head`.
DEVICE void run_unit(const Params& p, const Rows& rows, int shift, int split, int kv_head, int tile) {
    const int t = lane_index() % 4;
    const int split_first = (rows.first_split(shift) + split) << shift;
    const int upto = split_first + (1 << shift), split_end = upto < rows.end ? upto : rows.end;
    const int own = (kv_head * cfg::HEAD_DIM / 8 + t) * static_cast<int>(sizeof(Cached));
    const uint8_t* key_cache = static_cast<const uint8_t*>(p.key_cache) + own;
    const uint8_t* value_cache = static_cast<const uint8_t*>(p.value_cache) + own;
    Turn keys, values;
    int32_t slots[KEY_BLOCKS];
    deal_slots(slot_of(p, rows, split_first + lane_index()), slots);
    keys.load(key_cache, slots);
    values.load(value_cache, slots);
    int32_t slot = slot_of(p, rows, split_first + KEYS + lane_index());  // of the next turn
    const Tile queries(p, rows, shift, kv_head, tile);
    Sums sums;
#pragma unroll 1
    for (int first = split_first; first < split_end; first += KEYS) {
        const bool more = first + KEYS < split_end;
        float score[KEY_BLOCKS][4];
        score_keys(queries, keys, score);
        if (more) {
            deal_slots(slot, slots);
            keys.load(key_cache, slots);
        }
        hide_unseen(rows, queries, first, score);
        sums.weigh(score);
        sums.add_values(score, values);
        if (more) {
            values.load(value_cache, slots);
            slot = slot_of(p, rows, first + 2 * KEYS + lane_index());
        }
    }

    sums.store(p, queries, kv_head, tile, split);
}

// One warp of every CTA: pulls the newest committed keys and values of the next layer into L2 while weights stream, so
// that its attention does not queue for memory behind them.
DEVICE void prefetch_next(const Params& p) {
    constexpr int NEWEST = 4096;
    const int length = global_load(p.length);
    const int many = p.next_window < NEWEST ? p.next_window : NEWEST;
    const int first = length < many ? 0 : length - many;
#pragma unroll 1
    for (int key = first + cta_index() * WARP + lane_index(); key < length; key += cfg::SMS * WARP) {
        const int64_t at = static_cast<int64_t>(global_load(p.next_page_table + key)) * LINE_BYTES;
        for (int byte = 0; byte < LINE_BYTES; byte += FETCHED) {
            prefetch_line(static_cast<const uint8_t*>(p.next_key_cache) + at + byte);
            prefetch_line(static_cast<const uint8_t*>(p.next_value_cache) + at + byte);
        }
    }
}

// All units of this CTA: (split, KV head) pairs are dealt to the CTAs, query tiles to the warps.
DEVICE void run(const Params& p, const Rows& rows) {
    const int tiles = (p.rows * GROUP + 15) / 16;
#pragma unroll 1
    for (int shift = rows.small_shift; shift <= rows.large_shift; ++shift) {
        const int pairs = rows.splits(shift) * cfg::KV_HEADS;
        int pair = cta_index();
#pragma unroll 1
        for (int tile = warp_index();; tile += cfg::MATH_WARPS) {
            for (; tile >= tiles; tile -= tiles) pair += cfg::SMS;
            if (pair >= pairs) break;
            run_unit(p, rows, shift, pair / cfg::KV_HEADS, pair % cfg::KV_HEADS, tile);
        }
    }
}

}  // namespace attention
