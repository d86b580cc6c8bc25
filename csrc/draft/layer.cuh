// One draft layer as a program of the warp roles: the normed input of this layer to that of the next (B1-B11).
#pragma once
#include "attention.cuh"
#include "convolution.cuh"
#include "heads.cuh"
#include "product.cuh"
#include "step/launch.cuh"
#include "warm.cuh"

namespace draft {

constexpr int WEIGHT_LOADER = cfg::MATH_WARPS, TOKEN_LOADER = WEIGHT_LOADER + 1;
static_assert(cfg::THREADS == (cfg::MATH_WARPS + 2) * WARP, "math warps and two loaders");

// Barriers exist and the ring is empty afterwards.
DEVICE void start() {
    if (thread_index() == 0) init_ring();
    launch::open();
    barrier_sync(0, cfg::THREADS);
}
DEVICE uint32_t begin_epoch(const Params& p) { return launch::begin_epoch(p, cfg::THREADS - WARP); }

// B10: silu(gate) * up, both bf16 before; all CTAs share the columns.
DEVICE void activate(const Params& p, uint32_t epoch) {
    wait_counter_math(p, protocol::Counter::GATE_UP, epoch);
    constexpr int QUADS = cfg::INTER / 4;
    const int first = cta_index() * cfg::MATH_THREADS + thread_index();
    for (int i = first; i < p.rows * QUADS; i += cfg::SMS * cfg::MATH_THREADS) {
        const int row = i / QUADS, column = i % QUADS * 4;
        const float4 gate = round_bf16(sum_parts<GateUp>(p.gate_up_partial, row, column));
        const float4 up = round_bf16(sum_parts<GateUp>(p.gate_up_partial, row, cfg::INTER + column));
        const float4 silu{gate.x * output_gate::sigmoid(gate.x), gate.y * output_gate::sigmoid(gate.y),
                          gate.z * output_gate::sigmoid(gate.z), gate.w * output_gate::sigmoid(gate.w)};
        store_bf16x4(p.activated + static_cast<int64_t>(row) * cfg::INTER + column, times(silu, up));
    }
    arrive_math(p, protocol::Counter::ACTIVATED);
}

DEVICE void layer_weights(const Params& p) {
    const uint64_t policy = eviction_policy(Keep::first_out);
    Ring ring;
    mark(p, Point::START);
    load_product<ConvTaps>(p, ring, p.attention_projection, policy);
    load_product<Qkv>(p, ring, p.qkv, policy);
    load_product<Output>(p, ring, p.output, policy);
    load_product<ConvTaps>(p, ring, p.mlp_projection, policy);
    load_product<GateUp>(p, ring, p.gate_up, policy);
    load_product<Down>(p, ring, p.down, policy);
}

DEVICE void layer_tokens(const Params& p, uint32_t epoch) {
    using protocol::Counter;
    const uint64_t policy = eviction_policy(Keep::last_out);
    Ring ring;
    warm::small_weights(p);
    warm::context(p);
    if (p.is_first != 0) wait_rows(p, Counter::EMBEDDED, epoch);
    fence_generic_to_async();  // the previous launch's rows, too
    load_tokens<ConvTaps>(p, ring, p.input, policy);
    wait_rows(p, Counter::CONVOLVED, epoch);
    load_tokens<Qkv>(p, ring, p.convolved, policy);
    wait_rows(p, Counter::ATTENDED, epoch);
    load_tokens<Output>(p, ring, p.attended, policy);
    wait_rows(p, Counter::AFTER_ATTENTION, epoch);
    load_tokens<ConvTaps>(p, ring, p.mlp_input, policy);
    wait_rows(p, Counter::MLP_CONVOLVED, epoch);
    load_tokens<GateUp>(p, ring, p.convolved, policy);
    wait_rows(p, Counter::ACTIVATED, epoch);
    load_tokens<Down>(p, ring, p.activated, policy);
}

DEVICE void layer_math(const Params& p, uint32_t epoch) {
    using protocol::Counter;
    Ring ring;
    mark(p, Point::INPUTS_READY);
    convolution::for_owned_rows(
        p, Counter::EMBEDDED, [] {},
        [&](int row) {
            if (p.is_first != 0) convolution::embed_row(p, row);
        });
    run_product_to<ConvTaps>(p, ring, p.attention_taps, Counter::ATTENTION_TAPS);
    mark(p, Point::ATTENTION_TAPS);
    convolution::run_input_side(p, p.input, p.attention_taps, p.attention_base, Counter::ATTENTION_TAPS,
                                Counter::CONVOLVED, epoch);
    mark(p, Point::CONVOLVED);
    run_product_to<Qkv>(p, ring, p.qkv_partial, Counter::QKV);
    mark(p, Point::QKV);
    heads::run(p, epoch);
    mark(p, Point::HEADS_READY);
    attention::run(p, epoch);
    mark(p, Point::ATTENTION);
    attention::merge(p, epoch);
    mark(p, Point::ATTENDED);
    run_product_to<Output>(p, ring, p.output_partial, Counter::OUTPUT);
    mark(p, Point::OUTPUT);
    convolution::for_owned_rows(
        p, Counter::AFTER_ATTENTION, [&] { wait_counter_math(p, Counter::OUTPUT, epoch); },
        [&](int row) {
            convolution::residual_row<Output>(p, row, p.output_partial, p.attention_base, p.post_attention_norm,
                                              p.mlp_input);
        });
    mark(p, Point::AFTER_ATTENTION);
    run_product_to<ConvTaps>(p, ring, p.mlp_taps, Counter::MLP_TAPS);
    mark(p, Point::MLP_TAPS);
    convolution::run_input_side(p, p.mlp_input, p.mlp_taps, p.mlp_base, Counter::MLP_TAPS, Counter::MLP_CONVOLVED,
                                epoch);
    mark(p, Point::MLP_CONVOLVED);
    run_product_to<GateUp>(p, ring, p.gate_up_partial, Counter::GATE_UP);
    mark(p, Point::GATE_UP);
    activate(p, epoch);
    mark(p, Point::ACTIVATED);
    run_product_to<Down>(p, ring, p.down_partial, Counter::DOWN);
    mark(p, Point::DOWN);
    convolution::for_owned_rows(
        p, Counter::AFTER_MLP, [&] { wait_counter_math(p, Counter::DOWN, epoch); },
        [&](int row) { convolution::residual_row<Down>(p, row, p.down_partial, p.mlp_base, p.next_norm, p.input); });
    mark(p, Point::AFTER_MLP);
    launch::end_epoch(p, epoch);  // CTA 0 owns row 0, so it has seen every CTA's arrival at DOWN
}

DEVICE void layer(const Params& p) {
    start();
    const int warp = warp_index();
    if (warp == WEIGHT_LOADER) {
        layer_weights(p);
        return;
    }
    const uint32_t epoch = begin_epoch(p);
    if (warp == TOKEN_LOADER) {
        layer_tokens(p, epoch);
    } else {
        layer_math(p, epoch);
    }
}

}  // namespace draft
