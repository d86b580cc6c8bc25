// Moves the keys and values of a tree's kept rows to the cache indices behind the committed ones, in all layers of the
// target. p.cache_lines [layers][3]: addresses of keys, values and page table; p.line_bytes: of a slot.
#pragma once
#include "launch.cuh"

namespace compact {

constexpr int PIECE = 16;  // bytes

DEVICE void run(const Params& p) {
    launch::open();
    wait_for_previous_launch();
    const int start = static_cast<int>(global_load(p.state + protocol::CONTEXT_START));
    const int committed = static_cast<int>(global_load(p.state + protocol::COMMITTED));
    const int pieces = p.line_bytes / PIECE, units = p.cache_layers * 2 * pieces;
    for (int unit = cta_index() * cfg::THREADS + thread_index(); unit < units; unit += cfg::SMS * cfg::THREADS) {
        const uint64_t* lines = p.cache_lines + unit / pieces / 2 * 3;
        char* cache = reinterpret_cast<char*>(global_load(lines + unit / pieces % 2)) + unit % pieces * PIECE;
        const int32_t* pages = reinterpret_cast<const int32_t*>(global_load(lines + 2)) + start;
        const auto line = [&](int index) {
            return reinterpret_cast<uint4*>(cache + static_cast<int64_t>(global_load(pages + index)) * p.line_bytes);
        };
        // A row's new place may be another kept row's old one: all are read before any is written.
        uint4 held[cfg::ROW_CAP];
        bool moves[cfg::ROW_CAP];
#pragma unroll
        for (int i = 1; i < cfg::ROW_CAP; ++i) {
            const int row = i < committed ? global_load(p.path + i) : i;
            moves[i] = row != i;
            if (moves[i]) held[i] = global_load(line(row));
        }
#pragma unroll
        for (int i = 1; i < cfg::ROW_CAP; ++i) {
            if (moves[i]) global_store(line(i), held[i]);
        }
    }
}

}  // namespace compact
