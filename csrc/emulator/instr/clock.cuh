// Emulated twin of csrc/instr/clock.cuh: time is the scheduler's count of turns.
#pragma once
#include "core.cuh"

DEVICE uint64_t global_nanoseconds() { return emulator::turns(); }
DEVICE void spin_pause() { emulator::yield(); }
DEVICE void trap() { emulator::fault("a kernel thread gave up waiting"); }
