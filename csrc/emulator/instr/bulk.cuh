// Emulated twin of csrc/instr/bulk.cuh: a copy lands at some later point of the schedule.
#pragma once
#include "core.cuh"

enum class Keep { first_out, last_out };

DEVICE uint64_t eviction_policy(Keep) { return 0; }
DEVICE void bulk_load(uint32_t destination, const void* source, uint32_t bytes, uint32_t barrier, uint64_t,
                      emulator::Site site = emulator::Site::current()) {
    emulator::start_copy(destination, source, bytes, barrier, site);
}
DEVICE void bulk_prefetch(const void* source, uint32_t bytes, emulator::Site site = emulator::Site::current()) {
    if (bytes % 16 != 0) emulator::fail("alignment", "a prefetch of " + std::to_string(bytes) + " bytes", site);
    emulator::machine().regions.find(source, bytes, site);
}
