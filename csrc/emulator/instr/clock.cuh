// Emulated twin of csrc/instr/clock.cuh: time is the scheduler's.
#pragma once
#include "core.cuh"

DEVICE uint64_t global_nanoseconds() { return emulator::machine().now(); }
DEVICE void spin_pause() { emulator::machine().pause(); }
DEVICE void sleep_nanoseconds(uint32_t) { emulator::machine().pause(); }
DEVICE void linger(uint64_t) {}
DEVICE void trap(emulator::Site site = emulator::Site::current()) {
    emulator::fail("trap", "the kernel gives up", site);
}
