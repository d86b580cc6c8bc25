// Emulated twin of csrc/instr/core.cuh: a thread is a fiber of the machine in csrc/emulator/machine.h.
#pragma once
#include <bit>
#include <cstdint>

#include "sync.h"
#include "warp.h"

#define DEVICE inline
#define DEVICE_CALL inline
#define KERNEL(name, parameter_type, threads)                                                                      \
    static void name##_body(const parameter_type& p);                                                              \
    extern "C" __attribute__((visibility("default"))) const emulator::KernelEntry name = {                         \
        #name, [](const void* p) { name##_body(*static_cast<const parameter_type*>(p)); }, sizeof(parameter_type), \
        threads};                                                                                                  \
    static void name##_body(const parameter_type& p)

struct alignas(8) uint2 {
    uint32_t x, y;
};
struct alignas(16) uint4 {
    uint32_t x, y, z, w;
};
struct alignas(8) float2 {
    float x, y;
};
struct alignas(16) float4 {
    float x, y, z, w;
};

constexpr int WARP = 32;

DEVICE int thread_index() { return emulator::current->thread; }
DEVICE int lane_index() { return emulator::current->index; }
DEVICE int warp_index() { return emulator::current->thread / WARP; }
DEVICE int cta_index() { return emulator::current->cta->index; }
DEVICE int cta_count() { return emulator::current->cta->launch->ctas; }
DEVICE void keep_order() {}
template <typename T>
DEVICE T forget(T value) {
    return value;
}
template <typename T>
DEVICE T forget_on_blackwell(T value) {
    return value;
}
DEVICE int population_count(uint32_t bits) { return std::popcount(bits); }
DEVICE int lowest_bit(uint32_t bits) { return std::countr_zero(bits); }

// Places in the text are defaulted arguments, so that a report can name the caller's line.
DEVICE bool elect_one(emulator::Site site = emulator::Site::current()) {
    emulator::meet(emulator::Meeting::elect, emulator::no_words, site);
    return lane_index() == 0;
}
DEVICE void warp_sync(emulator::Site site = emulator::Site::current()) {
    emulator::meet(emulator::Meeting::sync, emulator::sync_lanes, site);
}
DEVICE void barrier_sync(int id, int threads, emulator::Site site = emulator::Site::current()) {
    emulator::meet_at_barrier(id, threads, site);
}

template <typename T>
DEVICE T shared_load(uint32_t offset, emulator::Site site = emulator::Site::current()) {
    T value;
    emulator::read_shared(offset, sizeof(T), &value, site);
    return value;
}
template <typename T>
DEVICE void shared_store(uint32_t offset, T value, emulator::Site site = emulator::Site::current()) {
    emulator::write_shared(offset, sizeof(T), &value, site);
}
