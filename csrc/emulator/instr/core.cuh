// Emulated twin of csrc/instr/core.cuh: a thread is a fiber of the machine in ../machine.h.
#pragma once
#include <bit>
#include <cstdint>
#include <cstring>

#include "../machine.h"

#define DEVICE inline
#define KERNEL(name, parameter_type, threads)                                                           \
    static void name##_body(const parameter_type& p);                                                   \
    extern "C" int name(const parameter_type* p, uint64_t seed, char* report, int report_size) {        \
        return emulator::run(                                                                           \
            cfg::SMS, threads, cfg::SHARED_BYTES, seed, [p] { name##_body(*p); }, report, report_size); \
    }                                                                                                   \
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

DEVICE int thread_index() { return emulator::self().thread; }
DEVICE int lane_index() { return emulator::self().thread % WARP; }
DEVICE int warp_index() { return emulator::self().thread / WARP; }
DEVICE int cta_index() { return emulator::self().cta->index; }
DEVICE int population_count(uint32_t bits) { return std::popcount(bits); }

DEVICE void warp_sync() {
    emulator::warp_collective({}, [](emulator::Warp&) {});
}
DEVICE void barrier_sync(int id, int threads) { emulator::named_barrier(id, threads); }

template <typename T>
DEVICE T shared_load(uint32_t offset) {
    T value;
    std::memcpy(&value, emulator::shared_at(offset, sizeof(T), alignof(T)), sizeof(T));
    return value;
}
template <typename T>
DEVICE void shared_store(uint32_t offset, T value) {
    std::memcpy(emulator::shared_at(offset, sizeof(T), alignof(T)), &value, sizeof(T));
}
