// Emulated twin of csrc/instr/mma.cuh.
#pragma once
#include "convert.cuh"

DEVICE void mma_bf16(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1,
                     emulator::Site site = emulator::Site::current()) {
    uint32_t* words = emulator::words();
    words[0] = a0;
    words[1] = a1;
    words[2] = a2;
    words[3] = a3;
    words[4] = b0;
    words[5] = b1;
    const uint32_t* product = emulator::meet(emulator::Meeting::mma, emulator::multiply_fragments, site);
    for (int i = 0; i < 4; ++i) c[i] += bits_float(product[i]);
}
