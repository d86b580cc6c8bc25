// Emulated twin of csrc/instr/mma.cuh: products and sums in fp32, inputs in ascending order.
#pragma once
#include "convert.cuh"

inline void multiply_fragments(emulator::Warp& warp) {
    float a[16][16], b[16][8];
    for (int lane = 0; lane < WARP; ++lane) {
        const int g = lane / 4, t = lane % 4;
        for (int word = 0; word < 4; ++word) {
            for (int half = 0; half < 2; ++half) {
                const uint32_t bits = warp.in[lane][word] >> (16 * half) & 0xffffu;
                a[g + word % 2 * 8][2 * t + half + word / 2 * 8] = bf16_to_float(bits);
            }
        }
        for (int word = 0; word < 2; ++word) {
            for (int half = 0; half < 2; ++half) {
                b[2 * t + half + word * 8][g] = bf16_to_float(warp.in[lane][4 + word] >> (16 * half) & 0xffffu);
            }
        }
    }
    for (int lane = 0; lane < WARP; ++lane) {
        for (int i = 0; i < 4; ++i) {
            const int row = lane / 4 + i / 2 * 8, column = lane % 4 * 2 + i % 2;
            float sum = 0.f;
            for (int k = 0; k < 16; ++k) sum += a[row][k] * b[k][column];
            warp.out[lane][i] = float_bits(sum);
        }
    }
}

DEVICE void mma_bf16(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) {
    const uint32_t* out = emulator::warp_collective({a0, a1, a2, a3, b0, b1}, multiply_fragments);
    for (int i = 0; i < 4; ++i) c[i] += bits_float(out[i]);
}
