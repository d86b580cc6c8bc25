// How a run is scheduled and what it checks; the C side of sgl_muse_mega.emulator.machine.Schedule.
#pragma once
#include <cstdint>
#include <exception>
#include <source_location>
#include <string>

namespace emulator {

using Site = std::source_location;

enum class Order : uint32_t { round_robin, random, priority };

// Faults that the machine itself can commit, to prove that its checks find them.
enum class Injection : uint32_t {
    none,
    missing_release,      // add_release and store_release publish nothing
    missing_acquire,      // load_acquire binds nothing
    missing_proxy_fence,  // fence_generic_to_async does nothing
    missing_warp_sync,    // warp_sync meets, but orders nothing
    missing_init_fence,   // mbarrier_init_fence does nothing
    early_exit,           // CTA `injection_address` (rank in the upper 32 bits) ends before it begins
    missing_copy_wait,    // wait_copies waits for nothing
};

struct Options {
    uint64_t seed = 0;  // 0: no randomness; copies land at once
    Order order = Order::round_robin;
    uint32_t preempt_interval = 0;  // mean number of points between preemptions; 0: none
    uint32_t preempt_limit = 0;     // 0: no bound
    uint32_t ordered = 0;           // track what each thread may rely on
    uint32_t stale_values = 0;      // a racing read gets an old or a new value instead of a report
    uint32_t overlap = 0;           // the next launch's CTAs start as soon as programmatic launch allows
    Injection injection = Injection::none;
    uint64_t injection_address = 0;  // 0: everywhere
    uint32_t trace = 0;              // keep the events of the run
};

struct FaultReport {
    std::string kind, text;  // kind empty: none
};

// Ends the run; thrown in a thread, caught where the fiber begins.
struct Stop : std::exception {};

// Reports a fault of the current thread.
[[noreturn]] void fail(const char* kind, const std::string& text, const Site& site);

// What a thread did to be waited for, or waited for. Mirrored in sgl_muse_mega.emulator.trace.
enum class EventKind : uint32_t {
    add,
    publish,
    acquire,
    mbarrier_init,
    mbarrier_arrive,
    mbarrier_wait,
    barrier,
    send,
    receive
};
struct Event {
    uint32_t launch, cta, thread;
    EventKind kind;
    uint64_t place;  // address of a word or of a packet, offset of an mbarrier, number of a barrier
    uint64_t phase;  // of an mbarrier; threads of a barrier; arrivals of an initialised mbarrier; tag of a sent packet
};

// A kernel as its shared library exports it.
struct KernelEntry {
    const char* name;
    void (*body)(const void* parameters);
    uint32_t parameter_bytes;
    int threads;
};

}  // namespace emulator
