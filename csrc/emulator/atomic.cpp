// Words that are accessed with ordering. A word keeps its last few values: an acquiring load may find one that is not
// the newest, as long as the thread does not know of a newer one.
#include <cstring>

#include "machine.h"

namespace emulator {
namespace {

constexpr size_t KEPT_VALUES = 8;
constexpr uintptr_t LINE_BYTES = 128;

Atomic& find(const uint32_t* address, const Site& site) {
    Machine& m = machine();
    m.point(16);
    const uintptr_t at = reinterpret_cast<uintptr_t>(address);
    if (at % 4 != 0) fail("alignment", "an ordered access to " + m.regions.describe(address), site);
    m.regions.find(address, 4, site);
    Atomic& atomic = m.atomics[at];
    if (atomic.values.empty()) atomic.values.push_back({*address, 0, 0, {}});
    return atomic;
}

void put(Atomic& atomic, uint32_t* address, uint32_t value, View published, const Site& site) {
    Machine& m = machine();
    Region& region = m.regions.find(address, 4, site);
    if (region.constant) fail("constant", "writes " + m.regions.describe(address) + ", which is an input", site);
    const size_t offset = static_cast<size_t>(reinterpret_cast<uint8_t*>(address) - region.base);
    region.written[offset / 16] |= static_cast<uint16_t>(0xfu << offset % 16);
    *address = value;
    const bool ordered = m.options.ordered != 0;
    atomic.values.push_back(
        {value, ordered ? current->component : 0, ordered ? current->epoch : 0, std::move(published)});
    if (ordered) {
        Block& block = region.shadow.at(offset);
        std::erase_if(block.writes, [&](const Write& w) {
            return w.component == current->component && w.mask == 0xfu << offset % 16;
        });
        block.writes.push_back(
            {{current->component, current->epoch, static_cast<uint16_t>(0xfu << offset % 16), true, site}, 0xffff, {}});
        ++current->epoch;
    }
    if (atomic.values.size() > KEPT_VALUES) atomic.values.pop_front();
    m.notify(atomic.watch);
}

// Counters that grow under a poll of another word on their line cost every waiter a miss per arrival.
void check_line(uintptr_t polled, uintptr_t added, const Site& site) {
    Machine& m = machine();
    auto& line = m.lines[(polled != 0 ? polled : added) / LINE_BYTES];
    if (polled != 0) line.first = polled;
    if (added != 0) line.second = added;
    if (line.first != 0 && line.second != 0 && line.first != line.second) {
        fail("line",
             "a counter, " + m.regions.describe(reinterpret_cast<void*>(line.second)) +
                 ", shares its 128-byte line with a word that is polled, " +
                 m.regions.describe(reinterpret_cast<void*>(line.first)),
             site);
    }
}

// What a release publishes, with what the word published before when `chain` (a read-modify-write keeps it).
View published(const Atomic& atomic, bool chain, const uint32_t* address) {
    Machine& m = machine();
    if (m.options.ordered == 0) return {};
    const View& before = atomic.values.back().published;
    View view;
    if (!m.injected(Injection::missing_release, address)) {
        view = current->view.copy();
        view.raise(current->component, current->epoch);
        if (chain && !before.empty()) view.raise(before);
    } else if (chain) {
        view = before;
    }
    return view;
}

}  // namespace

void add_word(uint32_t* address, uint32_t value, const Site& site) {
    Atomic& atomic = find(address, site);
    check_line(0, reinterpret_cast<uintptr_t>(address), site);
    machine().note(EventKind::add, reinterpret_cast<uintptr_t>(address));
    put(atomic, address, *address + value, published(atomic, true, address), site);
}

uint32_t exchange_word(uint32_t* address, uint32_t value, const Site& site) {
    Atomic& atomic = find(address, site);
    const uint32_t old = *address;
    if (machine().options.ordered != 0) machine().acquire(*current, atomic.values.back().published);
    put(atomic, address, value, published(atomic, true, address), site);
    return old;
}

void publish_word(uint32_t* address, uint32_t value, const Site& site) {
    Atomic& atomic = find(address, site);
    machine().note(EventKind::publish, reinterpret_cast<uintptr_t>(address));
    put(atomic, address, value, published(atomic, false, address), site);
}

uint32_t acquire_word(const uint32_t* address, const Site& site) {
    Machine& m = machine();
    Atomic& atomic = find(address, site);
    check_line(reinterpret_cast<uintptr_t>(address), 0, site);
    m.note(EventKind::acquire, reinterpret_cast<uintptr_t>(address));
    size_t pick = atomic.values.size() - 1;
    if (m.options.ordered != 0) {
        const Actor me{current->component, current->epoch, current->first_epoch, &current->view};
        while (pick > 0 && m.chance(4) && !me.knows(atomic.values[pick].component, atomic.values[pick].epoch)) --pick;
        if (!m.injected(Injection::missing_acquire, address)) m.acquire(*current, atomic.values[pick].published);
    }
    m.poll(atomic.watch, reinterpret_cast<uintptr_t>(address), false, site);
    if (pick + 1 != atomic.values.size()) current->polls.back().version = ~0ull;  // an old value: do not sleep on it
    return atomic.values[pick].value;
}

}  // namespace emulator
