// The dense products of the draft's kernels; all weights are bf16.
#pragma once
#include "layer/schedule.cuh"

template <int ROWS, int INPUTS, int CHUNK_INPUTS, int MOST_PARTS, bool WHOLE>
struct Product {
    static constexpr int N = ROWS, K = INPUTS, CHUNK = CHUNK_INPUTS, PARTS = MOST_PARTS;
    static constexpr bool WIDE = false, WHOLE_K = WHOLE;
    static constexpr bool ROW_MAJOR = false;  // token rows [T, K] instead of operand order (tokens.cuh)
};

constexpr int HEADS_WIDTH = cfg::HEADS * cfg::HEAD_DIM, KV_WIDTH = cfg::KV_HEADS * cfg::HEAD_DIM;
constexpr int GROUPS = cfg::HIDDEN / cfg::CONV_GROUP;  // channels of a group share their dynamic taps

// B2: coefficients [side 2, tap 2, group].
struct ConvTaps : Product<4 * GROUPS, cfg::HIDDEN, cfg::CONV_TAPS_CHUNK, cfg::CONV_TAPS_PARTS, false> {};
// B4: rows q | k | v.
struct Qkv : Product<HEADS_WIDTH + 2 * KV_WIDTH, cfg::HIDDEN, cfg::QKV_CHUNK, cfg::QKV_PARTS, false> {};
// Of several ranks each sends the outputs of a block as soon as it has them (residual.cuh).
struct Output : Product<cfg::HIDDEN, HEADS_WIDTH, cfg::OUTPUT_CHUNK, cfg::OUTPUT_PARTS, (cfg::RANKS > 1)> {};
// B10: rows gate | up.
struct GateUp : Product<2 * cfg::INTER, cfg::HIDDEN, cfg::GATE_UP_CHUNK, cfg::GATE_UP_PARTS, false> {};
struct Down : Product<cfg::HIDDEN, cfg::INTER, cfg::DOWN_CHUNK, cfg::DOWN_PARTS, (cfg::RANKS > 1)> {};
// Section 7.1: the taps to one row, and that row to k | v of one layer.
struct Fusion : Product<cfg::HIDDEN / cfg::RANKS, cfg::TAPS * cfg::HIDDEN, cfg::FUSION_CHUNK, cfg::FUSION_PARTS, false> {
    static constexpr bool ROW_MAJOR = true;  // the target's layers write them
};
struct ContextKv : Product<2 * KV_WIDTH, cfg::HIDDEN, cfg::CONTEXT_KV_CHUNK, cfg::CONTEXT_KV_PARTS, false> {};
// Section 7.3.
struct SelectorState : Product<cfg::RANK, cfg::HIDDEN, cfg::SELECTOR_CHUNK, cfg::SELECTOR_PARTS, false> {};
// Whole warps of outputs, because their lanes act together; fragment order pads with zeros.
struct LmHead
    : Product<(cfg::VOCAB + WARP - 1) / WARP * WARP, cfg::HIDDEN, cfg::LM_HEAD_CHUNK, 1, true> {};

template <class G>
constexpr int PARTIAL_ELEMENTS = Geometry<G>::BLOCKS * G::PARTS * cfg::ROW_CAP * BLOCK_ROWS;
