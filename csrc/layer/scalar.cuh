// Small functions of one value, alone or over a warp.
#pragma once
#include "instr/convert.cuh"
#include "instr/warp.cuh"

namespace output_gate {

DEVICE float sigmoid(float x) { return 1.f / (1.f + exponential(-x)); }

DEVICE float warp_sum(float value) {
#pragma unroll
    for (int step = 16; step > 0; step /= 2) value += shuffle_xor(value, step);
    return value;
}

}  // namespace output_gate
