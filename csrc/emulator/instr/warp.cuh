// Emulated twin of csrc/instr/warp.cuh.
#pragma once
#include <algorithm>

#include "convert.cuh"

DEVICE uint32_t shuffle(uint32_t value, int lane, emulator::Site site = emulator::Site::current()) {
    uint32_t* words = emulator::words();
    words[0] = value;
    words[1] = static_cast<uint32_t>(lane);
    return emulator::meet(emulator::Meeting::shuffle, emulator::shuffle_words, site)[0];
}
DEVICE float shuffle_xor(float value, int mask, emulator::Site site = emulator::Site::current()) {
    return bits_float(shuffle(float_bits(value), lane_index() ^ mask, site));
}
DEVICE int shuffle_xor(int value, int mask, emulator::Site site = emulator::Site::current()) {
    return static_cast<int>(shuffle(static_cast<uint32_t>(value), lane_index() ^ mask, site));
}
DEVICE int uniform_warp_index() { return warp_index(); }
DEVICE uint32_t warp_ballot(bool predicate, emulator::Site site = emulator::Site::current()) {
    emulator::words()[0] = predicate ? 1u : 0u;
    return emulator::meet(emulator::Meeting::ballot, emulator::ballot_words, site)[0];
}
DEVICE int warp_maximum(int value, emulator::Site site = emulator::Site::current()) {
    for (int mask = WARP / 2; mask > 0; mask /= 2) value = std::max(value, shuffle_xor(value, mask, site));
    return value;
}
DEVICE int warp_minimum(int value, emulator::Site site = emulator::Site::current()) {
    return ~warp_maximum(~value, site);
}
DEVICE bool all_lanes(bool predicate, emulator::Site site = emulator::Site::current()) {
    return warp_ballot(predicate, site) == emulator::ALL_LANES;
}
DEVICE uint32_t transpose_8x8(uint32_t value, emulator::Site site = emulator::Site::current()) {
    emulator::words()[0] = value;
    return emulator::meet(emulator::Meeting::transpose, emulator::transpose_words, site)[0];
}
DEVICE uint4 shared_load_transposed(uint32_t offset, emulator::Site site = emulator::Site::current()) {
    const uint4 row = shared_load<uint4>(offset, site);
    uint32_t* words = emulator::words();
    words[0] = row.x;
    words[1] = row.y;
    words[2] = row.z;
    words[3] = row.w;
    const uint32_t* out = emulator::meet(emulator::Meeting::transposed_load, emulator::transpose_rows, site);
    return {out[0], out[1], out[2], out[3]};
}
