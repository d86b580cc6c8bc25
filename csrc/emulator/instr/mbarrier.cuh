// Emulated twin of csrc/instr/mbarrier.cuh.
#pragma once
#include "core.cuh"

DEVICE void mbarrier_init(uint32_t offset, uint32_t arrivals) { emulator::self().cta->barriers[offset].init(arrivals); }
DEVICE void mbarrier_init_fence() {}
DEVICE void mbarrier_arrive(uint32_t offset) { emulator::mbarrier_at(offset).arrive(0); }
DEVICE void mbarrier_arrive_expect(uint32_t offset, uint32_t bytes) { emulator::mbarrier_at(offset).arrive(bytes); }
DEVICE bool mbarrier_try_wait(uint32_t offset, uint32_t parity) {
    return (emulator::mbarrier_at(offset).phase & 1u) != parity;
}
