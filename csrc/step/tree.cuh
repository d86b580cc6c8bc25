// The token tree of a step, bit for bit sgl_muse_mega.speculative.tree: of the lattice's paths the best p.nodes nodes,
// best first.
#pragma once
#include "width.cuh"

namespace tree {

using calibration::K;

constexpr int NODES = cfg::ROW_CAP, SLOTS = cfg::ROW_CAP - 1;
constexpr float LEAST = 0x1p-100f;
// The ring is free when the head's product is done.
constexpr uint32_t CONDITIONALS_AT = cfg::RING_AT, RATIOS_AT = CONDITIONALS_AT + SLOTS * K * K * 4;
static_assert(RATIOS_AT + calibration::CELLS * 4 <= cfg::SHARED_BYTES, "conditionals and ratios fit the ring");
static_assert(K <= WARP && NODES <= WARP, "a lane has a candidate of every row, and a row");

DEVICE uint32_t conditional_at(int slot, int before, int candidate) {
    return CONDITIONALS_AT + ((slot * K + before) * K + candidate) * 4;
}

// Math warps: q of all lattice rows, and the calibration's ratios, into shared memory. A thread has whole rows.
DEVICE void prepare(const Params& p) {
    const float temperature = calibration::temperature(p);
    for (int row = thread_index(); row < p.rows * K; row += cfg::MATH_THREADS) {
        float q[K];
        calibration::conditionals(p.lattice + row * K, temperature, q);
#pragma unroll
        for (int c = 0; c < K; ++c) shared_store(CONDITIONALS_AT + (row * K + c) * 4, q[c]);
    }
    for (int cell = thread_index(); cell < calibration::CELLS; cell += cfg::MATH_THREADS) {
        shared_store(RATIOS_AT + cell * 4, calibration::ratio(p, cell));
    }
    math_barrier();
}

// What lane r knows of row r.
struct Row {
    int parent = -1, depth = 0, candidate = 0;
    float conditional = 1.f, probability = 1.f;
    uint32_t seen = 1u;  // itself and its ancestors
};

DEVICE int of_row(int value, int row) { return static_cast<int>(shuffle(static_cast<uint32_t>(value), row)); }
DEVICE float of_row(float value, int row) { return bits_float(shuffle(float_bits(value), row)); }

// The largest of the children that were not chosen, in every lane; ties go to the lower row, then candidate. Lane c has
// candidate c of every row; -1: not there.
struct Child {
    float probability;
    int place;  // row * K + candidate
};
DEVICE Child best_child(const float (&children)[NODES]) {
    Child best{-1.f, NODES * K};
#pragma unroll
    for (int row = 0; row < NODES; ++row) {
        if (children[row] > best.probability) best = {children[row], row * K + lane_index()};
    }
#pragma unroll
    for (int step = 16; step > 0; step /= 2) {
        const float other = shuffle_xor(best.probability, step);
        const int place = shuffle_xor(best.place, step);
        if (top_k::better(other, place, best.probability, best.place)) best = {other, place};
    }
    return best;
}

// One warp, behind `prepare`. Returns how many rows there are.
DEVICE int grow(const Params& p, Row& mine) {
    float children[NODES];
#pragma unroll
    for (int row = 0; row < NODES; ++row) children[row] = -1.f;
    int count = 1;
#pragma unroll 1
    for (;; ++count) {
        const int row = count - 1, depth = of_row(mine.depth, row), candidate = of_row(mine.candidate, row);
        const float probability = of_row(mine.probability, row);
        float child = -1.f;
        if (depth < p.rows && lane_index() < K) {
            const float q = shared_load<float>(conditional_at(depth, candidate, lane_index()));
            const float ratio = shared_load<float>(RATIOS_AT + calibration::cell(depth + 1, q) * 4);
            child = rounded_product(probability, calibration::worth(q, ratio));
            if (!(child >= LEAST)) child = 0.f;
        }
#pragma unroll
        for (int r = 0; r < NODES; ++r) {
            if (r == row) children[r] = child;
        }
        const Child best = best_child(children);
        if (count == p.nodes || best.probability < 0.f) return count;
        const int parent = best.place / K, chosen = best.place % K;
        const int parent_depth = of_row(mine.depth, parent), parent_candidate = of_row(mine.candidate, parent);
        const uint32_t parent_seen = shuffle(mine.seen, parent);
        if (lane_index() == count) {
            mine = {parent, parent_depth + 1, chosen,
                    shared_load<float>(conditional_at(parent_depth, parent_candidate, chosen)), best.probability,
                    parent_seen | 1u << count};
        }
#pragma unroll
        for (int r = 0; r < NODES; ++r) {
            if (r == parent && lane_index() == chosen) children[r] = -1.f;
        }
    }
}

// Math warps of one CTA: rows 0 .. p.nodes - 1 of the verify step's inputs, and what the accept rule wants to know of
// them. Their slots, those of the indices behind the committed rows, are there already.
DEVICE void plan(const Params& p) {
    prepare(p);
    if (warp_index() != 0) return;
    Row mine;
    const int row = lane_index(), count = grow(p, mine);
    const int live = p.costs == nullptr ? count : width::tree_rows(p, count, mine.probability);
    if (row == 0) global_store(p.live, live);
    if (row >= p.nodes) return;
    if (row >= count) mine = {0, 1, 0, 0.f, 0.f, 1u | 1u << row};  // the lattice has no more: never kept
    if (row > 0) global_store(p.token_ids + row, global_load(p.candidates + (mine.depth - 1) * K + mine.candidate));
    global_store(p.positions + row, static_cast<int64_t>(global_load(p.length) + mine.depth));
    global_store(p.ancestors + row, mine.seen);
    global_store(p.parents + row, mine.parent);
    global_store(p.depths + row, mine.depth);
    global_store(p.conditionals + row, mine.conditional);
}

}  // namespace tree
