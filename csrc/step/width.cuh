// How many rows of a step count, so that expected tokens per millisecond are highest: bit for bit
// sgl_muse_mega.speculative.width. p.costs [rows + 1] are the ms of a step by rows.
#pragma once
#include "calibration.cuh"
#include "top_k.cuh"

namespace width {

// One warp; lane r has the probability of row r of `count` rows. The first maximum of expected tokens over cost.
DEVICE int tree_rows(const Params& p, int count, float probability) {
    float expected = 0.f, mine = 0.f;
    for (int row = 0; row < count; ++row) {
        expected = rounded_sum(expected, bits_float(shuffle(float_bits(probability), row)));
        if (row == lane_index()) mine = expected;
    }
    const bool here = lane_index() < count;
    float best = here ? rounded_quotient(mine, global_load(p.costs + lane_index() + 1)) : -1.f;
    int rows = lane_index() + 1;
#pragma unroll
    for (int step = 16; step > 0; step /= 2) {
        const float other = shuffle_xor(best, step);
        const int other_rows = shuffle_xor(rows, step);
        if (top_k::better(other, other_rows, best, rows)) {
            best = other;
            rows = other_rows;
        }
    }
    return rows;
}

// Whether going on behind `rows` rows pays, should the drafts behind be worth as much as the next one.
DEVICE bool pays(const Params& p, int rows, int limit, float expected, float path, float worth) {
    const float rate = rounded_quotient(expected, global_load(p.costs + rows));
    for (int more = rows + 1; more <= limit; ++more) {
        expected = rounded_sum(expected, path);
        if (rounded_quotient(expected, global_load(p.costs + more)) > rate) return true;
        path = rounded_product(path, worth);
    }
    return false;
}

// Place of the draft of `slot` among its candidates.
DEVICE int chosen(const Params& p, int slot) {
    const int64_t token = global_load(p.token_ids + 1 + slot);
    int found = 0;
    for (int c = calibration::K - 1; c >= 0; --c) {
        if (global_load(p.candidates + slot * calibration::K + c) == token) found = c;
    }
    return found;
}

// One warp, behind the walk; lane s looks after slot s. Slot s counts or not whatever its own draft is.
DEVICE void choose_chain(const Params& p) {
    constexpr int K = calibration::K;
    const int slot = lane_index(), limit = p.rows + 1;
    warp_sync();  // the walk's tokens
    float worth = 0.f;
    if (slot < p.rows) {
        const int before = slot == 0 ? 0 : chosen(p, slot - 1);
        float q[K], most = 0.f;
        calibration::conditionals(p.lattice + (slot * K + before) * K, calibration::temperature(p), q);
#pragma unroll
        for (int c = 0; c < K; ++c) most = q[c] > most ? q[c] : most;
        worth = calibration::worth(most, calibration::ratio(p, calibration::cell(slot + 1, most)));
        global_store(p.conditionals + slot + 1, most);
    }
    float path = 1.f, expected = 1.f, mine_path = 0.f, mine_expected = 0.f;
    for (int s = 0; s < p.rows; ++s) {
        path = rounded_product(path, bits_float(shuffle(float_bits(worth), s)));
        if (s == slot) {
            mine_path = path;
            mine_expected = expected;
        }
        expected = rounded_sum(expected, path);
    }
    const bool stop = slot >= p.rows || !pays(p, slot + 1, limit, mine_expected, mine_path, worth);
    const uint32_t stops = warp_ballot(stop);
    if (slot == 0) global_store(p.live, lowest_bit(stops) + 1);
}

}  // namespace width
