// Instructions the decode needs beside those of csrc/instr: products by a warpgroup.
#pragma once
#include "../instr/core.cuh"

// Asynchronous products by four neighbouring warps, the first a multiple of 4 (a warpgroup). A warp gives 16 of the 64
// rows from registers, in the fragment layout of mma_bf16; the columns lie in shared memory as core matrices of 8
// columns x 8 inputs (128 contiguous bytes, 16 a column). Sums stay in registers, 4 for each 8 columns.

// Columns of one k16 step: `address` of the first core matrix, bytes to the next 8 inputs and to the next 8 columns.
DEVICE uint64_t columns_descriptor(uint32_t address, uint32_t next_inputs, uint32_t next_columns) {
    return static_cast<uint64_t>((address & 0x3ffffu) >> 4) | static_cast<uint64_t>(next_inputs >> 4) << 16 |
           static_cast<uint64_t>(next_columns >> 4) << 32;
}
// Registers written before become visible to the products issued after it.
DEVICE void warpgroup_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void warpgroup_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// At most PENDING committed groups are still running; the registers of the others may be used again.
template <int PENDING>
DEVICE void warpgroup_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}
DEVICE void warpgroup_mma(float (&c)[1][4], const uint32_t (&a)[4], uint64_t columns) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%0,%1,%2,%3},{%4,%5,%6,%7},%8,1,1,1,0;"
                 : "+f"(c[0][0]), "+f"(c[0][1]), "+f"(c[0][2]), "+f"(c[0][3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(columns));
}
DEVICE void warpgroup_mma(float (&c)[2][4], const uint32_t (&a)[4], uint64_t columns) {
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 {%0,%1,%2,%3,%4,%5,%6,%7},{%8,%9,%10,%11},%12,1,1,1,0;"
        : "+f"(c[0][0]), "+f"(c[0][1]), "+f"(c[0][2]), "+f"(c[0][3]), "+f"(c[1][0]), "+f"(c[1][1]), "+f"(c[1][2]),
          "+f"(c[1][3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(columns));
}
