// The control to measure the layer kernel against: its phases as kernels of their own, one after the other in a graph,
// each with programmatic dependent launch. Same loaders, same products, same row operations; a kernel boundary takes the
// place of every wait for other CTAs (cfg::SEPARATE). A kernel without weights leaves room on its SM for a CTA of the
// next one, which loads weights meanwhile.
#pragma once
#include "kernel.cuh"

namespace separate {

using program::ROUTING_WARP, program::TOKEN_LOADER, program::WEIGHT_LOADER;

constexpr uint32_t NO_EPOCH = 0;  // nothing is counted

struct Nothing {
    DEVICE void operator()() const {}
};
constexpr Nothing nothing;

// `weights` starts before the previous kernel has ended.
template <class Weights, class Tokens, class Math, class Routing>
DEVICE void run(Weights weights, Tokens tokens, Math math, Routing routing) {
    program::start();
    const int warp = warp_index();
    if (warp == WEIGHT_LOADER) {
        weights();
        return;
    }
    wait_for_previous_launch();
    if (warp == TOKEN_LOADER) {
        fence_generic_to_async();
        tokens();
    } else if (warp == ROUTING_WARP) {
        routing();
    } else {
        math();
    }
}

template <class Math>
DEVICE void run(Math math) {
    run(nothing, nothing, math, nothing);
}

DEVICE uint64_t weight_policy() { return eviction_policy(Keep::first_out); }
DEVICE uint64_t token_policy() { return eviction_policy(Keep::last_out); }

// One dense product over bf16 rows.
template <class G>
DEVICE void product(const Params& p, const void* weights, const uint16_t* rows, float* partial,
                    protocol::Counter counter) {
    Ring ring;
    run([&] { load_weights<G>(p, ring, weights, weight_policy()); },
        [&] { load_tokens<G>(p, ring, rows, token_policy()); },
        [&] { run_dense_to<G>(p, ring, partial, counter); }, nothing);
}

// Router and pre_expert_proj read the same rows.
DEVICE void router_and_pre(const Params& p) {
    Ring ring;
    run(
        [&] {
            load_weights<Router>(p, ring, p.router, weight_policy());
            load_weights<PreProj>(p, ring, p.pre_expert_proj, weight_policy());
        },
        [&] {
            load_tokens<Router>(p, ring, p.router_input, token_policy());
            load_tokens<PreProj>(p, ring, p.router_input, token_policy());
        },
        [&] {
            run_dense_to<Router>(p, ring, p.router_partial, protocol::Counter::ROUTER);
            run_dense_to<PreProj>(p, ring, p.pre_partial, protocol::Counter::PRE_PROJ);
        },
        nothing);
}

DEVICE void gate_up(const Params& p) {
    using experts::GateUp;
    Ring ring;
    run(
        [&] {
            routing::wait_table(p);
            experts::load_weights<GateUp>(p, ring, p.gate_up, p.gate_up_block_scale, 0, weight_policy());
        },
        [&] {
            routing::wait_table(p);
            experts::load_tokens<GateUp>(p, ring, 0, NO_EPOCH, token_policy());
        },
        [&] {
            routing::wait_table(p);
            experts::run_gate_up(p, ring, NO_EPOCH);
        },
        [&] { routing::build_table(p, NO_EPOCH); });
}

DEVICE void down(const Params& p) {
    using experts::Down;
    Ring ring;
    const auto before = [] { return experts::tasks_before_down(routing::Table::active()); };
    run(
        [&] {
            routing::wait_table(p);
            experts::load_weights<Down>(p, ring, p.down, p.down_block_scale, before(), weight_policy());
        },
        [&] {
            routing::wait_table(p);
            experts::load_tokens<Down>(p, ring, before(), NO_EPOCH, token_policy());
        },
        [&] {
            routing::wait_table(p);
            experts::run_down(p, ring);
        },
        [&] { routing::build_table(p, NO_EPOCH); });
}

DEVICE void combined(const Params& p) {
    run(nothing, nothing,
        [&] {
            routing::wait_table(p);
            combine::run(p, NO_EPOCH);
        },
        [&] { routing::build_table(p, NO_EPOCH); });
}

DEVICE void after_attention(const Params& p) {
    run([&] {
        boundary::for_owned_rows(
            p, protocol::Counter::AFTER_ATTENTION, [] {},
            [&](int row, auto ready) { boundary::after_attention_row(p, NO_EPOCH, row, ready); });
    });
}

DEVICE void after_experts(const Params& p) {
    run([&] {
        boundary::for_owned_rows(
            p, protocol::Counter::AFTER_EXPERTS, [] {},
            [&](int row, auto ready) { boundary::after_experts_row(p, NO_EPOCH, row, ready); });
    });
}

}  // namespace separate
