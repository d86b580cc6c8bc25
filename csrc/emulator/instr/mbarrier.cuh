// Emulated twin of csrc/instr/mbarrier.cuh.
#pragma once
#include "core.cuh"

DEVICE void mbarrier_init(uint32_t offset, uint32_t arrivals, emulator::Site site = emulator::Site::current()) {
    emulator::init_mbarrier(offset, arrivals, site);
}
DEVICE void mbarrier_init_fence() { emulator::fence_mbarrier_init(); }
DEVICE void mbarrier_arrive(uint32_t offset, emulator::Site site = emulator::Site::current()) {
    emulator::arrive_mbarrier(offset, 0, site);
}
DEVICE void mbarrier_arrive_expect(uint32_t offset, uint32_t bytes, emulator::Site site = emulator::Site::current()) {
    emulator::arrive_mbarrier(offset, bytes, site);
}
DEVICE bool mbarrier_test_wait(uint32_t offset, uint32_t parity, emulator::Site site = emulator::Site::current()) {
    return emulator::test_mbarrier(offset, parity, site);
}
DEVICE bool mbarrier_try_wait(uint32_t offset, uint32_t parity, emulator::Site site = emulator::Site::current()) {
    return emulator::test_mbarrier(offset, parity, site);
}
