// Packets between ranks: 16 bytes in memory that several GPUs reach. Each 8-byte half is written and read at once and
// carries the tag of the launch it belongs to, so whoever finds the tag holds the data; nothing orders a packet after
// anything else.
#pragma once
#include "core.cuh"

struct Packet {
    uint32_t low, high;              // data: two bf16 each
    uint32_t low_tag, high_tag;      // of the halves

    DEVICE bool is(uint32_t tag) const { return low_tag == tag && high_tag == tag; }
    DEVICE uint32_t differs_from(uint32_t tag) const { return (low_tag ^ tag) | (high_tag ^ tag); }  // 0: it is
};

constexpr int PACKET_BYTES = 16;

DEVICE void send_packet(void* address, const uint2& data, uint32_t tag) {
    asm volatile(
        "{\n.reg .b64 first, second;\nmov.b64 first, {%1, %3};\nmov.b64 second, {%2, %3};\n"
        "st.relaxed.sys.global.v2.b64 [%0], {first, second};\n}" ::"l"(address),
        "r"(data.x), "r"(data.y), "r"(tag));
}
DEVICE Packet receive_packet(const void* address) {
    Packet packet;
    asm volatile(
        "{\n.reg .b64 first, second;\nld.relaxed.sys.global.v2.b64 {first, second}, [%4];\n"
        "mov.b64 {%0, %2}, first;\nmov.b64 {%1, %3}, second;\n}"
        : "=r"(packet.low), "=r"(packet.high), "=r"(packet.low_tag), "=r"(packet.high_tag)
        : "l"(address));
    return packet;
}
