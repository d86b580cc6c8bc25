// The three kernels of a step as programs of the warp roles. One CTA per SM, all resident; see docs/layer-kernel.md.
#pragma once
#include "combine.cuh"
#include "head.cuh"
#include "instr/pdl.cuh"
#include "load.cuh"
#include "output_gate.cuh"
#include "qkv.cuh"
#include "staged.cuh"

namespace program {

constexpr int WEIGHT_LOADER = cfg::MATH_WARPS, TOKEN_LOADER = WEIGHT_LOADER + 1, ROUTING_WARP = TOKEN_LOADER + 1;
static_assert(cfg::THREADS == (cfg::MATH_WARPS + 3) * WARP, "math warps, two loaders, one routing warp");

// Barriers exist and the ring is empty afterwards.
DEVICE void start() {
    if (thread_index() == 0) {
        mbarrier_init(cfg::ROUTING_BARRIER_AT, WARP_ARRIVALS);
        mbarrier_init(cfg::SUMS_PARKED_AT, cfg::MATH_WARPS * WARP_ARRIVALS);
        mbarrier_init(cfg::SUMS_TAKEN_AT, WARP_ARRIVALS);
        if constexpr (attention::STAGED) mbarrier_init(cfg::LENT_BACK_AT, cfg::MATH_WARPS * WARP_ARRIVALS);
        init_ring();
        allow_next_launch();
    }
    barrier_sync(0, cfg::THREADS);
}

// Everyone but the weight loader: how many launches of this kernel were completed before this one. One lane reads it,
// before any arrival of the CTA; it is changed by the one thread that has seen all CTAs arrive.
DEVICE void read_epoch(const Params& p) {
    if (warp_index() == TOKEN_LOADER && lane_index() == 0) shared_store(cfg::EPOCH_AT, load_acquire(p.epoch));
}
DEVICE uint32_t meet_epoch() {
    barrier_sync(2, cfg::THREADS - WARP);
    return shared_load<uint32_t>(cfg::EPOCH_AT);
}
// From here on, what the previous launch wrote may be read.
DEVICE uint32_t begin_epoch(const Params& p) {
    wait_for_previous_launch();
    read_epoch(p);
    return meet_epoch();
}

DEVICE void end_epoch(const Params& p, uint32_t epoch) {
    if (cta_index() == 0 && thread_index() == 0) store_release(p.epoch, epoch + 1u);
}

// ---- one decoder layer: q, k, v, gate of this layer to those of the next ----

DEVICE void layer_weights(const Params& p) {
    const uint64_t policy = eviction_policy(Keep::first_out);
    attention::LoaderRing ring(p);
    load_weights<OProj>(p, ring, p.o_proj, policy);
    mark(p, Point::O_PROJ);
    load_weights<Router>(p, ring, p.router, policy);
    load_weights<PreProj>(p, ring, p.pre_expert_proj, policy);
    mark(p, Point::PRE_PROJ);
    if (ring.lent) ring.take_back(p);
    experts::prepare_boxes(p);
    routing::wait_table(p);
    mark(p, Point::TABLE);
    experts::for_products([&](experts::Product product) {
        experts::load_weights(p, ring, product, policy);
        mark(p, product.gate_up ? Point::GATE_UP : Point::DOWN);
    });
    load_weights<PostProj>(p, ring, p.post_expert_proj, policy);
    mark(p, Point::POST_PROJ);
    if (p.has_next != 0) load_weights<QkvProj>(p, ring, p.next_qkv, policy);
    mark(p, Point::END);
}

DEVICE void layer_tokens(const Params& p, uint32_t epoch) {
    using protocol::Counter;
    const uint64_t policy = eviction_policy(Keep::last_out);
    Ring ring;
    wait_rows(p, Counter::GATED, epoch);
    mark(p, Point::GATED);
    load_tokens<OProj>(p, ring, p.gated, policy);
    wait_rows(p, Counter::AFTER_ATTENTION, epoch);
    mark(p, Point::AFTER_ATTENTION);
    load_tokens<Router>(p, ring, p.router_input, policy);
    load_tokens<PreProj>(p, ring, p.router_input, policy);
    routing::wait_table(p);
    mark(p, Point::TABLE);
    wait_rows(p, Counter::EXPERT_INPUT, epoch);
    mark(p, Point::ROUTED);
    experts::for_products(
        [&](experts::Product product) { experts::load_tokens(p, ring, product, epoch, policy); });
    wait_rows(p, Counter::COMBINED, epoch);
    mark(p, Point::COMBINED);
    load_tokens<PostProj>(p, ring, p.combined, policy);
    if (p.has_next == 0) return;
    wait_rows(p, Counter::AFTER_EXPERTS, epoch);
    mark(p, Point::AFTER_EXPERTS);
    load_tokens<QkvProj>(p, ring, p.next_input, policy);
    mark(p, Point::END);
}

DEVICE void layer_math(const Params& p) {
    using protocol::Counter;
    Ring ring;
    wait_for_previous_launch();
    const attention::Rows rows(p);  // after the wait: the accept rule of the step before writes the length
    mark(p, Point::INPUTS_READY);
    if constexpr (attention::STAGED) {
        attention::run_any(p, rows);
    } else {
        attention::run(p, rows);
    }
    const uint32_t epoch = meet_epoch();
    if (thread_index() == 0) add_release(counter_address(p, Counter::ATTENTION), 1u);
    mark(p, Point::ATTENTION);
    wait_counter_math(p, Counter::ATTENTION, epoch);
    output_gate::run(p, rows);
    arrive_math(p, Counter::GATED);
    mark(p, Point::GATED);
    run_o_proj(p, ring, epoch);
    mark(p, Point::O_PROJ);
    boundary::for_owned_rows(p, Counter::AFTER_ATTENTION, 0,
                             [&](int row) { boundary::after_attention_row(p, epoch, row); });
    mark(p, Point::AFTER_ATTENTION);
    run_product_to<Router>(p, ring, p.router_partial, Counter::ROUTER);
    mark(p, Point::ROUTER);
    run_product_to<PreProj>(p, ring, p.pre_partial, Counter::PRE_PROJ);
    mark(p, Point::PRE_PROJ);
    routing::run(p, epoch);
    mark(p, Point::ROUTED);
    routing::wait_table(p);
    mark(p, Point::TABLE);
    int tasks = 0;
    experts::for_products([&](experts::Product product) {
        tasks = experts::accumulate_tasks(p, ring, product, tasks);
        if (!product.gate_up) experts::wait_sums_taken(p, tasks);  // the reduction buffer serves others next
        mark(p, product.gate_up ? Point::GATE_UP : Point::DOWN);
    });
    combine::run(p, epoch);
    mark(p, Point::COMBINED);
    run_product_to<PostProj>(p, ring, p.post_partial, Counter::POST_PROJ);
    mark(p, Point::POST_PROJ);
    boundary::for_owned_rows(p, Counter::AFTER_EXPERTS, 0,
                             [&](int row) { boundary::after_experts_row(p, epoch, row); });
    mark(p, Point::AFTER_EXPERTS);
    if (p.has_next != 0) {
        run_product_to<QkvProj>(p, ring, p.qkv_partial, Counter::QKV_PROJ);
    } else {
        arrive_math(p, Counter::QKV_PROJ);
    }
    mark(p, Point::QKV_PROJ);
    qkv::run(p, epoch);
    mark(p, Point::END);
    end_epoch(p, epoch);
}

DEVICE void layer(const Params& p) {
    start();
    mark(p, Point::START);
    const int warp = uniform_warp_index();
    if (warp == WEIGHT_LOADER) {
        layer_weights(p);
        return;
    }
    if (warp == TOKEN_LOADER) {
        layer_tokens(p, begin_epoch(p));
        return;
    }
    if (warp == ROUTING_WARP) {
        boundary::prefetch_layer_vectors(p);
        const uint32_t epoch = begin_epoch(p);
        mark(p, Point::INPUTS_READY);
        routing::route_rows(p, epoch);
        mark(p, Point::ROUTED);
        routing::build_table(p, epoch);
        mark(p, Point::TABLE);
        experts::finish(p, epoch);
        boundary::prefetch_late_vectors(p);
        mark(p, Point::END);
        if (p.has_next == 0) return;
        wait_counter_warp(p, protocol::Counter::AFTER_EXPERTS, epoch);
        attention::prefetch_next(p);
        return;
    }
    layer_math(p);
}

// ---- before layer 0: embedding, norm, q, k, v, gate ----

DEVICE void embed(const Params& p) {
    using protocol::Counter;
    start();
    const int warp = warp_index();
    Ring ring;
    if (warp == WEIGHT_LOADER) {
        load_weights<QkvProj>(p, ring, p.next_qkv, eviction_policy(Keep::first_out));
        return;
    }
    const uint32_t epoch = begin_epoch(p);
    if (warp == ROUTING_WARP) {
        attention::prefetch_next(p);
    } else if (warp == TOKEN_LOADER) {
        wait_rows(p, Counter::AFTER_EXPERTS, epoch);
        load_tokens<QkvProj>(p, ring, p.next_input, eviction_policy(Keep::last_out));
    } else {
        boundary::for_owned_rows(p, Counter::AFTER_EXPERTS, 0, [&](int row) { boundary::embed_row(p, epoch, row); });
        run_product_to<QkvProj>(p, ring, p.qkv_partial, Counter::QKV_PROJ);
        qkv::run(p, epoch);
        end_epoch(p, epoch);
    }
}

// ---- after the last layer: final norm, head, greedy tokens ----

DEVICE void lm_head(const Params& p) {
    using protocol::Counter;
    start();
    const int warp = warp_index();
    Ring ring;
    if (warp == WEIGHT_LOADER) {
        load_weights<LmHead>(p, ring, p.lm_head, eviction_policy(Keep::first_out));
        return;
    }
    const uint32_t epoch = begin_epoch(p);
    if (warp == TOKEN_LOADER) {
        wait_rows(p, Counter::AFTER_EXPERTS, epoch);
        load_tokens<LmHead>(p, ring, p.next_input, eviction_policy(Keep::last_out));
    } else if (warp < cfg::MATH_WARPS) {
        boundary::for_owned_rows(p, Counter::AFTER_EXPERTS, 0, [&](int row) { boundary::final_norm_row(p, row); });
        head::run_logits(p, ring);
        wait_counter_math(p, Counter::LOGITS, epoch);
        for (int row = 0; row < p.rows; ++row) {
            if (owns_row(row)) head::greedy_row(p, epoch, row);
        }
        end_epoch(p, epoch);
    }
}

}  // namespace program
