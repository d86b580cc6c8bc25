// Packets between ranks: a half arrives at any later point of the schedule, after earlier ones for the same address
// and in no order with anything else. Neither sending nor receiving orders any other access.
#include <cstring>

#include "machine.h"

namespace emulator {
namespace {

constexpr uint32_t HALF_BYTES = 8;

void claim(const uint32_t* address, const Site& site) {
    Machine& m = machine();
    if (reinterpret_cast<uintptr_t>(address) % HALF_BYTES != 0)
        fail("alignment", "a packet at " + m.regions.describe(address), site);
    Region& region = m.regions.find(address, HALF_BYTES, site);
    if (region.constant) fail("constant", "uses " + m.regions.describe(address) + ", an input, as a mailbox", site);
    region.packets = true;
}

}  // namespace

void send_half(uint32_t* address, uint32_t data, uint32_t tag, const Site& site) {
    Machine& m = machine();
    m.point(4);
    claim(address, site);
    m.note(EventKind::send, reinterpret_cast<uintptr_t>(address), tag);
    m.start_half(address, static_cast<uint64_t>(tag) << 32 | data);
}

uint64_t receive_half(const uint32_t* address, const Site& site) {
    Machine& m = machine();
    m.point(4);
    claim(address, site);
    m.note(EventKind::receive, reinterpret_cast<uintptr_t>(address));
    m.poll(m.watch_of(address), reinterpret_cast<uintptr_t>(address), false, site);
    uint64_t half;
    std::memcpy(&half, address, HALF_BYTES);
    return half;
}

void Machine::start_half(uint32_t* address, uint64_t half) {
    const uintptr_t at = reinterpret_cast<uintptr_t>(address);
    wires_[at].halves.push_back(half);
    sent_.push_back(at);
    if (options.seed == 0) arrive(sent_.size() - 1);
}

void Machine::arrive(size_t index) {
    const uintptr_t at = sent_[index];
    sent_[index] = sent_.back();
    sent_.pop_back();
    Wire& wire = wires_[at];
    std::memcpy(reinterpret_cast<void*>(at), &wire.halves.front(), HALF_BYTES);
    wire.halves.pop_front();
    notify(wire.watch);
}

}  // namespace emulator
