#include "warp.h"

#include <bit>
#include <cmath>

namespace emulator {
namespace {

const char* name_of(Meeting meeting) {
    static const char* const names[] = {
        "warp_sync", "elect_one", "shuffle", "ballot", "mma", "transpose", "shared_load_transposed"};
    return names[static_cast<int>(meeting)];
}

}  // namespace

const uint32_t* meet(Meeting meeting, void (*compute)(Warp&), const Site& site) {
    Lane& me = *current;
    Warp& warp = *me.warp;
    if (warp.arrived == 0) warp.meeting = meeting;
    if (warp.meeting != meeting) {
        fail("divergence",
             std::string("comes to ") + name_of(meeting) + " while lanes of its warp are at " + name_of(warp.meeting),
             site);
    }
    warp.arrived |= 1u << me.index;
    if (warp.arrived == ALL_LANES) {
        warp.arrived = 0;
        compute(warp);
        for (int lane = 0; lane < WARP_LANES; ++lane) warp.lanes[lane].wait = {};
        warp.ready = ALL_LANES;
    } else if ((warp.arrived | warp.exited) == ALL_LANES) {
        fail("divergence", std::string("comes to ") + name_of(meeting) + ", but lanes of its warp have ended", site);
    } else {
        machine().wait_here(WaitKind::lanes, 0, site);
    }
    return warp.out[me.index];
}

void sync_lanes(Warp& warp) {
    Machine& m = machine();
    if (m.options.ordered == 0 || m.injected(Injection::missing_warp_sync)) return;
    Lane* lanes[WARP_LANES];
    for (int lane = 0; lane < WARP_LANES; ++lane) lanes[lane] = &warp.lanes[lane];
    m.order_group(lanes, WARP_LANES);
}

void no_words(Warp&) {}

void shuffle_words(Warp& warp) {
    for (int lane = 0; lane < WARP_LANES; ++lane) warp.out[lane][0] = warp.in[warp.in[lane][1] % WARP_LANES][0];
}

void ballot_words(Warp& warp) {
    uint32_t bits = 0;
    for (int lane = 0; lane < WARP_LANES; ++lane) bits |= warp.in[lane][0] << lane;
    for (int lane = 0; lane < WARP_LANES; ++lane) warp.out[lane][0] = bits;
}

void transpose_words(Warp& warp) {
    auto element = [&](int row, int column) { return warp.in[row * 4 + column / 2][0] >> (column % 2 * 16) & 0xffffu; };
    for (int lane = 0; lane < WARP_LANES; ++lane) {
        warp.out[lane][0] = element(lane % 4 * 2, lane / 4) | element(lane % 4 * 2 + 1, lane / 4) << 16;
    }
}

void transpose_rows(Warp& warp) {
    for (int lane = 0; lane < WARP_LANES; ++lane) {
        for (int matrix = 0; matrix < 4; ++matrix) {
            auto element = [&](int row, int column) {
                return warp.in[matrix * 8 + row][column / 2] >> (column % 2 * 16) & 0xffffu;
            };
            warp.out[lane][matrix] = element(lane % 4 * 2, lane / 4) | element(lane % 4 * 2 + 1, lane / 4) << 16;
        }
    }
}

namespace {

float float_of_half(uint32_t bits) {
    const int exponent = bits >> 10 & 31, mantissa = bits & 1023;
    float value = exponent == 0 ? std::ldexp(static_cast<float>(mantissa), -24)
                                : std::ldexp(static_cast<float>(1024 + mantissa), exponent - 25);
    if (exponent == 31) value = mantissa == 0 ? INFINITY : NAN;
    return bits & 0x8000u ? -value : value;
}

// Lane l holds, with g = l / 4 and t = l % 4: a = rows g, g + 8, g, g + 8 at inputs {2t, 2t + 1} twice, then
// {2t + 8, 2t + 9} twice; b = column g at the same two input pairs; out = (row g, columns 2t, 2t + 1), (row g + 8,
// same). Products of two 16-bit numbers are exact in fp32; sums run over the inputs in ascending order.
template <class Low, class High>
void multiply(Warp& warp, Low low, High high) {
    alignas(32) float a[16][16];  // [input][row]
    alignas(32) float b[8][16];   // [column][input]
    for (int lane = 0; lane < WARP_LANES; ++lane) {
        const int g = lane / 4, t = lane % 4;
        const uint32_t* in = warp.in[lane];
        for (int word = 0; word < 4; ++word) {
            const int row = g + word % 2 * 8, input = 2 * t + word / 2 * 8;
            a[input][row] = low(in[word]);
            a[input + 1][row] = high(in[word]);
        }
        for (int word = 0; word < 2; ++word) {
            b[g][2 * t + word * 8] = low(in[4 + word]);
            b[g][2 * t + word * 8 + 1] = high(in[4 + word]);
        }
    }
    alignas(32) float sum[8][16];
    for (int column = 0; column < 8; ++column) {
        alignas(32) float rows[16] = {};
        for (int input = 0; input < 16; ++input) {
            const float factor = b[column][input];
            for (int row = 0; row < 16; ++row) rows[row] += a[input][row] * factor;
        }
        for (int row = 0; row < 16; ++row) sum[column][row] = rows[row];
    }
    for (int lane = 0; lane < WARP_LANES; ++lane) {
        for (int i = 0; i < 4; ++i) {
            warp.out[lane][i] = std::bit_cast<uint32_t>(sum[lane % 4 * 2 + i % 2][lane / 4 + i / 2 * 8]);
        }
    }
}

}  // namespace

void multiply_bf16_fragments(Warp& warp) {
    multiply(
        warp, [](uint32_t pair) { return std::bit_cast<float>(pair << 16); },
        [](uint32_t pair) { return std::bit_cast<float>(pair & 0xffff0000u); });
}

void multiply_f16_fragments(Warp& warp) {
    multiply(
        warp, [](uint32_t pair) { return float_of_half(pair & 0xffffu); },
        [](uint32_t pair) { return float_of_half(pair >> 16); });
}

}  // namespace emulator
