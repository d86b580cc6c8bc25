// How the request's numbers are kept in device memory; words are those of protocol::Request and protocol::State.
#pragma once
#include "instr/memory.cuh"
#include "layer/wait.cuh"

namespace request {

DEVICE int64_t word(const Params& p, protocol::Request which) {
    return global_load(p.request + static_cast<int>(which));
}
// Kept as the bits of a float in the low half of its word.
DEVICE float number(const Params& p, protocol::Request which) {
    return bits_float(static_cast<uint32_t>(word(p, which)));
}
DEVICE bool greedy(const Params& p) { return word(p, protocol::Request::GREEDY) != 0; }
DEVICE uint64_t seed(const Params& p) { return static_cast<uint64_t>(word(p, protocol::Request::SEED)); }

}  // namespace request
