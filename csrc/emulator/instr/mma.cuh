// Emulated twin of csrc/instr/mma.cuh.
#pragma once
#include "convert.cuh"

namespace emulator {

inline void multiply_add(float (&c)[4], void (*multiply)(Warp&), const uint32_t (&in)[6], const Site& site) {
    for (int i = 0; i < 6; ++i) words()[i] = in[i];
    const uint32_t* product = meet(Meeting::mma, multiply, site);
    for (int i = 0; i < 4; ++i) c[i] += std::bit_cast<float>(product[i]);
}

}  // namespace emulator

DEVICE void mma_bf16(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1,
                     emulator::Site site = emulator::Site::current()) {
    emulator::multiply_add(c, emulator::multiply_bf16_fragments, {a0, a1, a2, a3, b0, b1}, site);
}
DEVICE void mma_f16(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1,
                    emulator::Site site = emulator::Site::current()) {
    emulator::multiply_add(c, emulator::multiply_f16_fragments, {a0, a1, a2, a3, b0, b1}, site);
}
