// How the request's numbers are kept in device memory; words are those of protocol::Request and protocol::State.
#pragma once
#include "instr/memory.cuh"
#include "layer/wait.cuh"

namespace request {

DEVICE int64_t word(const Params& p, protocol::Request which) {
    return global_load(p.request + static_cast<int>(which));
}
// Kept as the bits of a double.
DEVICE double number(const Params& p, protocol::Request which) {
    return global_load(reinterpret_cast<const double*>(p.request) + static_cast<int>(which));
}
DEVICE bool greedy(const Params& p) { return word(p, protocol::Request::GREEDY) != 0; }
DEVICE uint64_t seed(const Params& p) { return static_cast<uint64_t>(word(p, protocol::Request::SEED)); }

}  // namespace request
