// Section 7.1: the committed rows' taps to K and V of every draft layer, written to the draft's cache.
// All rows of the verify step are computed, the committed ones are written: their number is in device memory.
#pragma once
#include "block.cuh"

namespace draft {

constexpr int64_t CONTEXT_PARTIAL = PARTIAL_ELEMENTS<ContextKv>;  // of one layer

// body(group, column, four columns of the product, bf16); each rank has its own.
template <class Body>
DEVICE void fused_row(const Params& p, uint32_t epoch, int row, Body body) {
    const auto own = [&](int, int column) { return round_bf16(sum_parts<Fusion>(p.fusion_partial, row, column)); };
    if constexpr (cfg::RANKS > 1) {
        row_mail::gather<mailbox::FusionRow>(p, epoch, row, body, own);
    } else {
        for_columns<cfg::HIDDEN>([&](int i, int column) { body(i, column, own(i, column)); });
    }
}

DEVICE void context_row(const Params& p, uint32_t epoch, int row) {
    using Columns = RowColumns<cfg::HIDDEN>;
    float4 c[Columns::GROUPS] = {};
    float squares = 0.f;
    fused_row(p, epoch, row, [&](int i, int, const float4& columns) {
        c[i] = columns;
        squares += square_sum(columns);
    });
    const float scale = reciprocal_root(row_sum(squares, 0) / cfg::HIDDEN + cfg::RMS_EPS);
    for_columns<cfg::HIDDEN>([&](int i, int column) {
        tokens::store(p.context, row, column, times(times(c[i], scale), load_bf16x4(p.hidden_norm + column)));
    });
}

// K and V of the r-th committed row go to the slot of position start + r. Of a tree, p.path says which row that is.
DEVICE void store_context(const Params& p, uint32_t epoch) {
    constexpr int UNITS = cfg::LAYERS * 2 * cfg::KV_HEADS;
    wait_counter_math(p, protocol::Counter::CONTEXT_KV, epoch);
    const int64_t start = global_load(p.state + protocol::CONTEXT_START);
    const int committed = static_cast<int>(global_load(p.state + protocol::COMMITTED));
    for (int unit = cta_index() + cfg::SMS * warp_index(); unit < committed * UNITS;
         unit += cfg::SMS * cfg::MATH_WARPS) {
        const int row = unit / UNITS, layer = unit % UNITS / (2 * cfg::KV_HEADS), head = unit % (2 * cfg::KV_HEADS);
        const bool is_key = head < cfg::KV_HEADS;
        const int64_t slot = global_load(p.page_table + start + row);
        const int source = p.nodes > 0 ? global_load(p.path + row) : row;
        heads::Values x = heads::load<ContextKv>(p.context_partial + layer * CONTEXT_PARTIAL, source, head);
        if (is_key) {
            x = heads::norm_and_rotate(x, p.key_norm[layer], p.rope + (start + row) * cfg::HEAD_DIM);
        }
        uint16_t* cache = is_key ? p.key_cache[layer] : p.value_cache[layer];
        heads::store(cache + (slot * cfg::KV_HEADS + head % cfg::KV_HEADS) * cfg::HEAD_DIM, x);
    }
}

DEVICE void context(const Params& p) {
    using protocol::Counter;
    start();
    const int warp = warp_index();
    Ring ring;
    if (warp == WEIGHT_LOADER) {
        const uint64_t policy = eviction_policy(Keep::first_out);
        load_product<Fusion>(p, ring, p.fusion, policy);
        for (int layer = 0; layer < cfg::LAYERS; ++layer) load_product<ContextKv>(p, ring, p.context_kv[layer], policy);
        return;
    }
    const uint32_t epoch = begin_epoch(p);
    if (warp == TOKEN_LOADER) {
        const uint64_t policy = eviction_policy(Keep::last_out);
        fence_generic_to_async();
        load_tokens<Fusion>(p, ring, p.taps, policy);
        wait_rows(p, Counter::CONTEXT, epoch);
        for (int layer = 0; layer < cfg::LAYERS; ++layer) tokens::load_chunks<ContextKv>(p, ring, p.context, policy);
        return;
    }
    run_product_to<Fusion>(p, ring, p.fusion_partial, Counter::FUSION);
    convolution::for_owned_rows(
        p, Counter::CONTEXT, [&] { wait_counter_math(p, Counter::FUSION, epoch); },
        [&](int row) { context_row(p, epoch, row); }, [&](int row) { convolution::clear_row(p.context, row); });
    for (int layer = 0; layer < cfg::LAYERS; ++layer) {
        run_parts<ContextKv>(p, ring, p.context_partial + layer * CONTEXT_PARTIAL);
    }
    arrive_math(p, Counter::CONTEXT_KV);
    store_context(p, epoch);
    launch::end_epoch(p, epoch);
}

}  // namespace draft
