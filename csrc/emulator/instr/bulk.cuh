// Emulated twin of csrc/instr/bulk.cuh: a copy happens at some later turn of the scheduler.
#pragma once
#include "core.cuh"

enum class Keep { first_out, last_out };

DEVICE uint64_t eviction_policy(Keep) { return 0; }
DEVICE void bulk_load(uint32_t destination, const void* source, uint32_t bytes, uint32_t barrier, uint64_t) {
    emulator::start_copy(destination, source, bytes, barrier);
}
