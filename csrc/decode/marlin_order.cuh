// Word order A: Marlin's own. Nibbles p and p + 4 of a word are a pair of inputs (low and high half): p = 0, 1 of
// output row g (inputs 2t and 2t + 8), p = 2, 3 of row g + 8.
#pragma once
#include "../instr/core.cuh"

namespace decode {

// A code placed in a bf16: sign at bit 15, the three magnitude bits at 8..6, everything else zero. As a number that is
// e2m1 * 2^-126, zero and the subnormal 0.5 included.
constexpr uint32_t SIGN = 0x80008000u, MAGNITUDE = 0x01c001c0u, PLACED = SIGN | MAGNITUDE;

// With one shift and one mask per field this is 15 operations a word. A product with two powers of two shifts a whole
// nibble twice at once and runs on the FMA pipe: the copy 6 bits further up brings the sign to bit 15, and one mask
// keeps the four bits wanted. 12 operations, of which 9 on the logic pipe and 3 on the FMA pipe.
struct MarlinOrder {
    // a[0], a[2]: row g; a[1], a[3]: row g + 8; values times 2^-126.
    DEVICE static void place(uint32_t word, uint32_t (&a)[4]) {
        const uint32_t upper = word >> 6;
        a[0] = ((word & 0x000f000fu) * ((1u << 6) + (1u << 12))) & PLACED;
        a[2] = ((word & 0x00f000f0u) * ((1u << 2) + (1u << 8))) & PLACED;
        a[1] = ((upper & 0x003c003cu) * ((1u << 4) + (1u << 10))) & PLACED;
        a[3] = (upper & MAGNITUDE) | (word & SIGN);
    }
};

}  // namespace decode
