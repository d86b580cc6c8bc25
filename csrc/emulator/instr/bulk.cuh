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

// What Emulator.describe_boxes writes.
struct BoxDescription {
    uint64_t base, strides[2];  // bytes from one y, and from one z, to the next
    uint32_t extents[3], box[3], element_bytes;
};
DEVICE void bulk_load_box(uint32_t destination, const void* boxes, int x, int y, int z, uint32_t barrier, uint64_t,
                          emulator::Site site = emulator::Site::current()) {
    emulator::machine().regions.find(boxes, 128, site);
    const BoxDescription& all = *static_cast<const BoxDescription*>(boxes);
    if (destination % 128 != 0) emulator::fail("alignment", "a box at " + std::to_string(destination), site);
    const uint32_t first[3] = {static_cast<uint32_t>(x), static_cast<uint32_t>(y), static_cast<uint32_t>(z)};
    for (int i = 0; i < 3; ++i) {
        if (first[i] + all.box[i] > all.extents[i])
            emulator::fail("bounds", "a box leaves dimension " + std::to_string(i), site);
    }
    const uint32_t row_bytes = all.box[0] * all.element_bytes;
    for (uint32_t dz = 0; dz < all.box[2]; ++dz) {
        for (uint32_t dy = 0; dy < all.box[1]; ++dy) {
            const uint64_t source = all.base + (first[2] + dz) * all.strides[1] + (first[1] + dy) * all.strides[0] +
                                    uint64_t{first[0]} * all.element_bytes;
            emulator::start_copy(destination + (dz * all.box[1] + dy) * row_bytes,
                                 reinterpret_cast<const void*>(source), row_bytes, barrier, site);
        }
    }
}
DEVICE void acquire_boxes(const void*) {}
