// Global loads and stores, with the ordering each hand-off needs.
#pragma once
#include "core.cuh"

// Plain accesses: ordered only by the hand-offs round them.
template <typename T>
DEVICE T global_load(const T* address) {
    return *address;
}
template <typename T>
DEVICE void global_store(T* address, T value) {
    *address = value;
}

// Weights and other data that no kernel of this process writes: the read-only path.
template <typename T>
DEVICE T constant_load(const T* address) {
    return __ldg(address);
}

// Brings 64 bytes round an address into L2; nothing waits for them.
DEVICE void prefetch_line(const void* address) { asm volatile("prefetch.global.L2 [%0];" ::"l"(address)); }

DEVICE uint32_t load_acquire(const uint32_t* address) {
    uint32_t value;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
    return value;
}
DEVICE void store_release(uint32_t* address, uint32_t value) {
    asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(address), "r"(value) : "memory");
}
// To host memory: visible to the CPU even when the kernel traps right after.
DEVICE void store_system(uint64_t* address, uint64_t value) {
    asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(address), "l"(value) : "memory");
}
// What other threads wrote with ordinary stores becomes visible to bulk copies issued by this thread afterwards.
DEVICE void fence_generic_to_async() { asm volatile("fence.proxy.async;" ::: "memory"); }
