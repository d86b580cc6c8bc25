// O1-O3 of the target over its head in fragment order: the same bits as the target's own head launch, which reads the
// row-major head.
#pragma once
#include "draft/block.cuh"
#include "vocabulary.cuh"

namespace verify_head {

using Best = vocabulary::List<1>;  // lane 0 has the best score, ties to the lower id

// O1: final norm with an absolute gamma.
DEVICE void norm_row(const Params& p, int row) {
    using Columns = RowColumns<cfg::HIDDEN>;
    float4 s[Columns::GROUPS] = {};
    float squares = 0.f;
    for_columns<cfg::HIDDEN>([&](int i, int column) {
        s[i] = load_f32x4(p.stream + row * cfg::HIDDEN + column);
        squares += square_sum(s[i]);
    });
    const float scale = reciprocal_root(row_sum(squares, 0) / cfg::HIDDEN + cfg::TARGET_EPS);
    for_columns<cfg::HIDDEN>([&](int i, int column) {
        tokens::store(p.input, row, column, times(times(s[i], scale), load_bf16x4(p.final_norm + column)));
    });
}

DEVICE float logit_of(float score) {
    const float scaled = score * cfg::TARGET_MULTIPLIER;
    return cfg::TARGET_SOFTCAP > 0.f ? cfg::TARGET_SOFTCAP * hyperbolic_tangent(scaled / cfg::TARGET_SOFTCAP) : scaled;
}

// The softcap is monotone, so the greedy token is taken from the scores before it.
DEVICE void run_logits(const Params& p, Ring& ring) {
    Best best[ROW_TURNS];
    run_product<LmHead>(p, ring, [&](const DenseTask&, int turn, int row, int id, float score) {
        vocabulary::offer(p, best[turn], score, id);
        if (cfg::VOCAB % WARP != 0 && id >= cfg::VOCAB) return;
        global_store(p.logits + static_cast<int64_t>(row) * cfg::VOCAB + id, logit_of(score));
    });
#pragma unroll
    for (int turn = 0; turn < ROW_TURNS; ++turn) {
        const int row = thread_index() / BLOCK_ROWS + ROWS_AT_ONCE * turn;
        if (row >= p.rows || lane_index() != 0) continue;
        const int64_t at = static_cast<int64_t>(row) * 2 * cfg::SMS + 2 * cta_index() + warp_index() % 2;
        global_store(p.list_scores + at, best[turn].value);
        global_store(p.list_ids + at, best[turn].id);
    }
    arrive_math(p, protocol::Counter::SCORES);
}

// One warp; a row without a best keeps an id outside the vocabulary.
DEVICE void choose_row(const Params& p, uint32_t epoch, int row) {
    Best best;
    for (int first = 0; first < 2 * cfg::SMS; first += WARP) {
        const bool there = first + lane_index() < 2 * cfg::SMS;
        const int64_t at = static_cast<int64_t>(row) * 2 * cfg::SMS + (there ? first + lane_index() : 0);
        best.offer(there ? global_load(p.list_scores + at) : -infinity(),
                   there ? global_load(p.list_ids + at) : vocabulary::IDS);
    }
    vocabulary::merge<mailbox::BestToken>(p, epoch, row, best);
    if (lane_index() != 0) return;
    global_store(p.greedy_ids + row, static_cast<int64_t>(best.id));
    if (cfg::RANKS > 1) global_store(p.greedy_logits + row, logit_of(best.value));
}

DEVICE void run(const Params& p) {
    using protocol::Counter;
    draft::start();
    const int warp = warp_index();
    Ring ring;
    if (warp == draft::WEIGHT_LOADER) {
        load_product<LmHead>(p, ring, p.lm_head, eviction_policy(Keep::first_out));
        return;
    }
    const uint32_t epoch = draft::begin_epoch(p);
    if (warp == draft::TOKEN_LOADER) {
        wait_rows(p, Counter::NORMED, epoch);
        tokens::load_chunks<LmHead>(p, ring, p.input, eviction_policy(Keep::last_out));
        return;
    }
    convolution::for_owned_rows(
        p, Counter::NORMED, [] {}, [&](int row) { norm_row(p, row); },
        [&](int row) { convolution::clear_row(p.input, row); });
    run_logits(p, ring);
    wait_counter_math(p, Counter::SCORES, epoch);
    for (int row = 0; row < p.rows; ++row) {
        if (owns_row(row) && warp == row % cfg::MATH_WARPS) choose_row(p, epoch, row);
    }
    launch::end_epoch(p, epoch);
}

}  // namespace verify_head
