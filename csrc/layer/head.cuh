// O2, O3: logits of this rank's vocabulary rows, and each row's greedy token.
#pragma once
#include "boundary.cuh"

namespace head {

// A better candidate is larger, or equal with a lower id.
struct Best {
    float value;
    int id;

    DEVICE void offer(float other, int other_id) {
        if (other > value || (other == value && other_id < id)) {
            value = other;
            id = other_id;
        }
    }
    DEVICE void merge_warp() {
#pragma unroll
        for (int step = 16; step > 0; step /= 2) {
            const float other = shuffle_xor(value, step);
            offer(other, shuffle_xor(id, step));
        }
    }
};

DEVICE float logit_of(float score) {
    const float scaled = score * cfg::OUTPUT_MULTIPLIER;
    return cfg::SOFTCAP > 0.f ? cfg::SOFTCAP * hyperbolic_tangent(scaled / cfg::SOFTCAP) : scaled;
}

DEVICE Best nothing() { return Best{-infinity(), cfg::VOCAB * cfg::RANKS}; }

// The softcap is monotone, so the greedy token is taken from the scores before it.
DEVICE void run_logits(const Params& p, Ring& ring) {
    static_assert(cfg::MATH_THREADS % BLOCK_ROWS == 0, "a thread keeps its rows from block to block");
    Best best[ROW_TURNS];
#pragma unroll
    for (int turn = 0; turn < ROW_TURNS; ++turn) best[turn] = nothing();
    const auto finish = [&](const DenseTask&, int turn, int row, int id, float score) {
        best[turn].offer(score, Exchange::first_token(p) + id);
        global_store(p.logits + static_cast<int64_t>(row) * cfg::VOCAB + id, logit_of(score));
    };
    run_tasks<LmHead::CHUNK, 2, ROW_TURNS>(p, ring, task_list<LmHead>(), LmHead::N, p.rows, finish);
    // 64 threads, two warps, share the rows r = (thread / 64) + ROWS_AT_ONCE * turn.
#pragma unroll
    for (int turn = 0; turn < ROW_TURNS; ++turn) {
        best[turn].merge_warp();
        const int row = thread_index() / BLOCK_ROWS + ROWS_AT_ONCE * turn;
        if (lane_index() == 0 && row < p.rows) {
            const int64_t at = (static_cast<int64_t>(row) * cfg::SMS + cta_index()) * 2 + warp_index() % 2;
            global_store(p.best_scores + at, best[turn].value);
            global_store(p.best_ids + at, best[turn].id);
        }
    }
    arrive_math(p, protocol::Counter::LOGITS);
}

DEVICE void greedy_row(const Params& p, uint32_t epoch, int row) {
    if (warp_index() != 0) return;
    Best best = nothing();
    for (int i = lane_index(); i < 2 * cfg::SMS; i += WARP) {
        const int64_t at = static_cast<int64_t>(row) * cfg::SMS * 2 + i;
        best.offer(global_load(p.best_scores + at), global_load(p.best_ids + at));
    }
    best.merge_warp();
    Exchange::best_token(p, epoch, row, best.value, best.id, [&](float value, int id) { best.offer(value, id); });
    if (cfg::RANKS > 1) best.merge_warp();
    if (lane_index() != 0) return;
    global_store(p.greedy_ids + row, static_cast<int64_t>(best.id));
    if (cfg::RANKS > 1) global_store(p.greedy_logits + row, logit_of(best.value));
}

}  // namespace head
