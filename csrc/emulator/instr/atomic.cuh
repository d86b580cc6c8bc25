// Emulated twin of csrc/instr/atomic.cuh.
#pragma once
#include "core.cuh"

DEVICE void add_release(uint32_t* address, uint32_t value, emulator::Site site = emulator::Site::current()) {
    emulator::add_word(address, value, site);
}
DEVICE uint32_t exchange_system(uint32_t* address, uint32_t value, emulator::Site site = emulator::Site::current()) {
    return emulator::exchange_word(address, value, site);
}
DEVICE void shared_or(uint32_t offset, uint32_t bits, emulator::Site site = emulator::Site::current()) {
    emulator::or_shared(offset, bits, site);
}
