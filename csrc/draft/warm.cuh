// Brings into L2 what the row operations of a layer would read from HBM with nothing to hide it behind.
#pragma once
#include "instr/bulk.cuh"
#include "layer/wait.cuh"

namespace warm {

constexpr int PIECE = 2048;  // bytes

// One warp: the CTA's share of an array, PIECE bytes at a time.
DEVICE void ask(const void* array, int bytes) {
    const int at = (cta_index() + cfg::SMS * lane_index()) * PIECE;
    if (at < bytes) bulk_prefetch(static_cast<const char*>(array) + at, bytes - at < PIECE ? bytes - at : PIECE);
}

// One warp: the CTA's share of a layer's small weights.
DEVICE void small_weights(const Params& p, int layer) {
    constexpr int ROW = cfg::HIDDEN * 2;
    ask(p.attention_base[layer], 4 * ROW);
    ask(p.mlp_base[layer], 4 * ROW);
    ask(p.post_attention_norm[layer], ROW);
    ask(p.next_norm[layer], ROW);
}

}  // namespace warm
