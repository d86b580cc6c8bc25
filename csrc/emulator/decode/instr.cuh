// Emulated twin of csrc/decode/instr.cuh. The products by warpgroup are only declared: they are asynchronous, the layer
// does not use them, and a kernel that does will not link here.
#pragma once
#include "instr/convert.cuh"

DEVICE uint32_t multiply_bf16x2_by_low(uint32_t pair, uint32_t scales) {
    return multiply_bf16x2(pair, (scales & 0xffffu) | scales << 16);
}
DEVICE uint32_t multiply_bf16x2_by_high(uint32_t pair, uint32_t scales) {
    return multiply_bf16x2(pair, (scales & 0xffff0000u) | scales >> 16);
}

void warpgroup_fence();
void warpgroup_commit();
template <int PENDING>
void warpgroup_wait();
void warpgroup_mma(float (&c)[1][4], const uint32_t (&a)[4], uint64_t columns);
void warpgroup_mma(float (&c)[2][4], const uint32_t (&a)[4], uint64_t columns);
