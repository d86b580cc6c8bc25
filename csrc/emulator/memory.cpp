// Ordinary accesses, and those of bulk copies.
#include "memory.h"

#include <algorithm>
#include <cstring>

#include "machine.h"

namespace emulator {
namespace {

std::string where(const Site& site) {
    const std::string file = site.file_name();
    return file.substr(file.rfind('/') + 1) + ":" + std::to_string(site.line());
}

uint16_t mask_of(size_t offset, size_t size) { return static_cast<uint16_t>(((1u << size) - 1u) << (offset % 16)); }

Actor self() { return {current->component, current->epoch, current->first_epoch, &current->view}; }

[[noreturn]] void race(const char* what, const std::string& place, const Access& other, const char* other_what,
                       const Site& site) {
    fail("race",
         std::string(what) + " " + place + ", which " + machine().who(other.component) + " " + other_what + " at " +
             where(other.site) + "; nothing orders the two",
         site);
}

// A place in memory that has a shadow: how accesses find it, and what to call it.
struct Place {
    Block& block;
    uint8_t* bytes;     // of the whole block
    uint16_t* written;  // null: not tracked
    size_t offset;      // of the access in the block
    const void* address;
    int64_t shared;  // offset in shared memory, or -1
    std::string name() const {
        return shared >= 0 ? "shared memory at " + std::to_string(shared) : machine().regions.describe(address);
    }
};

// An ordinary read: everything that was written here must be known, or else (stale_values) some of it may be missing.
void ordered_read(const Place& place, size_t size, uint8_t* value, const Actor& actor, const Site& site) {
    const uint16_t mask = mask_of(place.offset, size);
    std::vector<Write>& writes = place.block.writes;
    size_t newest_known = 0;
    bool racing = false;
    for (size_t i = 0; i < writes.size(); ++i) {
        if ((writes[i].mask & mask) == 0) continue;
        if (actor.knows(writes[i].component, writes[i].epoch)) {
            newest_known = i + 1;
        } else {
            racing = true;
            if (machine().options.stale_values == 0) race("reads", place.name(), writes[i], "writes", site);
        }
    }
    if (racing) {
        Machine& m = machine();
        ++m.races;
        std::array<uint8_t, 16> bytes;
        std::memcpy(bytes.data(), place.bytes, 16);
        uint16_t written = place.written != nullptr ? *place.written : 0xffff;
        const size_t keep = newest_known + m.random() % (writes.size() - newest_known + 1);
        for (size_t i = writes.size(); i-- > keep;) {
            for (int byte = 0; byte < 16; ++byte) {
                if ((writes[i].mask >> byte & 1) == 0) continue;
                bytes[byte] = writes[i].before[byte];
                written = static_cast<uint16_t>((written & ~(1u << byte)) | (writes[i].was_written & (1u << byte)));
            }
        }
        if ((mask & ~written) != 0)
            fail("unwritten", "reads " + place.name() + " as it was before anybody wrote it", site);
        std::memcpy(value, bytes.data() + place.offset, size);
        return;
    }
    std::vector<Access>& reads = place.block.reads;
    if (reads.size() >= place.block.prune_at) {
        std::erase_if(reads, [&](const Access& read) {
            return (read.mask & ~mask) == 0 && actor.knows(read.component, read.epoch);
        });
        place.block.prune_at = 2 * reads.size() + 16;
    }
    reads.push_back({actor.component, actor.epoch, mask, false, site});
}

// `after_writes` is what the writer knows of the ordinary writes of others; it differs from `actor` for a bulk copy.
void ordered_write(const Place& place, size_t size, const Actor& actor, const Actor& after_writes, bool atomic,
                   const Site& site) {
    const uint16_t mask = mask_of(place.offset, size);
    const bool report = machine().options.stale_values == 0;
    auto conflicts = [&](const Access& other, const Actor& known) {
        return (other.mask & mask) != 0 && !(atomic && other.atomic) && !known.knows(other.component, other.epoch);
    };
    for (const Access& read : place.block.reads) {
        if (!conflicts(read, actor)) continue;
        ++machine().races;
        if (report) race("overwrites", place.name(), read, "reads", site);
    }
    for (const Write& write : place.block.writes) {
        const Actor& known = machine().by_copy_engine(write.component) ? actor : after_writes;
        if (!conflicts(write, known)) continue;
        ++machine().races;
        if (report) race("overwrites", place.name(), write, "writes", site);
    }
    std::erase_if(place.block.reads, [&](const Access& read) { return (read.mask & ~mask) == 0; });
    if (report) {
        std::erase_if(place.block.writes,
                      [&](const Write& write) { return (write.mask & ~mask) == 0 && !write.atomic; });
    }
    std::vector<Write>& writes = place.block.writes;
    if (writes.size() >= 32) writes.erase(writes.begin());
    Write write{{actor.component, actor.epoch, mask, atomic, site}, 0xffff, {}};
    if (place.written != nullptr) write.was_written = *place.written;
    std::memcpy(write.before.data(), place.bytes, 16);
    writes.push_back(write);
}

void check_aligned(const void* address, uint32_t size, const Site& site) {
    if (reinterpret_cast<uintptr_t>(address) % size != 0) {
        fail("alignment", "a " + std::to_string(size) + "-byte access to " + machine().regions.describe(address), site);
    }
}

size_t block_of(size_t offset) { return offset / 16 * 16; }

Place global_place(Region& region, size_t offset, const void* address) {
    return {region.shadow.at(offset),
            region.base + block_of(offset),
            &region.written[offset / 16],
            offset % 16,
            address,
            -1};
}

Place shared_place(Cta& cta, size_t offset) {
    return {cta.shadow.at(offset),       cta.shared.data() + block_of(offset), nullptr, offset % 16, nullptr,
            static_cast<int64_t>(offset)};
}

void check_written(const Region& region, size_t offset, size_t size, const void* address, const Site& site) {
    if ((mask_of(offset, size) & ~region.written[offset / 16]) != 0) {
        fail("unwritten", "reads " + machine().regions.describe(address) + ", which nobody has written", site);
    }
}

}  // namespace

void Regions::add(std::string name, void* base, size_t bytes, bool constant, bool written) {
    auto region = std::make_unique<Region>();
    region->name = std::move(name);
    region->base = static_cast<uint8_t*>(base);
    region->bytes = bytes;
    region->constant = constant;
    if (!constant) region->written.assign((bytes + 15) / 16, written ? 0xffff : 0);
    const auto at = std::upper_bound(regions_.begin(), regions_.end(), region,
                                     [](const auto& a, const auto& b) { return a->base < b->base; });
    regions_.insert(at, std::move(region));
    last_ = nullptr;
}

Region& Regions::find(const void* address, size_t bytes, const Site& site) {
    const uint8_t* at = static_cast<const uint8_t*>(address);
    if (last_ != nullptr && at >= last_->base && at + bytes <= last_->base + last_->bytes) return *last_;
    const auto after = std::upper_bound(regions_.begin(), regions_.end(), at,
                                        [](const uint8_t* a, const auto& region) { return a < region->base; });
    if (after != regions_.begin()) {
        Region& region = **(after - 1);
        if (at + bytes <= region.base + region.bytes) {
            last_ = &region;
            return region;
        }
    }
    if (regions_.empty()) fail("bounds", "no memory has been declared", site);
    fail("bounds", "accesses " + std::to_string(bytes) + " bytes at " + describe(address), site);
}

Region& Regions::find_ordinary(const void* address, size_t bytes, const Site& site) {
    Region& region = find(address, bytes, site);
    if (region.packets) fail("packet", "accesses " + describe(address) + ", which is a mailbox, without a tag", site);
    return region;
}

void Regions::forget_accesses() {
    for (const auto& region : regions_) {
        if (!region->constant && machine().options.ordered != 0) region->shadow.resize(region->bytes);
    }
}

std::string Regions::describe(const void* address) const {
    const uint8_t* at = static_cast<const uint8_t*>(address);
    if (address == nullptr) return "address 0";
    const Region* below = nullptr;
    for (const auto& region : regions_) {
        if (region->base <= at) below = region.get();
    }
    if (below == nullptr) return "an address below all buffers";
    const size_t offset = static_cast<size_t>(at - below->base);
    if (offset < below->bytes) return below->name + "+" + std::to_string(offset);
    return std::to_string(offset - below->bytes) + " bytes past the end of " + below->name;
}

void read_global(const void* address, uint32_t size, void* value, const Site& site) {
    Machine& m = machine();
    check_aligned(address, size, site);
    Region& region = m.regions.find_ordinary(address, size, site);
    if (region.constant) {  // no launch may write it
        std::memcpy(value, address, size);
        return;
    }
    m.point(1);
    const size_t offset = static_cast<size_t>(static_cast<const uint8_t*>(address) - region.base);
    check_written(region, offset, size, address, site);
    std::memcpy(value, address, size);
    if (m.options.ordered != 0)
        ordered_read(global_place(region, offset, address), size, static_cast<uint8_t*>(value), self(), site);
}

void write_global(void* address, uint32_t size, const void* value, const Site& site) {
    Machine& m = machine();
    check_aligned(address, size, site);
    Region& region = m.regions.find_ordinary(address, size, site);
    if (region.constant) fail("constant", "writes " + m.regions.describe(address) + ", which is an input", site);
    m.point(1);
    const size_t offset = static_cast<size_t>(static_cast<uint8_t*>(address) - region.base);
    if (m.options.ordered != 0) ordered_write(global_place(region, offset, address), size, self(), self(), false, site);
    std::memcpy(address, value, size);
    region.written[offset / 16] |= mask_of(offset, size);
}

namespace {

uint8_t* shared_at(uint32_t offset, uint32_t size, const Site& site) {
    Cta& cta = *current->cta;
    if (offset % size != 0)
        fail("alignment", "a " + std::to_string(size) + "-byte access to shared memory at " + std::to_string(offset),
             site);
    if (static_cast<size_t>(offset) + size > cta.shared.size()) {
        fail("bounds",
             "accesses shared memory at " + std::to_string(offset) + " of " + std::to_string(cta.shared.size()) +
                 " bytes",
             site);
    }
    return cta.shared.data() + offset;
}

}  // namespace

void read_shared(uint32_t offset, uint32_t size, void* value, const Site& site) {
    std::memcpy(value, shared_at(offset, size, site), size);
    if (machine().options.ordered == 0) return;
    machine().point(1);
    std::memcpy(value, current->cta->shared.data() + offset, size);
    ordered_read(shared_place(*current->cta, offset), size, static_cast<uint8_t*>(value), self(), site);
}

void write_shared(uint32_t offset, uint32_t size, const void* value, const Site& site) {
    uint8_t* at = shared_at(offset, size, site);
    if (machine().options.ordered != 0) {
        machine().point(1);
        ordered_write(shared_place(*current->cta, offset), size, self(), self(), false, site);
    }
    std::memcpy(at, value, size);
}

void or_shared(uint32_t offset, uint32_t bits, const Site& site) {
    uint8_t* at = shared_at(offset, 4, site);
    machine().point(16);  // nothing may come between the read and the write
    if (machine().options.ordered != 0)
        ordered_write(shared_place(*current->cta, offset), 4, self(), self(), true, site);
    uint32_t value;
    std::memcpy(&value, at, 4);
    value |= bits;
    std::memcpy(at, &value, 4);
}

void copy_bytes(const Copy& copy) {
    Machine& m = machine();
    Region& region = m.regions.find_ordinary(copy.source, copy.bytes, copy.site);
    Cta& cta = *copy.cta;
    const bool bulk = copy.barrier != nullptr;
    const uint32_t component = bulk ? copy.barrier->component : cta.own_copies_component();
    const uint32_t epoch = bulk ? copy.barrier->first_phase + copy.barrier->phase + 1 : copy.group->epoch;
    const size_t offset = static_cast<size_t>(copy.source - region.base);
    const Actor reader{component, epoch, epoch, &copy.async_view};
    const Actor issuer{copy.issuer->component, copy.issuer_epoch, copy.issuer->first_epoch, &copy.issued};
    Actor after_writes = issuer;
    if (bulk) after_writes = {copy.issuer->component, copy.issuer_epoch, ~0u, &copy.async_view};
    for (uint32_t at = 0; at < copy.bytes; at += 16) {
        alignas(16) uint8_t value[16];
        std::memcpy(value, copy.source + at, 16);
        if (!region.constant) {
            check_written(region, offset + at, 16, copy.source + at, copy.site);
            if (m.options.ordered != 0) {
                const Place place = global_place(region, offset + at, copy.source + at);
                ordered_read(place, 16, value, reader, copy.site);
                if (!bulk) copy.group->touched.push_back(&place.block);
            }
        }
        if (m.options.ordered != 0) {
            const Place place = shared_place(cta, copy.destination + at);
            ordered_write(place, 16, issuer, after_writes, false, copy.site);
            Write& noted = place.block.writes.back();
            noted.component = component;
            noted.epoch = epoch;
            if (!bulk) copy.group->touched.push_back(&place.block);
        }
        std::memcpy(cta.shared.data() + copy.destination + at, value, 16);
    }
}

}  // namespace emulator
