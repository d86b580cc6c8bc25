// Exchange points: where a rank's part of a row becomes the row of all ranks.
// A row operation asks an exchange for four columns of a row instead of reading the product's parts itself; an exchange
// over several ranks sums (o_proj, combine) or gathers (pre_expert_proj, post_expert_proj) in rank order behind the
// same calls. This one serves a single rank, which holds everything.
#pragma once
#include "products.cuh"
#include "row.cuh"

struct OneRank {
    // A8: the attention branch, bf16 after the sum over ranks.
    DEVICE static float4 attention_branch(const Params& p, int row, int column) {
        return round_bf16(sum_parts<OProj>(p.o_partial, row, column));
    }
    // F6: columns of the row before the experts, bf16.
    DEVICE static float4 expert_row(const Params& p, int row, int column) {
        return round_bf16(sum_parts<PreProj>(p.pre_partial, row, column));
    }
    // F13: the sum of the ranks' combined experts, bf16; `local` is this rank's F12.
    DEVICE static float4 combined_experts(const Params&, int, int, const float4& local) { return round_bf16(local); }
    // F14: the expert branch, bf16.
    DEVICE static float4 expert_branch(const Params& p, int row, int column) {
        return round_bf16(sum_parts<PostProj>(p.post_partial, row, column));
    }
};

using Exchange = OneRank;
