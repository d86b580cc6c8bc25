// The end of a whole step: what the server gets, where the step's beginning was told to leave it.
#pragma once
#include "indices.cuh"

namespace server {

// result int64 [width + 3]: the step's tokens, of which the first `committed` count, `committed`, the anchor and the
// length. The accept launch has left the new anchor in row 0 and the drafts behind it.
DEVICE void end_step(const StepEnd& p) {
    open();
    if (cta_index() != 0) return;
    const int place = thread_index(), committed = static_cast<int>(global_load(p.state + cfg::COMMITTED));
    const int64_t anchor = global_load(p.token_ids);
    int64_t* result = reinterpret_cast<int64_t*>(global_load(p.result_place));
    if (place < p.width) {
        const int last = committed > 0 ? committed - 1 : 0;
        int64_t token = anchor;
        if (place != last && place + 1 < p.width) {
            const int row = p.path == nullptr ? place + 1 : global_load(p.path + place + 1);
            token = global_load(p.token_ids + row);
        }
        global_store(result + place, token);
    }
    if (place == 0) {
        global_store(result + p.width, static_cast<int64_t>(committed));
        global_store(result + p.width + 1, anchor);
        global_store(result + p.width + 2, static_cast<int64_t>(global_load(p.length)));
    }
    if (p.ancestors == nullptr) return;  // the step was a chain of all rows, as the server's own steps are
    if (place < cfg::ROW_CAP) global_store(p.ancestors + place, (2 << place) - 1);
    if (place == 0) global_store(p.live, cfg::ROW_CAP);
}

}  // namespace server
