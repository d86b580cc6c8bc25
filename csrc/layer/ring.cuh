// The shared-memory ring between the two loader warps and the math warps.
// A stage holds one chunk of weights and the same chunk of the token rows. Its full barrier takes two arrivals: the
// weight loader's, which may come long before the token rows exist, and the token loader's.
#pragma once
#include "instr/bulk.cuh"
#include "wait.cuh"

// A warp's lanes meet, then one arrival stands for all of them. EVERY_LANE_ARRIVES serves compute-sanitizer's
// racecheck, which does not see that a lane's accesses come before the meeting, and so before the arrival of another
// lane.
#ifdef EVERY_LANE_ARRIVES
constexpr int WARP_ARRIVALS = WARP;
#else
constexpr int WARP_ARRIVALS = 1;
#endif

DEVICE void arrive_warp(uint32_t barrier) {
    warp_sync();
    if (lane_index() < WARP_ARRIVALS) mbarrier_arrive(barrier);
}

struct Ring {
    int slot = 0;
    uint32_t parity = 0;

    DEVICE void next() {
        if (++slot == cfg::STAGES) {
            slot = 0;
            parity ^= 1u;
        }
    }
    // One register to keep until the next product: slot and parity are found again there.
    DEVICE void skip(int stages) {
        const uint32_t position = forget(parity * cfg::STAGES + static_cast<uint32_t>(slot + stages));
        slot = static_cast<int>(position % cfg::STAGES);
        parity = position / cfg::STAGES & 1u;
    }
    DEVICE uint32_t weights() const { return cfg::RING_AT + slot * cfg::STAGE_BYTES; }
    DEVICE uint32_t tokens() const { return weights() + cfg::STAGE_WEIGHT_BYTES; }
    DEVICE uint32_t full() const { return cfg::BARRIERS_AT + slot * 8; }
    DEVICE uint32_t empty() const { return cfg::BARRIERS_AT + (cfg::STAGES + slot) * 8; }

    // The first lap finds every stage empty: the phase before the first counts as complete.
    DEVICE void wait_empty(const Params& p) const {
        wait_mbarrier(p, empty(), parity ^ 1u, protocol::Site::RING_EMPTY);
    }
    DEVICE void wait_full(const Params& p) const {
        wait_mbarrier(p, full(), parity, protocol::Site::RING_FULL);
        mark(p, Point::TAKEN);
    }
    // One math warp has read the stage for the last time.
    DEVICE void release() {
        arrive_warp(empty());
        next();
    }
};

DEVICE void init_ring() {
    begin_trace();
    for (int slot = 0; slot < cfg::STAGES; ++slot) {
        mbarrier_init(cfg::BARRIERS_AT + slot * 8, 2);
        mbarrier_init(cfg::BARRIERS_AT + (cfg::STAGES + slot) * 8, cfg::MATH_WARPS * WARP_ARRIVALS);
    }
    mbarrier_init_fence();
}

// Rows of a chunk lie in pairs with 64 bytes between the two and after them: the eight lanes of one 16-byte access
// phase read 64 bytes of two neighbouring rows, and so touch every bank once.
DEVICE constexpr uint32_t row_offset(int row, int row_bytes) {
    return static_cast<uint32_t>((row >> 1) * (2 * row_bytes + 64) + (row & 1) * (row_bytes + 64));
}
template <int ROW_BYTES>
DEVICE constexpr uint32_t row_offset(int row) {
    return row_offset(row, ROW_BYTES);
}
