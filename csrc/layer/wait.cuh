// Waiting for other CTAs and for the copy engine. Every spin has a deadline: it leaves one record in host memory and
// traps.
#pragma once
#include "instance.h"
#include "instr/atomic.cuh"
#include "instr/clock.cuh"
#include "instr/mbarrier.cuh"
#include "instr/memory.cuh"
#include "instr/warp.cuh"
#include "trace.cuh"

// The first thread of the GPU that gives up writes the record (words: see protocol.FaultRecord); all of them trap. The
// epoch word is of no further use and decides who is first: an exchange in device memory, for not every machine can do
// one over PCIe. A trap ends all threads at once, so the others leave the first one time to write.
DEVICE_CALL void give_up(const Params& p, uint32_t site, uint32_t expected, uint32_t seen) {
    constexpr uint32_t ABANDONED = 0xffffffffu;
    constexpr uint64_t FLUSH_NS = 2000000, OTHERS_NS = 50000000;
    if (exchange_system(p.epoch, ABANDONED) != ABANDONED) {
        store_system(p.fault_record + 1, static_cast<uint64_t>(p.rank));
        store_system(p.fault_record + 2, static_cast<uint64_t>(cta_index()));
        store_system(p.fault_record + 3, static_cast<uint64_t>(site));
        store_system(p.fault_record + 4, static_cast<uint64_t>(expected));
        store_system(p.fault_record + 5, static_cast<uint64_t>(seen));
        store_system(p.fault_record + 6, static_cast<uint64_t>(p.launch));
        store_system(p.fault_record + 7, protocol::RECORD_COMPLETE);
        linger(FLUSH_NS);
    } else {
        linger(OTHERS_NS);
    }
    trap();
}

// Spins until probe(seen) is true. The clock is read only after the quick tries, which is the common case. Inline in all
// that wait: code in a straight line is fetched ahead, and a call of a function cost 0.3 us a wait.
template <class Probe>
DEVICE void spin_until(const Params& p, uint32_t site, uint32_t expected, Probe probe) {
    uint32_t seen = 0;
    uint64_t start = 0;
    mark(p, Point::WAIT, site);
#pragma unroll 1
    for (int tries = 0; !probe(seen); ++tries) {
        spin_pause();
        if (tries < 64) continue;
        const uint64_t now = global_nanoseconds();
        if (start == 0) start = now;
        if (now - start > p.deadline_ns) give_up(p, site, expected, seen);
    }
    mark(p, Point::GO, site);
}

// Counters only grow, and wrap: "reached" is a signed distance. One 128-byte line each.
DEVICE uint32_t* counter_address(const Params& p, protocol::Counter counter) {
    return p.counters + static_cast<int>(counter) * protocol::COUNTER_STRIDE;
}

// One thread: waits until every arrival of this launch at `counter` has happened; what the arriving threads (and
// those they synchronised with) wrote is then visible to this thread. With phases as separate kernels those have ended.
DEVICE void wait_counter(const Params& p, protocol::Counter counter, uint32_t epoch) {
    if constexpr (cfg::SEPARATE) return;
    const uint32_t expected = (epoch + 1u) * protocol::arrivals(counter);
    const uint32_t* address = counter_address(p, counter);
    spin_until(p, static_cast<uint32_t>(counter), expected, [&](uint32_t& seen) {
        seen = load_acquire(address);
        return static_cast<int32_t>(seen - expected) >= 0;
    });
}

// A whole warp waits: lane 0 polls.
DEVICE void wait_counter_warp(const Params& p, protocol::Counter counter, uint32_t epoch) {
    if (lane_index() == 0) wait_counter(p, counter, epoch);
    warp_sync();
}

DEVICE void math_barrier() { barrier_sync(1, cfg::MATH_THREADS); }

// All math warps wait: one thread polls.
DEVICE void wait_counter_math(const Params& p, protocol::Counter counter, uint32_t epoch) {
    if (thread_index() == 0) wait_counter(p, counter, epoch);
    math_barrier();
}

// All math warps: what they wrote before is published with one arrival.
DEVICE void arrive_math(const Params& p, protocol::Counter counter) {
    if constexpr (cfg::SEPARATE) return;
    math_barrier();
    if (thread_index() == 0) add_release(counter_address(p, counter), 1u);
}

DEVICE void wait_mbarrier(const Params& p, uint32_t offset, uint32_t parity, protocol::Site site) {
    // A trace must see the wait, and the suspending form sleeps through most of them.
    if (cfg::TRACE ? mbarrier_test_wait(offset, parity) : mbarrier_try_wait(offset, parity)) return;
    spin_until(p, static_cast<uint32_t>(site), parity, [&](uint32_t& seen) {
        seen = parity ^ 1u;
        return mbarrier_try_wait(offset, parity);
    });
}
