// A timeline of a launch: each warp's log of what it passed, and when. Compiled in only with cfg::TRACE.
#pragma once
#include "instance.h"
#include "instr/clock.cuh"
#include "instr/memory.cuh"

using protocol::Point;

#ifdef RANDOM_DELAYS
// For checks: at one mark in 16 a warp pauses for up to so many nanoseconds, another time in every launch.
DEVICE void pause_now_and_then(Point point) {
    const uint64_t now = global_nanoseconds();
    uint32_t mixed = static_cast<uint32_t>(now >> 5) ^ (cta_index() * 64 + warp_index()) * 0x9e3779b1u;
    mixed = (mixed ^ mixed >> 15 ^ static_cast<uint32_t>(point)) * 0x85ebca6bu;
    mixed ^= mixed >> 13;
    if (mixed % 16 != 0) return;
    const uint64_t until = now + (mixed >> 4) % (RANDOM_DELAYS);
    while (global_nanoseconds() < until) {
    }
}
#endif

// trace: uint64 [CTAs, warps, LOG_WORDS], zero before the launch. A word has the time in nanoseconds modulo 2^40, the
// point in 8 bits and a value in 16; a full log takes no more. Only what lane 0 passes is noted.
DEVICE void mark(const Params& p, Point point, uint32_t value = 0) {
#ifdef RANDOM_DELAYS
    if (lane_index() == 0) pause_now_and_then(point);
#endif
    if constexpr (cfg::TRACE) {
        if (lane_index() != 0) return;
        const uint32_t length_at = cfg::TRACE_AT + warp_index() * 4;
        const uint32_t length = shared_load<uint32_t>(length_at);
        if (length == protocol::LOG_WORDS) return;
        shared_store(length_at, length + 1u);
        const int log = cta_index() * (cfg::THREADS / WARP) + warp_index();
        global_store(p.trace + static_cast<int64_t>(log) * protocol::LOG_WORDS + length,
                     global_nanoseconds() << 24 | static_cast<uint64_t>(point) << 16 | (value & 0xffffu));
    }
}

// One thread, before the CTA's first barrier: all logs are empty.
DEVICE void begin_trace() {
    if constexpr (cfg::TRACE) {
        for (int warp = 0; warp < cfg::THREADS / WARP; ++warp) shared_store(cfg::TRACE_AT + warp * 4, 0u);
    }
}
