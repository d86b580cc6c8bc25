// Operations in which the 32 lanes of a warp meet.
#pragma once
#include "core.cuh"

DEVICE float shuffle_xor(float value, int mask) { return __shfl_xor_sync(0xffffffffu, value, mask); }
DEVICE int shuffle_xor(int value, int mask) { return __shfl_xor_sync(0xffffffffu, value, mask); }
DEVICE uint32_t shuffle(uint32_t value, int lane) { return __shfl_sync(0xffffffffu, value, lane); }
// The number of the warp, which the compiler now knows to be the same in all lanes: what hangs on it is no divergence,
// and addresses stay in uniform registers. All lanes of the warp.
DEVICE int uniform_warp_index() { return static_cast<int>(shuffle(static_cast<uint32_t>(warp_index()), 0)); }
DEVICE uint32_t warp_ballot(bool predicate) { return __ballot_sync(0xffffffffu, predicate); }
DEVICE int warp_minimum(int value) { return __reduce_min_sync(0xffffffffu, value); }
DEVICE int warp_maximum(int value) { return __reduce_max_sync(0xffffffffu, value); }
DEVICE bool all_lanes(bool predicate) { return __all_sync(0xffffffffu, predicate) != 0; }

// Four 8 x 8 matrices of 16-bit elements in shared memory, transposed: lane 8 m + r names the offset of row r of matrix
// m; lane 4g + t gets columns g of rows 2t and 2t + 1, a word for each matrix.
DEVICE uint4 shared_load_transposed(uint32_t offset) {
    uint4 words;
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words.x), "=r"(words.y), "=r"(words.z), "=r"(words.w)
                 : "r"(shared_address(offset))
                 : "memory");
    return words;
}

// Transposes the 8 x 8 matrix of 16-bit elements whose row g lane 4g+t holds at columns 2t and 2t+1.
DEVICE uint32_t transpose_8x8(uint32_t value) {
    uint32_t out;
    asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(out) : "r"(value));
    return out;
}
