// Emulated twin of csrc/instr/packet.cuh: the halves of a packet arrive at some later points of the schedule.
#pragma once
#include "core.cuh"

struct Packet {
    uint32_t low, high;
    uint32_t low_tag, high_tag;

    DEVICE bool is(uint32_t tag) const { return low_tag == tag && high_tag == tag; }
    DEVICE uint32_t differs_from(uint32_t tag) const { return (low_tag ^ tag) | (high_tag ^ tag); }  // 0: it is
};

constexpr int PACKET_BYTES = 16;

DEVICE void send_packet(void* address, const uint2& data, uint32_t tag,
                        emulator::Site site = emulator::Site::current()) {
    uint32_t* words = static_cast<uint32_t*>(address);
    emulator::send_half(words, data.x, tag, site);
    emulator::send_half(words + 2, data.y, tag, site);
}
DEVICE Packet receive_packet(const void* address, emulator::Site site = emulator::Site::current()) {
    const uint32_t* words = static_cast<const uint32_t*>(address);
    const uint64_t first = emulator::receive_half(words, site), second = emulator::receive_half(words + 2, site);
    return {static_cast<uint32_t>(first), static_cast<uint32_t>(second), static_cast<uint32_t>(first >> 32),
            static_cast<uint32_t>(second >> 32)};
}
