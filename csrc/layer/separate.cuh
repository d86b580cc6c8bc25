// The control to measure the layer kernel against: its phases as kernels of their own, one after the other in a graph,
// each with programmatic dependent launch. Same loaders, same products, same row operations; a kernel boundary takes the
// place of every wait for other CTAs (cfg::SEPARATE). A kernel without weights leaves room on its SM for a CTA of the
// next one, which loads weights meanwhile.
#pragma once
#include "kernel.cuh"

namespace separate {

using program::ROUTING_WARP, program::TOKEN_LOADER, program::WEIGHT_LOADER;

// Nothing is counted, but packets between ranks are told apart by the epoch, which the first phase of a layer advances.
DEVICE uint32_t begin(const Params& p) {
    if constexpr (cfg::RANKS > 1) return program::begin_epoch(p);
    wait_for_previous_launch();
    return 0;
}

struct Nothing {
    DEVICE void operator()(uint32_t) const {}
    DEVICE void operator()() const {}
};
constexpr Nothing nothing;

// weights() starts before the previous kernel has ended; the others get the epoch.
template <class Weights, class Tokens, class Math, class Routing>
DEVICE void run(const Params& p, Weights weights, Tokens tokens, Math math, Routing routing) {
    program::start();
    const int warp = warp_index();
    if (warp == WEIGHT_LOADER) {
        weights();
        return;
    }
    const uint32_t epoch = begin(p);
    if (warp == TOKEN_LOADER) {
        fence_generic_to_async();
        tokens(epoch);
    } else if (warp == ROUTING_WARP) {
        routing(epoch);
    } else {
        math(epoch);
    }
}

template <class Math>
DEVICE void run(const Params& p, Math math) {
    run(p, nothing, nothing, math, nothing);
}

DEVICE uint64_t weight_policy() { return eviction_policy(Keep::first_out); }
DEVICE uint64_t token_policy() { return eviction_policy(Keep::last_out); }

DEVICE void attention_splits(const Params& p) {
    run(p, nothing, nothing,
        [&](uint32_t epoch) {
            attention::run(p, attention::Rows(p));
            if constexpr (cfg::RANKS > 1) program::end_epoch(p, epoch);  // no other phase runs now
        },
        [&](uint32_t) { boundary::prefetch_layer_vectors(p); });
}

// `product(ring, epoch)` on the math warps; one matrix over bf16 rows.
template <class G, class Product>
DEVICE void dense(const Params& p, const void* weights, const uint16_t* rows, Product product) {
    Ring ring;
    run(p, [&] { load_weights<G>(p, ring, weights, weight_policy()); },
        [&](uint32_t) { load_tokens<G>(p, ring, rows, token_policy()); },
        [&](uint32_t epoch) { product(ring, epoch); }, nothing);
}

DEVICE void o_proj(const Params& p) {
    dense<OProj>(p, p.o_proj, p.gated, [&](Ring& ring, uint32_t epoch) { run_o_proj(p, ring, epoch); });
}
DEVICE void post_proj(const Params& p) {
    dense<PostProj>(p, p.post_expert_proj, p.combined, [&](Ring& ring, uint32_t) {
        run_product_to<PostProj>(p, ring, p.post_partial, protocol::Counter::POST_PROJ);
    });
}
DEVICE void qkv_proj(const Params& p) {
    dense<QkvProj>(p, p.next_qkv, p.next_input, [&](Ring& ring, uint32_t) {
        run_product_to<QkvProj>(p, ring, p.qkv_partial, protocol::Counter::QKV_PROJ);
    });
}

// Router and pre_expert_proj read the same rows.
DEVICE void router_and_pre(const Params& p) {
    Ring ring;
    run(
        p,
        [&] {
            load_weights<Router>(p, ring, p.router, weight_policy());
            load_weights<PreProj>(p, ring, p.pre_expert_proj, weight_policy());
        },
        [&](uint32_t) {
            load_tokens<Router>(p, ring, p.router_input, token_policy());
            load_tokens<PreProj>(p, ring, p.router_input, token_policy());
        },
        [&](uint32_t) {
            run_product_to<Router>(p, ring, p.router_partial, protocol::Counter::ROUTER);
            run_product_to<PreProj>(p, ring, p.pre_partial, protocol::Counter::PRE_PROJ);
        },
        nothing);
}

DEVICE void routed(const Params& p) {
    run(p, nothing, nothing, [&](uint32_t epoch) { routing::run(p, epoch); },
        [&](uint32_t epoch) { routing::route_rows(p, epoch); });
}

// The tasks of one product on the experts.
DEVICE void expert_product(const Params& p, experts::Product product) {
    Ring ring;
    run(
        p,
        [&] {
            experts::prepare_boxes(p);
            routing::wait_table(p);
            experts::load_weights(p, ring, product, weight_policy());
        },
        [&](uint32_t epoch) {
            routing::wait_table(p);
            experts::load_tokens(p, ring, product, epoch, token_policy());
        },
        [&](uint32_t) {
            routing::wait_table(p);
            experts::accumulate_tasks(p, ring, product, 0);
        },
        [&](uint32_t epoch) {
            routing::build_table(p, epoch);
            experts::finish_tasks(p, product, epoch, 0);
        });
}

DEVICE void combined(const Params& p) {
    run(
        p, nothing, nothing,
        [&](uint32_t epoch) {
            routing::wait_table(p);
            combine::run(p, epoch);
        },
        [&](uint32_t epoch) {
            routing::build_table(p, epoch);
            boundary::prefetch_late_vectors(p);
        });
}

DEVICE void after_attention(const Params& p) {
    run(p, [&](uint32_t epoch) {
        boundary::for_owned_rows(p, protocol::Counter::AFTER_ATTENTION, 0,
                                 [&](int row) { boundary::after_attention_row(p, epoch, row); });
    });
}

DEVICE void after_experts(const Params& p) {
    run(p, [&](uint32_t epoch) {
        boundary::for_owned_rows(p, protocol::Counter::AFTER_EXPERTS, 0,
                                 [&](int row) { boundary::after_experts_row(p, epoch, row); });
    });
}

}  // namespace separate
