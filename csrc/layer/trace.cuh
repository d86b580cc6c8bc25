// A timeline of one launch: when each warp reached each point of its program. Compiled in only with cfg::TRACE.
#pragma once
#include "wait.cuh"

using protocol::Point;

// trace: uint64 [CTAs, warps, points] in nanoseconds; the value is the time at which the point was passed.
DEVICE void mark(const Params& p, protocol::Point point) {
    if constexpr (cfg::TRACE) {
        if (lane_index() == 0) {
            const int warp = cta_index() * (cfg::THREADS / WARP) + warp_index();
            global_store(p.trace + warp * protocol::POINTS + static_cast<int>(point), global_nanoseconds());
        }
    }
}
