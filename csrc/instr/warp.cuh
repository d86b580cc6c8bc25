// Operations in which the 32 lanes of a warp meet.
#pragma once
#include "core.cuh"

DEVICE float shuffle_xor(float value, int mask) { return __shfl_xor_sync(0xffffffffu, value, mask); }
DEVICE int shuffle_xor(int value, int mask) { return __shfl_xor_sync(0xffffffffu, value, mask); }
DEVICE uint32_t shuffle(uint32_t value, int lane) { return __shfl_sync(0xffffffffu, value, lane); }
DEVICE uint32_t warp_ballot(bool predicate) { return __ballot_sync(0xffffffffu, predicate); }
DEVICE int warp_minimum(int value) { return __reduce_min_sync(0xffffffffu, value); }
DEVICE int warp_maximum(int value) { return __reduce_max_sync(0xffffffffu, value); }
DEVICE bool all_lanes(bool predicate) { return __all_sync(0xffffffffu, predicate) != 0; }

// Transposes the 8 x 8 matrix of 16-bit elements whose row g lane 4g+t holds at columns 2t and 2t+1.
DEVICE uint32_t transpose_8x8(uint32_t value) {
    uint32_t out;
    asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(out) : "r"(value));
    return out;
}
