// The beginning of a whole step over a server's tables: the request's slots, where the step's rows are, its anchor.
#pragma once
#include "indices.cuh"

namespace server {

// Positions before `committed` are read by the step, those of its rows are written, and behind them those where the next
// step's rows may begin are looked up; further ones nobody asks for. Rows beyond the server's table go to slot 0.
DEVICE void begin_step(const StepBegin& p) {
    open();
    const int committed = static_cast<int>(at(p.committed, 0));
    const int64_t request = at(p.row, 0) * p.request_stride;
    const int end = smaller(committed + 2 * cfg::ROW_CAP, p.positions_held), seen = committed - p.window;
    for (int position = index(); position < end; position += TOTAL_THREADS) {
        const int64_t slot = position < p.requests.count ? at(p.requests, request + position) : 0;
        global_store(p.full_pages + position, static_cast<int32_t>(slot));
        const int row = position - committed;
        const bool of_step = row >= 0 && row < cfg::ROW_CAP;
        int64_t sliding = 0;
        if (!present(p.full_to_sliding)) {
            if (of_step) sliding = global_load(p.sliding_pages + position);
        } else if (position >= seen) {
            sliding = at(p.full_to_sliding, slot);
            global_store(p.sliding_pages + position, static_cast<int32_t>(sliding));
        }
        if (!of_step) continue;
        global_store(p.positions + row, static_cast<int64_t>(position));
        global_store(p.full_slots + row, slot);
        global_store(p.sliding_slots + row, sliding);
    }
    if (cta_index() != 0) return;
    if (thread_index() < cfg::STATE_WORDS) global_store(p.state + thread_index(), int64_t{0});
    if (thread_index() != 0) return;
    global_store(p.token_ids, at(p.anchor, 0));
    global_store(p.length, committed);
    global_store(p.result_place, p.result);
}

}  // namespace server
