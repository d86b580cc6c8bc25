// Global and shared memory: bounds, alignment, which bytes were ever written, and, in ordered runs, whether an access
// is ordered after the accesses it conflicts with.
#pragma once
#include <array>
#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "options.h"
#include "view.h"

namespace emulator {

struct Lane;

// Who accesses memory: a thread, or the copy engine on behalf of a bulk copy.
struct Actor {
    uint32_t component, epoch, first_epoch;
    const View* view;
    bool knows(uint32_t other, uint32_t count) const {
        return (other == component && count >= first_epoch) || (*view)[other] >= count;
    }
};

struct Access {
    uint32_t component, epoch;
    uint16_t mask;  // bytes of the block
    bool atomic;
    Site site;
};
struct Write : Access {
    uint16_t was_written;            // bytes that held a value before
    std::array<uint8_t, 16> before;  // what they held
};

// 16 bytes: the accesses that somebody may not know of yet.
struct Block {
    std::vector<Write> writes;
    std::vector<Access> reads;
    size_t prune_at = 16;  // number of reads at which those that the reader knows of are dropped
};

// Blocks of a stretch of memory, made when first touched.
class Shadow {
  public:
    void resize(size_t bytes) {
        blocks_.assign((bytes + 15) / 16, nullptr);
        pool_.clear();
    }
    void clear() { resize(blocks_.size() * 16); }
    Block& at(size_t offset) {
        Block*& block = blocks_[offset / 16];
        if (block == nullptr) block = &pool_.emplace_back();
        return *block;
    }

  private:
    std::vector<Block*> blocks_;
    std::deque<Block> pool_;
};

struct Region {
    std::string name;
    uint8_t* base;
    size_t bytes;
    bool constant;                  // no launch may write it
    std::vector<uint16_t> written;  // per block; empty when constant
    bool packets = false;           // a mailbox: nothing but packets may go there
    Shadow shadow;
};

// The memory that launches may touch.
class Regions {
  public:
    void clear() { regions_.clear(); }
    void add(std::string name, void* base, size_t bytes, bool constant, bool written);
    bool empty() const { return regions_.empty(); }
    // The region that holds [address, address + bytes); faults otherwise.
    Region& find(const void* address, size_t bytes, const Site& site);
    // The same for what is no packet.
    Region& find_ordinary(const void* address, size_t bytes, const Site& site);
    void forget_accesses();
    std::string describe(const void* address) const;
    const std::vector<std::unique_ptr<Region>>& all() const { return regions_; }

  private:
    std::vector<std::unique_ptr<Region>> regions_;  // sorted by base
    Region* last_ = nullptr;
};

// Ordinary accesses of the current thread. `size` is 1, 2, 4, 8 or 16 and the address a multiple of it.
void read_global(const void* address, uint32_t size, void* value, const Site& site);
void write_global(void* address, uint32_t size, const void* value, const Site& site);
void read_shared(uint32_t offset, uint32_t size, void* value, const Site& site);
void write_shared(uint32_t offset, uint32_t size, const void* value, const Site& site);

// Halves of packets: 8 bytes, the data in the low word and the tag in the high one.
void send_half(uint32_t* address, uint32_t data, uint32_t tag, const Site& site);
uint64_t receive_half(const uint32_t* address, const Site& site);

void or_shared(uint32_t offset, uint32_t bits, const Site& site);  // atomic

// Ordered accesses of the current thread to words of global memory.
void add_word(uint32_t* address, uint32_t value, const Site& site);
uint32_t exchange_word(uint32_t* address, uint32_t value, const Site& site);
void publish_word(uint32_t* address, uint32_t value, const Site& site);
uint32_t acquire_word(const uint32_t* address, const Site& site);

// Checks, and in ordered runs notes, the accesses of a bulk copy that lands.
struct Copy;
void copy_bytes(const Copy& copy);

}  // namespace emulator
