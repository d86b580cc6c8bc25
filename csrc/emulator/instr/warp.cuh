// Emulated twin of csrc/instr/warp.cuh.
#pragma once
#include "convert.cuh"

DEVICE uint32_t shuffle(uint32_t value, int lane) {
    return emulator::warp_collective({value, static_cast<uint32_t>(lane)}, [](emulator::Warp& warp) {
        for (int i = 0; i < WARP; ++i) warp.out[i][0] = warp.in[warp.in[i][1] % WARP][0];
    })[0];
}
DEVICE float shuffle_xor(float value, int mask) { return bits_float(shuffle(float_bits(value), lane_index() ^ mask)); }
DEVICE int shuffle_xor(int value, int mask) {
    return static_cast<int>(shuffle(static_cast<uint32_t>(value), lane_index() ^ mask));
}
DEVICE uint32_t warp_ballot(bool predicate) {
    return emulator::warp_collective({predicate ? 1u : 0u}, [](emulator::Warp& warp) {
        uint32_t bits = 0;
        for (int i = 0; i < WARP; ++i) bits |= warp.in[i][0] << i;
        for (int i = 0; i < WARP; ++i) warp.out[i][0] = bits;
    })[0];
}
DEVICE bool all_lanes(bool predicate) { return warp_ballot(predicate) == 0xffffffffu; }
DEVICE uint32_t transpose_8x8(uint32_t value) {
    return emulator::warp_collective({value}, [](emulator::Warp& warp) {
        auto element = [&](int row, int column) {
            return warp.in[row * 4 + column / 2][0] >> (column % 2 * 16) & 0xffffu;
        };
        for (int i = 0; i < WARP; ++i) {
            warp.out[i][0] = element(i % 4 * 2, i / 4) | element(i % 4 * 2 + 1, i / 4) << 16;
        }
    })[0];
}
