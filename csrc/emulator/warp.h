// Operations in which the 32 lanes of a warp meet. Lanes bring words in warp.in[lane]; the last to come computes
// warp.out for all. A lane cannot bring the next operation's words before all have come to it, so one buffer is enough.
#pragma once
#include "machine.h"

namespace emulator {

// Returns this lane's results.
const uint32_t* meet(Meeting meeting, void (*compute)(Warp&), const Site& site);

inline uint32_t* words() { return current->warp->in[current->index]; }

void no_words(Warp& warp);
void shuffle_words(Warp& warp);    // in: value, source lane
void ballot_words(Warp& warp);     // in: 0 or 1
void transpose_words(Warp& warp);  // in: row g of an 8 x 8 matrix of 16-bit elements, columns 2t and 2t + 1
void transpose_rows(Warp& warp);   // in, lane 8 m + r: row r of the 8 x 8 matrix m
void multiply_bf16_fragments(
    Warp& warp);  // in: a0 a1 a2 a3 b0 b1 of mma.m16n8k16; out: the product in fp32, not yet added to c
void multiply_f16_fragments(Warp& warp);  // the same
void sync_lanes(Warp& warp);

}  // namespace emulator
