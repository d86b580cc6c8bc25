// Atomic read-modify-write on global and shared memory.
#pragma once
#include "core.cuh"

DEVICE void add_release(uint32_t* address, uint32_t value) {
    asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(address), "r"(value) : "memory");
}
// Returns the value found; decides who may write the one fault record.
DEVICE uint32_t exchange_system(uint32_t* address, uint32_t value) {
    uint32_t old;
    asm volatile("atom.acq_rel.sys.global.exch.b32 %0, [%1], %2;" : "=r"(old) : "l"(address), "r"(value) : "memory");
    return old;
}
DEVICE void shared_or(uint32_t offset, uint32_t bits) {
    atomicOr(reinterpret_cast<unsigned int*>(shared_memory + offset), bits);
}
