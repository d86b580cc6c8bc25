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
DEVICE void trap() { asm volatile("trap;"); }
