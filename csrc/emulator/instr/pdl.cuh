// Emulated twin of csrc/instr/pdl.cuh.
#pragma once
#include "core.cuh"

DEVICE void wait_for_previous_launch(emulator::Site site = emulator::Site::current()) {
    emulator::wait_previous_launch(site);
}
DEVICE void allow_next_launch() { emulator::allow_following_launch(); }
