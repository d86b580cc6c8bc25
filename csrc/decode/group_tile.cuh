// The products of a decoded tile by a warpgroup instead of one warp at a time. On an H200 this pays from nine token
// rows on (docs/nvfp4-decode.md): 16 columns cost one instruction where mma.sync needs two.
#pragma once
#include "instr.cuh"
#include "tile.cuh"

namespace decode {

// acc[i] += fragment i times 16 inputs, by four warps that hold tiles of the same inputs; `tokens` describes those.
// Runs on while the warps decode their next tiles; at most one tile's products are in flight when it returns, so `a`
// may be written again after the next call. Before acc is read: warpgroup_wait<0>().
template <int NT>
DEVICE void multiply_tile_by_group(float (&acc)[4][NT][4], const uint32_t (&a)[4][4], uint64_t tokens) {
    warpgroup_fence();
#pragma unroll
    for (int i = 0; i < 4; ++i) warpgroup_mma(acc[i], a[i], tokens);
    warpgroup_commit();
    warpgroup_wait<1>();
}

}  // namespace decode
