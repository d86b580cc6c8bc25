// The dense products of the target's kernels.
#pragma once
#include "schedule.cuh"

struct OProj {  // with several ranks, a block is one CTA's, which sends it to all
    static constexpr int N = cfg::HIDDEN, K = cfg::HEADS * cfg::HEAD_DIM, CHUNK = cfg::O_PROJ_CHUNK,
                         PARTS = cfg::O_PROJ_PARTS;
    static constexpr bool WIDE = false, WHOLE_K = cfg::RANKS > 1;
};
struct Router {  // fp32 weights
    static constexpr int N = cfg::EXPERTS, K = cfg::HIDDEN, CHUNK = cfg::ROUTER_CHUNK, PARTS = cfg::ROUTER_PARTS;
    static constexpr bool WIDE = true, WHOLE_K = false;
};
struct PreProj {  // this rank's columns
    static constexpr int N = cfg::MOE_HIDDEN / cfg::RANKS, K = cfg::HIDDEN, CHUNK = cfg::PRE_PROJ_CHUNK, PARTS = cfg::PRE_PROJ_PARTS;
    static constexpr bool WIDE = false, WHOLE_K = false;
};
struct PostProj {  // this rank's columns
    static constexpr int N = cfg::HIDDEN / cfg::RANKS, K = cfg::MOE_HIDDEN, CHUNK = cfg::POST_PROJ_CHUNK,
                         PARTS = cfg::POST_PROJ_PARTS;
    static constexpr bool WIDE = false, WHOLE_K = false;
};
struct QkvProj {  // rows q | k | v | output gate
    static constexpr int N = 2 * (cfg::HEADS + cfg::KV_HEADS) * cfg::HEAD_DIM, K = cfg::HIDDEN,
                         CHUNK = cfg::QKV_PROJ_CHUNK, PARTS = cfg::QKV_PROJ_PARTS;
    static constexpr bool WIDE = false, WHOLE_K = false;
};
struct LmHead {  // a block keeps its whole K on one CTA, so that logits need no second pass
    static constexpr int N = cfg::VOCAB, K = cfg::HIDDEN, CHUNK = cfg::LM_HEAD_CHUNK, PARTS = 1;
    static constexpr bool WIDE = false, WHOLE_K = true;
};
