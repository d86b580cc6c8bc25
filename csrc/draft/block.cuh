// All draft layers of one block as a program of the warp roles: the anchor's embedding to the final norm (B1-B11).
// A layer is an epoch: every counter gets its arrivals once per layer. Before a CTA arrives at a counter for a layer it
// has waited for some counter that all CTAs reach behind their arrivals of the layer before.
#pragma once
#include "attention.cuh"
#include "convolution.cuh"
#include "heads.cuh"
#include "product.cuh"
#include "residual.cuh"
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
    const int first = forget_on_blackwell(cta_index() * cfg::MATH_THREADS + thread_index());
    for (int i = first; i < cfg::ROW_CAP * QUADS; i += cfg::SMS * cfg::MATH_THREADS) {
        const int row = i / QUADS, column = i % QUADS * 4;
        if (row >= p.rows) {
            tokens::clear(p.activated, row, column);
            continue;
        }
        const float4 gate = round_bf16(sum_parts<GateUp>(p.gate_up_partial, row, column));
        const float4 up = round_bf16(sum_parts<GateUp>(p.gate_up_partial, row, cfg::INTER + column));
        const float4 silu{gate.x * output_gate::sigmoid(gate.x), gate.y * output_gate::sigmoid(gate.y),
                          gate.z * output_gate::sigmoid(gate.z), gate.w * output_gate::sigmoid(gate.w)};
        tokens::store(p.activated, row, column, times(silu, up));
    }
    arrive_math(p, protocol::Counter::ACTIVATED);
}

DEVICE void block_weights(const Params& p) {
    const uint64_t policy = eviction_policy(Keep::first_out);
    Ring ring;
#pragma unroll 1
    for (int layer = 0; layer < cfg::LAYERS; ++layer) {
        mark(p, Point::START, layer);
        load_product<ConvTaps>(p, ring, p.attention_projection[layer], policy);
        load_product<Qkv>(p, ring, p.qkv[layer], policy);
        if (layer == 0) {  // page table, length and context are the previous launches'
            wait_for_previous_launch();
            fence_generic_to_async();
        }
        attention::load_context(p, ring, p.key_cache[layer], 0u, policy);
        load_product<Output>(p, ring, p.output[layer], policy);
        load_product<ConvTaps>(p, ring, p.mlp_projection[layer], policy);
        load_product<GateUp>(p, ring, p.gate_up[layer], policy);
        load_product<Down>(p, ring, p.down[layer], policy);
    }
}

DEVICE void block_tokens(const Params& p, uint32_t first_epoch) {
    using protocol::Counter;
    const uint64_t policy = eviction_policy(Keep::last_out), context_policy = eviction_policy(Keep::first_out);
    Ring ring;
#pragma unroll 1
    for (int layer = 0; layer < cfg::LAYERS; ++layer) {
        const uint32_t epoch = first_epoch + static_cast<uint32_t>(layer);
        warm::small_weights(p, layer);
        if (layer == 0) {
            wait_rows(p, Counter::EMBEDDED, epoch + cfg::LAYERS - 1u);
        } else {
            wait_rows(p, Counter::AFTER_MLP, epoch - 1u);
        }
        tokens::load_chunks<ConvTaps>(p, ring, p.input, policy);
        wait_rows(p, Counter::CONVOLVED, epoch);
        tokens::load_chunks<Qkv>(p, ring, p.convolved, policy);
        attention::load_context(p, ring, p.value_cache[layer], attention::VALUES_AT, context_policy);
        wait_rows(p, Counter::ATTENDED, epoch);
        tokens::load_chunks<Output>(p, ring, p.attended, policy);
        wait_rows(p, Counter::AFTER_ATTENTION, epoch);
        tokens::load_chunks<ConvTaps>(p, ring, p.mlp_input, policy);
        wait_rows(p, Counter::MLP_CONVOLVED, epoch);
        tokens::load_chunks<GateUp>(p, ring, p.convolved, policy);
        wait_rows(p, Counter::ACTIVATED, epoch);
        tokens::load_chunks<Down>(p, ring, p.activated, policy);
    }
}

