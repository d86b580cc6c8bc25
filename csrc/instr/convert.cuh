// Number formats and the few transcendental functions; bf16 travels as uint16_t, pairs as uint32_t (low half first).
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include "core.cuh"

DEVICE uint32_t float_bits(float value) { return __float_as_uint(value); }
DEVICE float bits_float(uint32_t bits) { return __uint_as_float(bits); }
DEVICE float bf16_to_float(uint32_t bits) { return bits_float(bits << 16); }
DEVICE uint16_t float_to_bf16(float value) { return __bfloat16_as_ushort(__float2bfloat16_rn(value)); }
DEVICE uint32_t pack_bf16x2(float low, float high) {
    __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    return *reinterpret_cast<uint32_t*>(&pair);
}
DEVICE uint32_t multiply_bf16x2(uint32_t a, uint32_t b) {
    uint32_t out;
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(out) : "r"(a), "r"(b));
    return out;
}
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
// Two e4m3 bytes (low byte first) to two bf16; exact.
DEVICE uint32_t e4m3x2_to_bf16x2(uint32_t bytes) {
    uint32_t half2;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(half2) : "h"(static_cast<uint16_t>(bytes)));
    float2 pair = __half22float2(*reinterpret_cast<__half2*>(&half2));
    return pack_bf16x2(pair.x, pair.y);
}
// The same to two f16; exact.
DEVICE uint32_t e4m3x2_to_f16x2(uint32_t bytes) {
    uint32_t half2;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(half2) : "h"(static_cast<uint16_t>(bytes)));
    return half2;
}
// Four e4m3 bytes to two pairs of f16; exact. The conversion takes either half of a register itself, where a shift in
// the source costs an instruction.
DEVICE uint2 e4m3x4_to_f16x4(uint32_t bytes) {
    uint2 pairs;
    asm("{\n.reg .b16 low, high;\nmov.b32 {low, high}, %2;\ncvt.rn.f16x2.e4m3x2 %0, low;\n"
        "cvt.rn.f16x2.e4m3x2 %1, high;\n}"
        : "=r"(pairs.x), "=r"(pairs.y)
        : "r"(bytes));
    return pairs;
}
// Bytes 0, 2, 1, 3 of a word.
DEVICE uint32_t deal_bytes(uint32_t word) { return __byte_perm(word, 0u, 0x3120); }
DEVICE uint32_t pack_f16x2(float low, float high) {
    __half2 pair = __floats2half2_rn(low, high);
    return *reinterpret_cast<uint32_t*>(&pair);
}
// Round to nearest even, clamped to +-448.
DEVICE uint8_t float_to_e4m3(float value) {
    return static_cast<uint8_t>(__nv_cvt_float_to_fp8(value, __NV_SATFINITE, __NV_E4M3));
}
DEVICE float larger(float a, float b) { return fmaxf(a, b); }
DEVICE float reciprocal_root(float value) { return rsqrtf(value); }
DEVICE float exponential(float value) { return expf(value); }
// One instruction; results below 2^-126 are zero.
DEVICE float exponential_base2(float value) {
    float power;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(value));
    return power;
}
DEVICE float hyperbolic_tangent(float value) { return tanhf(value); }
// Rounded by themselves: never joined into a fused multiply-add, which would give other bits.
DEVICE float rounded_sum(float a, float b) { return __fadd_rn(a, b); }
DEVICE float rounded_product(float a, float b) { return __fmul_rn(a, b); }
DEVICE float rounded_quotient(float a, float b) { return __fdiv_rn(a, b); }
DEVICE float round_down(float value) { return floorf(value); }
DEVICE float infinity() { return __int_as_float(0x7f800000); }
