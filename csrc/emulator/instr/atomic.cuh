// Emulated twin of csrc/instr/atomic.cuh; fibers change only at waits, so a plain update is atomic.
#pragma once
#include "core.cuh"

DEVICE void add_release(uint32_t* address, uint32_t value) { *address += value; }
DEVICE uint32_t exchange_system(uint32_t* address, uint32_t value) {
    const uint32_t old = *address;
    *address = value;
    return old;
}
DEVICE void shared_or(uint32_t offset, uint32_t bits) {
    shared_store<uint32_t>(offset, shared_load<uint32_t>(offset) | bits);
}
