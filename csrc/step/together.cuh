// The CTAs that share a row, as one: sums over all of them, the same in every thread of each.
// A row's counter grows by one per CTA and sum; what a launch did not use of MAX_SUMS is added at its end, so that the
// growth of a launch is always SHARES * MAX_SUMS.
#pragma once
#include "instr/convert.cuh"
#include "layer/wait.cuh"

namespace together {

constexpr int WARPS = cfg::THREADS / WARP;
constexpr int MAX_SUMS = protocol::ROW_SUMS;
constexpr int WIDTH = 4;  // values per sum

DEVICE uint64_t shuffle_wide(uint64_t value, int lane) {
    return static_cast<uint64_t>(shuffle(static_cast<uint32_t>(value >> 32), lane)) << 32 |
           shuffle(static_cast<uint32_t>(value), lane);
}
DEVICE uint64_t warp_sum(uint64_t value) {
#pragma unroll
    for (int step = 16; step > 0; step /= 2) value += shuffle_wide(value, lane_index() ^ step);
    return value;
}
DEVICE void cta_barrier() { barrier_sync(0, cfg::THREADS); }

struct Values {
    uint64_t at[WIDTH];
};

// One launch's view of a row.
struct Team {
    const Params& p;
    int row, share;
    uint32_t base;  // of the row's counter
    int done = 0;   // sums so far

    DEVICE Team(const Params& params, uint32_t epoch)
        : p(params),
          row(cta_index() / cfg::SHARES),
          share(cta_index() % cfg::SHARES),
          base(epoch * static_cast<uint32_t>(cfg::SHARES * MAX_SUMS)) {}
    DEVICE bool leads() const { return share == 0; }

    // All threads of all CTAs of the row; the row's leader is first among equals.
    DEVICE Values sum(const Values& mine) {
#pragma unroll
        for (int i = 0; i < WIDTH; ++i) {
            const uint64_t value = warp_sum(mine.at[i]);
            if (lane_index() == 0) shared_store(cfg::SUMS_AT + (warp_index() * WIDTH + i) * 8, value);
        }
        cta_barrier();
        // Two sets of slots in turn: who writes a set again has seen everybody arrive at the sum in between.
        uint64_t* slots = p.row_sums + ((row * 2 + done % 2) * cfg::SHARES) * WIDTH;
        if (thread_index() < WIDTH) {
            uint64_t value = 0;
            for (int warp = 0; warp < WARPS; ++warp) {
                value += shared_load<uint64_t>(cfg::SUMS_AT + (warp * WIDTH + thread_index()) * 8);
            }
            global_store(slots + share * WIDTH + thread_index(), value);
        }
        cta_barrier();
        ++done;
        if (warp_index() == 0) {
            if (lane_index() == 0) arrive(1);
            if (lane_index() == 0) wait();
            warp_sync();
            if (lane_index() < WIDTH) {
                uint64_t value = 0;
#pragma unroll 8
                for (int other = 0; other < cfg::SHARES; ++other) {
                    value += global_load(slots + other * WIDTH + lane_index());
                }
                shared_store(cfg::SUMS_AT + lane_index() * 8, value);
            }
        }
        cta_barrier();
        Values all;
#pragma unroll
        for (int i = 0; i < WIDTH; ++i) all.at[i] = shared_load<uint64_t>(cfg::SUMS_AT + i * 8);
        cta_barrier();
        return all;
    }
    DEVICE uint64_t sum(uint64_t mine) { return sum(Values{{mine, 0, 0, 0}}).at[0]; }

    // One thread, at the end of the launch.
    DEVICE void finish() { arrive(static_cast<uint32_t>(MAX_SUMS - done)); }

  private:
    DEVICE uint32_t* counter() const { return p.row_counters + row * protocol::COUNTER_STRIDE; }
    DEVICE void arrive(uint32_t count) { add_release(counter(), count); }
    DEVICE void wait() {
        const uint32_t expected = base + static_cast<uint32_t>(done * cfg::SHARES);
        const uint32_t* address = counter();
        spin_until(p, static_cast<uint32_t>(protocol::Site::ROW_SUM), expected, [&](uint32_t& seen) {
            seen = load_acquire(address);
            return static_cast<int32_t>(seen - expected) >= 0;
        });
    }
};

}  // namespace together