// Row 0 is the anchor, the others are the mask token. The counter gets a launch's arrivals of all layers at once.
DEVICE void embed(const Params& p, uint32_t epoch) {
    for (int row = 0; row < cfg::ROW_CAP; ++row) {
        if (!owns_row(row)) continue;
        if (row < p.rows) {
            if constexpr (cfg::RANKS > 1) {
                convolution::embed_row_over_ranks(p, epoch, row);
            } else {
                convolution::embed_row(p, epoch, row);
            }
        } else {
            convolution::clear_row(p.input, row);
        }
        math_barrier();
        if (thread_index() == 0) add_release(counter_address(p, protocol::Counter::EMBEDDED), cfg::LAYERS);
    }
}

DEVICE void attention_sublayer(const Params& p, Ring& ring, int layer, uint32_t epoch) {
    using protocol::Counter;
    run_product_to<ConvTaps>(p, ring, p.attention_taps, Counter::ATTENTION_TAPS);
    mark(p, Point::ATTENTION_TAPS, layer);
    convolution::run_input_side(p, p.input, p.attention_taps, p.attention_base[layer], Counter::ATTENTION_TAPS,
                                Counter::CONVOLVED, epoch);
    mark(p, Point::CONVOLVED, layer);
    run_product_to<Qkv>(p, ring, p.qkv_partial, Counter::QKV);
    mark(p, Point::QKV, layer);
    heads::run(p, layer, epoch);
    mark(p, Point::HEADS_READY, layer);
    attention::run(p, ring, epoch);
    mark(p, Point::ATTENTION, layer);
    attention::merge(p, epoch);
    mark(p, Point::ATTENDED, layer);
    residual::run_outputs<Output, mailbox::DraftOutput>(p, ring, p.output_partial, Counter::OUTPUT, epoch);
    mark(p, Point::OUTPUT, layer);
    residual::run<Output, mailbox::DraftOutput>(
        p,
        {p.output_partial, p.attention_base[layer], p.post_attention_norm[layer], p.mlp_input, 0, Counter::OUTPUT,
         Counter::ATTENTION_SQUARES, Counter::AFTER_ATTENTION},
        epoch);
    mark(p, Point::AFTER_ATTENTION, layer);
}

// The last layer's norm is the final one, and the head wants the rows behind the anchor.
DEVICE void mlp_sublayer(const Params& p, Ring& ring, int layer, uint32_t epoch) {
    using protocol::Counter;
    run_product_to<ConvTaps>(p, ring, p.mlp_taps, Counter::MLP_TAPS);
    mark(p, Point::MLP_TAPS, layer);
    convolution::run_input_side(p, p.mlp_input, p.mlp_taps, p.mlp_base[layer], Counter::MLP_TAPS,
                                Counter::MLP_CONVOLVED, epoch);
    mark(p, Point::MLP_CONVOLVED, layer);
    run_product_to<GateUp>(p, ring, p.gate_up_partial, Counter::GATE_UP);
    mark(p, Point::GATE_UP, layer);
    activate(p, epoch);
    mark(p, Point::ACTIVATED, layer);
    residual::run_outputs<Down, mailbox::DraftDown>(p, ring, p.down_partial, Counter::DOWN, epoch);
    mark(p, Point::DOWN, layer);
    residual::run<Down, mailbox::DraftDown>(
        p,
        {p.down_partial, p.mlp_base[layer], p.next_norm[layer], p.input, layer + 1 == cfg::LAYERS ? 1 : 0,
         Counter::DOWN, Counter::MLP_SQUARES, Counter::AFTER_MLP},
        epoch);
    mark(p, Point::AFTER_MLP, layer);
}

DEVICE void block_math(const Params& p, uint32_t first_epoch) {
    Ring ring;
    embed(p, first_epoch);
#pragma unroll 1
    for (int layer = 0; layer < cfg::LAYERS; ++layer) {
        const uint32_t epoch = first_epoch + static_cast<uint32_t>(layer);
        mark(p, Point::INPUTS_READY, layer);
        attention_sublayer(p, ring, layer, epoch);
        mlp_sublayer(p, ring, layer, epoch);
    }
    // CTA 0 has a stretch of the residual, so it has seen every CTA's arrival at MLP_SQUARES
    launch::end_epoch(p, first_epoch + cfg::LAYERS - 1u);
}

DEVICE void block(const Params& p) {
    start();
    const int warp = warp_index();
    if (warp == WEIGHT_LOADER) {
        block_weights(p);
        return;
    }
    const uint32_t epoch = begin_epoch(p);
    if (warp == TOKEN_LOADER) {
        block_tokens(p, epoch);
    } else {
        block_math(p, epoch);
    }
}

}  // namespace draft
