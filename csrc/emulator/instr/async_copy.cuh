// Emulated twin of csrc/instr/async_copy.cuh: a copy lands at some later point of the schedule, and nobody may rely on
// it before the thread that made it has waited for its group.
#pragma once
#include "core.cuh"

DEVICE void copy_async(uint32_t destination, const void* source, emulator::Site site = emulator::Site::current()) {
    emulator::start_own_copy(destination, source, 16, site);
}
DEVICE void commit_copies() { emulator::commit_own_copies(); }
template <int PENDING>
DEVICE void wait_copies(emulator::Site site = emulator::Site::current()) {
    emulator::wait_own_copies(PENDING, site);
}
