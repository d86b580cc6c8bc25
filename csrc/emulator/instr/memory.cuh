// Emulated twin of csrc/instr/memory.cuh.
#pragma once
#include "core.cuh"

template <typename T>
DEVICE void check_aligned(const T* address) {
    if (reinterpret_cast<uintptr_t>(address) % alignof(T) != 0) emulator::fault("global access is not aligned");
}
template <typename T>
DEVICE T global_load(const T* address) {
    check_aligned(address);
    return *address;
}
template <typename T>
DEVICE void global_store(T* address, T value) {
    check_aligned(address);
    *address = value;
}
template <typename T>
DEVICE T constant_load(const T* address) {
    return global_load(address);
}
DEVICE uint32_t load_acquire(const uint32_t* address) { return *address; }
DEVICE void store_release(uint32_t* address, uint32_t value) { *address = value; }
DEVICE void store_system(uint64_t* address, uint64_t value) { *address = value; }
DEVICE void fence_generic_to_async() {}
