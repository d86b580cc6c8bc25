// The row operations between the half layers, and those at both ends of the model.
#pragma once
#include "exchange.cuh"

namespace boundary {

// A row in bf16 in the reduction buffer. A thread reads what it wrote itself; the buffer must be free meanwhile.
struct ParkedRow {
    static_assert(cfg::HIDDEN * 2 <= cfg::REDUCE_BYTES, "the reduction buffer holds a row");
    DEVICE static uint32_t at(int column) { return cfg::REDUCE_AT + column * 2; }
    DEVICE static void store(int column, const uint2& values) { shared_store(at(column), values); }
    DEVICE static float4 load(int column) { return unpack_bf16x4(shared_load<uint2>(at(column))); }
};

// E1 and A1 of layer 0: embedding row, norm, stream; then the first layer's input norm.
DEVICE void embed_row(const Params& p, uint32_t epoch, int row) {
    using Columns = RowColumns<cfg::HIDDEN>;
    const GammaColumns<cfg::HIDDEN> gamma(p.next_norm);
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
        store_bf16x4(p.next_input + row * cfg::HIDDEN + column, times(times(s[i], next), gamma.centred(i)));
    });
}

// A9, A10, F1: attention branch into the stream, and the norm before the experts.
DEVICE void after_attention_row(const Params& p, uint32_t epoch, int row) {
    float* stream = p.stream + row * cfg::HIDDEN;
    uint16_t* out = p.router_input + row * cfg::HIDDEN;
    Exchange::wait_o_proj(p, epoch);
    float squares = 0.f;
    Exchange::attention_branch(p, epoch, row, [&](int column, const uint2& branch) {
        ParkedRow::store(column, branch);
        squares += square_sum(unpack_bf16x4(branch));
    });
    keep_order();                         // the branch's packets take the registers
    FloatColumns<cfg::HIDDEN> s(stream);  // asked for beside the sum
    const FloatColumns<cfg::HIDDEN> alpha(p.attention_alpha), beta(p.attention_beta);
    const float scale = reciprocal_root(row_sum(squares, 0) / cfg::HIDDEN + cfg::POST_EPS);
    const GammaColumns<cfg::HIDDEN> gamma(p.pre_feedforward_norm);
    squares = 0.f;
    for_columns<cfg::HIDDEN>([&](int i, int column) {
        const float4 n = round_bf16(times(ParkedRow::load(column), scale));
        s[i] = gated_residual(alpha[i], beta[i], s[i], n);
        global_store(reinterpret_cast<float4*>(stream + column), s[i]);
        squares += square_sum(s[i]);
    });
    const float next = reciprocal_root(row_sum(squares, 1) / cfg::HIDDEN + cfg::RMS_EPS);
    for_columns<cfg::HIDDEN>([&](int i, int column) {
        store_bf16x4(out + column, times(times(s[i], next), gamma.centred(i)));
    });
}

// F15, F16, tap, next A1: expert branch into the stream, and the next layer's input norm.
DEVICE void after_experts_row(const Params& p, uint32_t epoch, int row) {
    float* stream = p.stream + row * cfg::HIDDEN;
    uint16_t* out = p.next_input + row * cfg::HIDDEN;
    uint16_t* tap = p.tap == nullptr ? nullptr : p.tap + row * p.tap_stride;
    const GammaColumns<cfg::HIDDEN> before(p.post_feedforward_norm);
    wait_counter_math(p, protocol::Counter::POST_PROJ, epoch);
    float squares = 0.f;
    Exchange::expert_branch(p, epoch, row, [&](int i, int column, const float4& branch) {
        const uint2 z = pack_bf16x4(times(branch, before.centred(i)));
        ParkedRow::store(column, z);
        squares += square_sum(unpack_bf16x4(z));
    });
    keep_order();
    FloatColumns<cfg::HIDDEN> s(stream);  // asked for beside the sum
    const float scale = reciprocal_root(row_sum(squares, 0) / cfg::HIDDEN + cfg::POST_EPS);
    const FloatColumns<cfg::HIDDEN> alpha(p.feedforward_alpha), beta(p.feedforward_beta);
    const GammaColumns<cfg::HIDDEN> gamma(p.has_next != 0 ? p.next_norm : p.post_feedforward_norm);
    squares = 0.f;
    for_columns<cfg::HIDDEN>([&](int i, int column) {
        const float4 n = round_bf16(times(ParkedRow::load(column), scale));
        s[i] = gated_residual(alpha[i], beta[i], s[i], n);
        global_store(reinterpret_cast<float4*>(stream + column), s[i]);
        if (tap != nullptr) store_bf16x4(tap + column, s[i]);
        squares += square_sum(s[i]);
    });
    const float next = reciprocal_root(row_sum(squares, 1) / cfg::HIDDEN + cfg::RMS_EPS);
    if (p.has_next == 0) return;
    for_columns<cfg::HIDDEN>([&](int i, int column) {
        store_bf16x4(out + column, times(times(s[i], next), gamma.centred(i)));
    });
}

