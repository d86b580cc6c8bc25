// Emulated twin of csrc/instr/convert.cuh.
#pragma once
#include <cmath>
#include <limits>

#include "core.cuh"

DEVICE uint32_t float_bits(float value) { return std::bit_cast<uint32_t>(value); }
DEVICE float bits_float(uint32_t bits) { return std::bit_cast<float>(bits); }
DEVICE float bf16_to_float(uint32_t bits) { return bits_float(bits << 16); }
DEVICE uint16_t float_to_bf16(float value) {
    const uint32_t bits = float_bits(value);
    if (std::isnan(value)) return static_cast<uint16_t>(0x7fff);
    return static_cast<uint16_t>((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}
DEVICE uint32_t pack_bf16x2(float low, float high) {
    return float_to_bf16(low) | static_cast<uint32_t>(float_to_bf16(high)) << 16;
}
DEVICE uint32_t multiply_bf16x2(uint32_t a, uint32_t b) {
    return pack_bf16x2(bf16_to_float(a & 0xffffu) * bf16_to_float(b & 0xffffu),
                       bf16_to_float(a >> 16) * bf16_to_float(b >> 16));
}
DEVICE uint32_t multiply_bf16x2_by_low(uint32_t pair, uint32_t scales) {
    return multiply_bf16x2(pair, (scales & 0xffffu) | scales << 16);
}
DEVICE uint32_t multiply_bf16x2_by_high(uint32_t pair, uint32_t scales) {
    return multiply_bf16x2(pair, scales >> 16 | (scales & 0xffff0000u));
}
DEVICE float e4m3_to_float(uint32_t byte) {
    const int exponent = byte >> 3 & 15, mantissa = byte & 7;
    float value = exponent == 0 ? std::ldexp(static_cast<float>(mantissa), -9)
                                : std::ldexp(1.f + static_cast<float>(mantissa) / 8.f, exponent - 7);
    if (exponent == 15 && mantissa == 7) value = std::numeric_limits<float>::quiet_NaN();
    return byte & 0x80u ? -value : value;
}
DEVICE uint32_t e4m3x2_to_bf16x2(uint32_t bytes) {
    return pack_bf16x2(e4m3_to_float(bytes & 0xffu), e4m3_to_float(bytes >> 8 & 0xffu));
}
DEVICE uint32_t float_to_f16(float value) {
    const uint32_t sign = std::signbit(value) ? 0x8000u : 0u;
    if (std::isnan(value)) return 0x7fffu;
    const float magnitude = std::fabs(value);
    if (magnitude >= 65520.f) return sign | 0x7c00u;
    const int exponent = magnitude < std::ldexp(1.f, -14) ? -14 : std::ilogb(magnitude);
    const float steps = std::nearbyint(std::ldexp(magnitude, 10 - exponent));  // as in float_to_e4m3
    return sign | static_cast<uint32_t>(static_cast<int>(steps) + (exponent + 14) * 1024);
}
DEVICE uint32_t pack_f16x2(float low, float high) { return float_to_f16(low) | float_to_f16(high) << 16; }
DEVICE uint32_t e4m3x2_to_f16x2(uint32_t bytes) {
    return pack_f16x2(e4m3_to_float(bytes & 0xffu), e4m3_to_float(bytes >> 8 & 0xffu));
}
DEVICE uint2 e4m3x4_to_f16x4(uint32_t bytes) {
    return {e4m3x2_to_f16x2(bytes & 0xffffu), e4m3x2_to_f16x2(bytes >> 16)};
}
DEVICE uint32_t deal_bytes(uint32_t word) {
    return (word & 0xff0000ffu) | (word >> 8 & 0xff00u) | (word << 8 & 0xff0000u);
}
DEVICE uint8_t float_to_e4m3(float value) {
    const uint8_t sign = std::signbit(value) ? 0x80 : 0;
    if (std::isnan(value)) return static_cast<uint8_t>(sign | 0x7f);
    const float magnitude = std::fmin(std::fabs(value), 448.f);
    const int exponent = magnitude < std::ldexp(1.f, -6) ? -6 : std::ilogb(magnitude);
    const float steps =
        std::nearbyint(std::ldexp(magnitude, 3 - exponent));  // mantissa with its hidden bit; ties to even
    const int code = static_cast<int>(steps) + (exponent + 6) * 8;
    return static_cast<uint8_t>(sign | code);
}
DEVICE float larger(float a, float b) { return std::fmax(a, b); }
DEVICE float reciprocal_root(float value) { return 1.f / std::sqrt(value); }
DEVICE float exponential(float value) { return std::exp(value); }
DEVICE float exponential_base2(float value) { return std::exp2(value); }
DEVICE float hyperbolic_tangent(float value) { return std::tanh(value); }
// The compiler joins no operation with one whose operand it has to fetch from memory anew.
DEVICE float rounded_sum(float a, float b) {
    volatile float sum = a + b;
    return sum;
}
DEVICE float rounded_product(float a, float b) {
    volatile float product = a * b;
    return product;
}
DEVICE float rounded_quotient(float a, float b) { return a / b; }
DEVICE float round_down(float value) { return std::floor(value); }
DEVICE float infinity() { return std::numeric_limits<float>::infinity(); }
