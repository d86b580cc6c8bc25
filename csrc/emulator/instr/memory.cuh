// Emulated twin of csrc/instr/memory.cuh.
#pragma once
#include "core.cuh"

template <typename T>
DEVICE T global_load(const T* address, emulator::Site site = emulator::Site::current()) {
    T value;
    emulator::read_global(address, sizeof(T), &value, site);
    return value;
}
template <typename T>
DEVICE void global_store(T* address, T value, emulator::Site site = emulator::Site::current()) {
    emulator::write_global(address, sizeof(T), &value, site);
}
template <typename T>
DEVICE T constant_load(const T* address, emulator::Site site = emulator::Site::current()) {
    return global_load(address, site);
}
DEVICE void prefetch_line(const void*) {}
DEVICE uint32_t load_acquire(const uint32_t* address, emulator::Site site = emulator::Site::current()) {
    return emulator::acquire_word(address, site);
}
DEVICE void store_release(uint32_t* address, uint32_t value, emulator::Site site = emulator::Site::current()) {
    emulator::publish_word(address, value, site);
}
DEVICE void store_system(uint64_t* address, uint64_t value, emulator::Site site = emulator::Site::current()) {
    emulator::write_global(address, sizeof value, &value, site);
}
DEVICE void fence_generic_to_async() { emulator::fence_proxy(); }
