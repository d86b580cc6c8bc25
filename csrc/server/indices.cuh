// A server's integers, of 4 or 8 bytes, and what these kernels begin with.
#pragma once
#include "instance.h"
#include "instr/memory.cuh"
#include "instr/pdl.cuh"

namespace server {

constexpr int TOTAL_THREADS = cfg::SMS * cfg::THREADS;

// Every thread, before it touches memory: what came before in the stream has ended. So these kernels end after it, too,
// and who waits for them has waited for everything.
DEVICE void open() {
    if (thread_index() == 0) allow_next_launch();
    wait_for_previous_launch();
}

DEVICE int index() { return cta_index() * cfg::THREADS + thread_index(); }

DEVICE bool present(const Indices& from) { return from.data != nullptr; }

DEVICE int64_t at(const Indices& from, int64_t place) {
    if (from.wide != 0) return global_load(static_cast<const int64_t*>(from.data) + place);
    return global_load(static_cast<const int32_t*>(from.data) + place);
}

DEVICE int smaller(int a, int b) { return a < b ? a : b; }

}  // namespace server
