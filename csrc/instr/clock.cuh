// Time, and the end of it.
#pragma once
#include "core.cuh"

DEVICE uint64_t global_nanoseconds() {
    uint64_t now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    return now;
}
// One turn of a spin loop that found nothing.
DEVICE void spin_pause() {}
// About so long, without issue slots.
DEVICE void sleep_nanoseconds(uint32_t nanoseconds) { asm volatile("nanosleep.u32 %0;" ::"r"(nanoseconds)); }
// Time for writes to host memory to arrive, before a trap takes the GPU down.
DEVICE void linger(uint64_t nanoseconds) {
    asm volatile("fence.acq_rel.sys;" ::: "memory");
    const uint64_t start = global_nanoseconds();
    while (global_nanoseconds() - start < nanoseconds) {
    }
}
DEVICE void trap() {
    asm volatile("trap;");
    __builtin_unreachable();
}
