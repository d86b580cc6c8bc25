// The row operations between the half layers, and those at both ends of the model.
#pragma once
#include "exchange.cuh"

namespace boundary {

// E1 and A1 of layer 0: embedding row, norm, stream; then the first layer's input norm.
DEVICE void embed_row(const Params& p, uint32_t epoch, int row) {
    using Columns = RowColumns<cfg::HIDDEN>;
    float4 s[Columns::GROUPS] = {};
    float squares = 0.f;
    Exchange::embedding(p, epoch, row, global_load(p.token_ids + row), [&](int i, int, const float4& columns) {
        s[i] = columns;
        squares += square_sum(columns);
    });
    const float scale = reciprocal_root(row_sum(squares, 0) / cfg::HIDDEN + cfg::RMS_EPS);
    squares = 0.f;
    for_columns<cfg::HIDDEN>([&](int i, int column) {
        s[i] = round_bf16(times(s[i], scale));
        global_store(reinterpret_cast<float4*>(p.stream + row * cfg::HIDDEN + column), s[i]);
        squares += square_sum(s[i]);
    });
    const float next = reciprocal_root(row_sum(squares, 1) / cfg::HIDDEN + cfg::RMS_EPS);
    for_columns<cfg::HIDDEN>([&](int i, int column) {
        store_bf16x4(p.next_input + row * cfg::HIDDEN + column,
                     times(times(s[i], next), centred_gamma(p.next_norm + column)));
    });
}

// A9, A10, F1: attention branch into the stream, and the norm before the experts.
template <class Ready>
DEVICE void after_attention_row(const Params& p, uint32_t epoch, int row, Ready ready) {
    using Columns = RowColumns<cfg::HIDDEN>;
    float4 s[Columns::GROUPS] = {};
    uint2 z[Columns::GROUPS] = {};  // the branch is bf16: half the registers
    for_columns<cfg::HIDDEN>([&](int i, int column) { s[i] = load_f32x4(p.stream + row * cfg::HIDDEN + column); });
    ready();  // the stream's row is this CTA's own and needs no waiting
    float squares = 0.f;
    Exchange::attention_branch(p, epoch, row, [&](int i, int, const float4& branch) {
        z[i] = pack_bf16x4(branch);
        squares += square_sum(branch);
    });
    const float scale = reciprocal_root(row_sum(squares, 0) / cfg::HIDDEN + cfg::POST_EPS);
    squares = 0.f;
    for_columns<cfg::HIDDEN>([&](int i, int column) {
        const float4 n = round_bf16(times(unpack_bf16x4(z[i]), scale));
        s[i] = gated_residual(p.attention_alpha + column, p.attention_beta + column, s[i], n);
        global_store(reinterpret_cast<float4*>(p.stream + row * cfg::HIDDEN + column), s[i]);
        squares += square_sum(s[i]);
    });
    const float next = reciprocal_root(row_sum(squares, 1) / cfg::HIDDEN + cfg::RMS_EPS);
    for_columns<cfg::HIDDEN>([&](int i, int column) {
        store_bf16x4(p.router_input + row * cfg::HIDDEN + column,
                     times(times(s[i], next), centred_gamma(p.pre_feedforward_norm + column)));
    });
}

// F15, F16, tap, next A1: expert branch into the stream, and the next layer's input norm.
template <class Ready>
DEVICE void after_experts_row(const Params& p, uint32_t epoch, int row, Ready ready) {
    using Columns = RowColumns<cfg::HIDDEN>;
    float4 s[Columns::GROUPS] = {};
    uint2 z[Columns::GROUPS] = {};  // the branch is bf16: half the registers
    for_columns<cfg::HIDDEN>([&](int i, int column) { s[i] = load_f32x4(p.stream + row * cfg::HIDDEN + column); });
    ready();
    float squares = 0.f;
    Exchange::expert_branch(p, epoch, row, [&](int i, int column, const float4& branch) {
        z[i] = pack_bf16x4(times(branch, centred_gamma(p.post_feedforward_norm + column)));
        squares += square_sum(unpack_bf16x4(z[i]));
    });
    const float scale = reciprocal_root(row_sum(squares, 0) / cfg::HIDDEN + cfg::POST_EPS);
    squares = 0.f;
    for_columns<cfg::HIDDEN>([&](int i, int column) {
        const float4 n = round_bf16(times(unpack_bf16x4(z[i]), scale));
        s[i] = gated_residual(p.feedforward_alpha + column, p.feedforward_beta + column, s[i], n);
        global_store(reinterpret_cast<float4*>(p.stream + row * cfg::HIDDEN + column), s[i]);
        if (p.tap != nullptr) store_bf16x4(p.tap + row * p.tap_stride + column, s[i]);
        squares += square_sum(s[i]);
    });
    const float next = reciprocal_root(row_sum(squares, 1) / cfg::HIDDEN + cfg::RMS_EPS);
    if (p.has_next == 0) return;
    for_columns<cfg::HIDDEN>([&](int i, int column) {
        store_bf16x4(p.next_input + row * cfg::HIDDEN + column,
                     times(times(s[i], next), centred_gamma(p.next_norm + column)));
    });
}

// O1: final norm with an absolute gamma.
DEVICE void final_norm_row(const Params& p, int row) {
    using Columns = RowColumns<cfg::HIDDEN>;
    float4 s[Columns::GROUPS] = {};
    float squares = 0.f;
    for_columns<cfg::HIDDEN>([&](int i, int column) {
        s[i] = load_f32x4(p.stream + row * cfg::HIDDEN + column);
        squares += square_sum(s[i]);
    });
    const float scale = reciprocal_root(row_sum(squares, 0) / cfg::HIDDEN + cfg::RMS_EPS);
    for_columns<cfg::HIDDEN>([&](int i, int column) {
        store_bf16x4(p.next_input + row * cfg::HIDDEN + column,
                     times(times(s[i], scale), load_bf16x4(p.next_norm + column)));
    });
}

// Runs `row_operation(row, ready)` for the rows this CTA owns. Every row of the capacity arrives, so that the counter's
// growth does not depend on the number of rows. A row operation calls ready() before it reads what `wait` is for; CTAs
// without a row do not wait.
template <class Wait, class RowOperation>
DEVICE void for_owned_rows(const Params& p, protocol::Counter counter, Wait wait, RowOperation row_operation,
                           int shift = 0) {
    bool waited = false;
    for (int row = 0; row < cfg::ROW_CAP; ++row) {
        if (!owns_row(row, shift)) continue;
        if (row < p.rows) {
            row_operation(row, [&] {
                if (!waited) wait();
                waited = true;
            });
        }
        arrive_math(p, counter);
    }
}

// The small vectors of a launch, pulled into L2 while the weights stream past them; every CTA takes its share of lines.
DEVICE void prefetch_vector(const void* vector, int bytes) {
    constexpr int LINE = 128;
    for (int offset = (cta_index() * WARP + lane_index()) * LINE; offset < bytes; offset += cfg::SMS * WARP * LINE) {
        prefetch_line(static_cast<const char*>(vector) + offset);
    }
}

DEVICE void prefetch_layer_vectors(const Params& p) {
    prefetch_vector(p.attention_alpha, cfg::HIDDEN * 4);
    prefetch_vector(p.attention_beta, cfg::HIDDEN * 4);
    prefetch_vector(p.pre_feedforward_norm, cfg::HIDDEN * 2);
    prefetch_vector(p.router_bias, cfg::EXPERTS * 4);
    prefetch_vector(p.pre_expert_norm, cfg::MOE_HIDDEN * 2);
    prefetch_vector(p.post_expert_norm, cfg::MOE_HIDDEN * 2);
    prefetch_vector(p.post_feedforward_norm, cfg::HIDDEN * 2);
    prefetch_vector(p.feedforward_alpha, cfg::HIDDEN * 4);
    prefetch_vector(p.feedforward_beta, cfg::HIDDEN * 4);
    if (p.has_next != 0) prefetch_vector(p.next_norm, cfg::HIDDEN * 2);
}

}  // namespace boundary
