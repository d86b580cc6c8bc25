// The one instruction the decode needs beside those of csrc/instr.
#pragma once
#include "../instr/core.cuh"

// Both halves of `pair` times the low (or the high) half of `scales`: HMUL2 picks the half itself, where a broadcast
// register would cost a PRMT.
DEVICE uint32_t multiply_bf16x2_by_low(uint32_t pair, uint32_t scales) {
    uint32_t out;
    asm("{\n.reg .b16 low, high;\n.reg .b32 both;\nmov.b32 {low, high}, %2;\nmov.b32 both, {low, low};\n"
        "mul.rn.bf16x2 %0, %1, both;\n}"
        : "=r"(out)
        : "r"(pair), "r"(scales));
    return out;
}
DEVICE uint32_t multiply_bf16x2_by_high(uint32_t pair, uint32_t scales) {
    uint32_t out;
    asm("{\n.reg .b16 low, high;\n.reg .b32 both;\nmov.b32 {low, high}, %2;\nmov.b32 both, {high, high};\n"
        "mul.rn.bf16x2 %0, %1, both;\n}"
        : "=r"(out)
        : "r"(pair), "r"(scales));
    return out;
}
