// A small GPU on the host: every thread is a fiber, fibers change at waits and where the lanes of a warp meet, and a
// seed decides who goes next and when a bulk copy lands.
#pragma once
#include <array>
#include <cstdint>
#include <functional>
#include <initializer_list>
#include <unordered_map>
#include <vector>

namespace emulator {

struct Fiber;

struct Warp {
    std::array<std::array<uint32_t, 6>, 32> in;
    std::array<std::array<uint32_t, 4>, 32> out;
    int arrived = 0;
    std::vector<Fiber*> waiting;
};

struct MBarrier {
    uint32_t arrivals = 0, pending = 0, phase = 0;
    int64_t bytes = 0;

    void init(uint32_t count);
    void arrive(uint32_t expected_bytes);
    void complete(uint32_t copied_bytes);

  private:
    void turn();
};

struct Cta {
    int index = 0;
    std::vector<uint8_t> shared;
    std::unordered_map<uint32_t, MBarrier> barriers;
    std::unordered_map<int, std::vector<Fiber*>> named;
    std::vector<Warp> warps;
};

struct Fiber {
    int thread = 0;
    Cta* cta = nullptr;
    bool done = false;
    void* context = nullptr;
};

Fiber& self();
uint64_t turns();
void yield();
[[noreturn]] void fault(const char* why);

// All 32 lanes bring words; the last to come runs `meet`, which reads warp.in and writes warp.out. Returns this lane's
// out.
const uint32_t* warp_collective(std::initializer_list<uint32_t> words, void (*meet)(Warp&));
void named_barrier(int id, int threads);
uint8_t* shared_at(uint32_t offset, uint32_t bytes, uint32_t alignment);
MBarrier& mbarrier_at(uint32_t offset);
void start_copy(uint32_t destination, const void* source, uint32_t bytes, uint32_t barrier);

// Runs one launch. Returns 0, or 1 with the reason in `report`.
int run(int ctas, int threads, uint32_t shared_bytes, uint64_t seed, std::function<void()> body, char* report,
        int report_size);

}  // namespace emulator
