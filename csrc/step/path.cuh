// Which rows of a step are kept, and what the calibration learns from it. A chain keeps its first rows; a tree the rows
// on the way of the target's own tokens from the anchor on (sgl_muse_mega.speculative.tree).
#pragma once
#include "calibration.cuh"
#include "mass.cuh"
#include "verdict.cuh"

namespace path {

// One warp, lane = row of a tree, with the target's token behind it. Lane i gets the i-th kept row, counted from the
// anchor, or -1; of children with equal tokens the lowest is taken.
DEVICE int follow(const Params& p, int rows, const verdict::Verdict& mine) {
    const int lane = lane_index();
    const bool there = lane < rows;
    const int parent = there ? global_load(p.parents + lane) : -1;
    const int token = there ? static_cast<int>(global_load(p.token_ids + lane)) : -1;
    int child = -1;
    for (int row = rows - 1; row > 0; --row) {
        const int its_parent = static_cast<int>(shuffle(static_cast<uint32_t>(parent), row));
        const int its_token = static_cast<int>(shuffle(static_cast<uint32_t>(token), row));
        if (its_parent == lane && its_token == static_cast<int>(mine.token)) child = row;
    }
    if (mine.kind == verdict::BROKEN) child = -1;
    int kept = -1, row = 0;
    for (int depth = 0; row >= 0; ++depth) {
        if (lane == depth) kept = row;
        row = static_cast<int>(shuffle(static_cast<uint32_t>(child), row));
    }
    return kept;
}

// One warp: the outcome of the drafts whose turn came. kept: lane i has the i-th kept row, the anchor first, or -1.
DEVICE void learn(const Params& p, int rows, int kept) {
    const int row = lane_index();
    const bool there = row > 0 && row < rows;
    int parent = row - 1, depth = row;
    if (p.nodes > 0 && there) {
        parent = global_load(p.parents + row);
        depth = global_load(p.depths + row);
    }
    const float q = there ? global_load(p.conditionals + row) : 0.f;
    uint32_t set = 0;
    for (int i = 0; i < rows; ++i) {
        const int which = static_cast<int>(shuffle(static_cast<uint32_t>(kept), i));
        if (which >= 0) set |= 1u << which;
    }
    const bool trial = there && (set >> parent & 1u) != 0u;
    calibration::learn(p, rows, depth, q, trial, trial && (set >> row & 1u) != 0u);
}

}  // namespace path
