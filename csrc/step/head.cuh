// The draft's head launch: scores of the block's rows after the anchor, which the block launch left as rows 0 ..,
// candidates, lattice and walk.
#pragma once
#include "draft/block.cuh"
#include "selector.cuh"
#include "tree.cuh"

namespace draft {

DEVICE void head(const Params& p) {
    using protocol::Counter;
    start();
    const int warp = warp_index();
    Ring ring;
    if (warp == WEIGHT_LOADER) {
        const uint64_t policy = eviction_policy(Keep::first_out);
        load_product<SelectorState>(p, ring, p.hidden_projection, policy);
        load_product<LmHead>(p, ring, p.lm_head, policy);
        return;
    }
    const uint32_t epoch = begin_epoch(p);
    if (warp == TOKEN_LOADER) {
        const uint64_t policy = eviction_policy(Keep::last_out);
        fence_generic_to_async();
        tokens::load_chunks<SelectorState>(p, ring, p.input, policy);
        tokens::load_chunks<LmHead>(p, ring, p.input, policy);
        return;
    }
    run_product_to<SelectorState>(p, ring, p.selector_partial, Counter::SELECTOR_STATE);
    selector::run_scores(p, ring);
    convolution::for_owned_rows(
        p, Counter::CHOSEN, [&] { wait_counter_math(p, Counter::SCORES, epoch); },
        [&](int slot) { selector::choose(p, epoch, slot); }, [](int) {});
    convolution::for_owned_rows(
        p, Counter::LATTICE,
        [&] {
            wait_counter_math(p, Counter::SELECTOR_STATE, epoch);
            wait_counter_math(p, Counter::CHOSEN, epoch);
        },
        [&](int slot) { selector::score_pairs(p, slot); }, [](int) {});
    if (cta_index() != 0) return;
    wait_counter_math(p, Counter::LATTICE, epoch);
    if (p.nodes > 0) {
        tree::plan(p);
    } else if (warp_index() == 0) {
        selector::walk(p);
        if (p.costs != nullptr) width::choose_chain(p);
    }
    launch::end_epoch(p, epoch);
}

}  // namespace draft