// O1: final norm with an absolute gamma.
DEVICE void final_norm_row(const Params& p, int row) {
    using Columns = RowColumns<cfg::HIDDEN>;
    const GammaColumns<cfg::HIDDEN> gamma(p.next_norm);
    float4 s[Columns::GROUPS] = {};
    float squares = 0.f;
    for_columns<cfg::HIDDEN>([&](int i, int column) {
        s[i] = load_f32x4(p.stream + row * cfg::HIDDEN + column);
        squares += square_sum(s[i]);
    });
    const float scale = reciprocal_root(row_sum(squares, 0) / cfg::HIDDEN + cfg::RMS_EPS);
    for_columns<cfg::HIDDEN>([&](int i, int column) {
        store_bf16x4(p.next_input + row * cfg::HIDDEN + column, times(times(s[i], scale), gamma[i]));
    });
}

// Runs `row_operation(row)` for the rows this CTA owns. Every row of the capacity arrives, so that the counter's growth
// does not depend on the number of rows. A row operation waits for what it reads; CTAs without a row do not wait.
// `place`: operations of different places are on different CTAs where there are enough, because all their code together
// is more than an SM's instruction cache holds. A row's stream stays with place 0.
template <class RowOperation>
DEVICE void for_owned_rows(const Params& p, protocol::Counter counter, int place, RowOperation row_operation) {
#pragma unroll 1
    for (int row = first_owned_row(place * cfg::ROW_CAP); row < cfg::ROW_CAP; row += cfg::SMS) {
        if (row < p.rows) row_operation(forget(row));
        arrive_math(p, counter);
    }
}

// The small vectors of a launch, pulled into L2 while the weights stream past them; every CTA takes its share.
DEVICE_CALL void prefetch_vector(const void* vector, int bytes) {
    constexpr int PIECE = 512;
    const int at = (cta_index() + cfg::SMS * lane_index()) * PIECE;
    if (at < bytes) bulk_prefetch(static_cast<const char*>(vector) + at, bytes - at < PIECE ? bytes - at : PIECE);
}

// Those of the hand-offs behind the experts. Asked for before, the experts' weights would push them out of L2 again.
DEVICE void prefetch_late_vectors(const Params& p) {
    prefetch_vector(p.post_expert_norm, cfg::MOE_HIDDEN * 2);
    prefetch_vector(p.post_feedforward_norm, cfg::HIDDEN * 2);
    prefetch_vector(p.feedforward_alpha, cfg::HIDDEN * 4);
    prefetch_vector(p.feedforward_beta, cfg::HIDDEN * 4);
    if (p.has_next != 0) prefetch_vector(p.next_norm, cfg::HIDDEN * 2);
    prefetch_vector(p.stream, p.rows * cfg::HIDDEN * 4);
}

DEVICE void prefetch_layer_vectors(const Params& p) {
    prefetch_vector(p.attention_alpha, cfg::HIDDEN * 4);
    prefetch_vector(p.attention_beta, cfg::HIDDEN * 4);
    prefetch_vector(p.pre_feedforward_norm, cfg::HIDDEN * 2);
    prefetch_vector(p.router_bias, cfg::EXPERTS * 4);
    prefetch_vector(p.pre_expert_norm, cfg::MOE_HIDDEN * 2);
}

}  // namespace boundary
