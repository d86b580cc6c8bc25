// Word order B: the bits of each of Marlin's 32-bit words permuted in place, so that a shift and a mask place a pair.
//
// Bits of each 16-bit half, pairs p as in Marlin's order, s = sign, ee m = magnitude:
//     15  14  13  12  11  10   9   8   7   6   5   4   3   2   1   0
//     s0  m3  s3  s1  e3  e3  s2  e0  e0  m0  e1  e1  m1  e2  e2  m2
// Pairs 0, 1, 2 are the placed form shifted right by 0, 3 and 6. No fourth copy of that form fits into 16 bits, so pair
// 3 has the left-over bits.
#pragma once
#include "marlin_order.cuh"

namespace decode {

struct FieldOrder {
    // Pair 3: shifted to bits {4, 3, 1, 0}, then one product copies them 12 (sign), 7 (exponent) and 2 (mantissa) bits
    // up; no two copies of a bit meet, so nothing carries. 9 operations: 6 on the logic pipe, 3 on the FMA pipe. A
    // 64-bit product saves one of them but keeps the FMA pipe, which the scales also need, busy for twice as long.
    DEVICE static void place(uint32_t word, uint32_t (&a)[4]) {
        a[0] = word & PLACED;
        a[2] = (word << 3) & PLACED;
        a[1] = (word << 6) & PLACED;
        a[3] = (((word >> 10) & 0x001b001bu) * ((1u << 12) + (1u << 7) + (1u << 2))) & PLACED;
    }
};

// Marlin's word to this order.
DEVICE uint32_t to_field_order(uint32_t word) {
    const auto move = [word](int left, uint32_t half_mask) {
        const uint32_t moved = left >= 0 ? word << left : word >> -left;
        return moved & (half_mask * 0x10001u);
    };
    return move(12, 0x8000) | move(6, 0x01c0) | move(5, 0x1000) | move(-1, 0x0038) | move(-2, 0x0200) |
           move(-8, 0x0007) | move(-2, 0x2000) | move(-3, 0x0c00) | move(2, 0x4000);
}

// And back.
DEVICE uint32_t to_marlin_order(uint32_t word) {
    const auto move = [word](int left, uint32_t half_mask) {
        const uint32_t moved = left >= 0 ? word << left : word >> -left;
        return moved & (half_mask * 0x10001u);
    };
    return move(-12, 0x0008) | move(-6, 0x0007) | move(-5, 0x0080) | move(1, 0x0070) | move(2, 0x0800) |
           move(8, 0x0700) | move(2, 0x8000) | move(3, 0x6000) | move(-2, 0x1000);
}

}  // namespace decode
