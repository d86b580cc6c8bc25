// Brings into L2 what the row operations and the attention of a layer will read from HBM with nothing to hide it
// behind.
#pragma once
#include "attention.cuh"
#include "instr/bulk.cuh"

namespace warm {

constexpr int PIECE = 2048;  // bytes

// One warp: the CTA's share of an array, PIECE bytes at a time.
DEVICE void ask(const void* array, int bytes) {
    const int at = (cta_index() + cfg::SMS * lane_index()) * PIECE;
    if (at < bytes) bulk_prefetch(static_cast<const char*>(array) + at, bytes - at < PIECE ? bytes - at : PIECE);
}

// One warp: the CTA's share of the layer's small weights.
DEVICE void small_weights(const Params& p) {
    constexpr int ROW = cfg::HIDDEN * 2;
    ask(p.attention_base, 4 * ROW);
    ask(p.mlp_base, 4 * ROW);
    ask(p.post_attention_norm, ROW);
    ask(p.next_norm, ROW);
}

// One warp: this CTA's share of the context's keys and values, all KV heads of a position at a time.
DEVICE void context(const Params& p) {
    constexpr int LINE = cfg::KV_HEADS * cfg::HEAD_DIM;
    const attention::Range range(p);
#pragma unroll 1
    for (int index = range.first + cta_index() + cfg::SMS * lane_index(); index < range.length;
         index += cfg::SMS * WARP) {
        const int64_t slot = global_load(p.page_table + index);
        bulk_prefetch(p.key_cache + slot * LINE, LINE * 2);
        bulk_prefetch(p.value_cache + slot * LINE, LINE * 2);
    }
}

}  // namespace warm
