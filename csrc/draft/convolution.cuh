// The two-tap convolution over the rows of one block, and the rows that a block begins with (B1-B3).
// conv(x)_t = (base_0 + D_0) x_t + (base_1 + D_1) x_{t-1} per channel, fp32 with one rounding; the row before the
// block's first is zero. D comes from the sublayer's input and is bf16.
#pragma once
#include "layer/row_mail.cuh"
#include "points.cuh"
#include "products.cuh"
#include "tokens.cuh"

namespace convolution {

enum Side { INPUT = 0, OUTPUT = 1 };

// D of one tap for the group of `column`, summed in worker order.
DEVICE float dynamic_tap(const float* partial, int row, Side side, int tap, int column) {
    const int output = (side * 2 + tap) * GROUPS + column / cfg::CONV_GROUP;
    const int block = output / BLOCK_ROWS, parts = Geometry<ConvTaps>::parts(block);
    const float* at = partial + ((block * ConvTaps::PARTS) * cfg::ROW_CAP + row) * BLOCK_ROWS + output % BLOCK_ROWS;
    float sum = global_load(at);
#pragma unroll
    for (int part = 1; part < ConvTaps::PARTS; ++part) {
        if (part < parts) sum += global_load(at + part * cfg::ROW_CAP * BLOCK_ROWS);
    }
    return round_bf16(sum);
}

// (base_0 + d_0) x + (base_1 + d_1) previous; base: bf16 [side, tap, HIDDEN].
DEVICE float4 convolve(const uint16_t* base, Side side, int column, float d0, float d1, const float4& x,
                       const float4& previous) {
    const float4 b0 = load_bf16x4(base + side * 2 * cfg::HIDDEN + column);
    const float4 b1 = load_bf16x4(base + (side * 2 + 1) * cfg::HIDDEN + column);
    const float4 a = times(float4{b0.x + d0, b0.y + d0, b0.z + d0, b0.w + d0}, x);
    const float4 b = times(float4{b1.x + d1, b1.y + d1, b1.z + d1, b1.w + d1}, previous);
    return round_bf16(float4{a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w});
}

// Output side's D of one row, f32 [tap, group]: summed once, beside the input side, for the row operation that waits.
DEVICE float* output_tap(const Params& p, int row, int tap, int column) {
    return p.output_taps + (row * 2 + tap) * GROUPS + column / cfg::CONV_GROUP;
}

// B3: all CTAs share the rows' columns.
DEVICE void run_input_side(const Params& p, uint16_t* x, const float* partial, const uint16_t* base,
                           protocol::Counter taps, protocol::Counter done, uint32_t epoch) {
    wait_counter_math(p, taps, epoch);
    constexpr int QUADS = cfg::HIDDEN / 4;
    const int first = forget_on_blackwell(cta_index() * cfg::MATH_THREADS + thread_index());
    for (int i = first; i < cfg::ROW_CAP * QUADS; i += cfg::SMS * cfg::MATH_THREADS) {
        const int row = i / QUADS, column = i % QUADS * 4;
        if (row >= p.rows) {
            tokens::clear(p.convolved, row, column);
            continue;
        }
        const float4 previous = row > 0 ? tokens::load(x, row - 1, column) : float4{0.f, 0.f, 0.f, 0.f};
        const float d0 = dynamic_tap(partial, row, INPUT, 0, column), d1 = dynamic_tap(partial, row, INPUT, 1, column);
        tokens::store(p.convolved, row, column,
                      convolve(base, INPUT, column, d0, d1, tokens::load(x, row, column), previous));
        if (column % cfg::CONV_GROUP == 0) {
            global_store(output_tap(p, row, 0, column), dynamic_tap(partial, row, OUTPUT, 0, column));
            global_store(output_tap(p, row, 1, column), dynamic_tap(partial, row, OUTPUT, 1, column));
        }
    }
    arrive_math(p, done);
}

// body(group, column, four columns of the embedding of row `row`). Of several ranks one holds the anchor's.
template <class Body>
DEVICE void embedding(const Params& p, uint32_t epoch, int row, Body body) {
    const int64_t id = row == 0 ? global_load(p.token_ids) : cfg::MASK_TOKEN;
    if constexpr (cfg::RANKS > 1) {
        if (id != cfg::MASK_TOKEN) {
            const int owner = static_cast<int>(id) / cfg::VOCAB;
            if (owner == p.rank) {
                const uint16_t* source = p.embedding + (id - owner * cfg::VOCAB) * cfg::HIDDEN;
                row_mail::send<mailbox::Anchor>(p, epoch, row,
                                                [&](int, int column) { return load_bf16x4(source + column); });
            }
            row_mail::collect<mailbox::Anchor, 1>(p, epoch, row, owner, body);
            return;
        }
    }
    const uint16_t* source = id == cfg::MASK_TOKEN ? p.mask_embedding : p.embedding + id * cfg::HIDDEN;
    for_columns<cfg::HIDDEN>([&](int i, int column) { body(i, column, load_bf16x4(source + column)); });
}

// h0 and B1 of the first layer. Row 0 is the anchor, the others are the mask token.
DEVICE void embed_row(const Params& p, uint32_t epoch, int row) {
    using Columns = RowColumns<cfg::HIDDEN>;
    float4 h[Columns::GROUPS] = {};
    float squares = 0.f;
    embedding(p, epoch, row, [&](int i, int, const float4& columns) {
        h[i] = columns;
        squares += square_sum(columns);
    });
    const float embedded = row_sum(squares, 0);
    const float factor = cfg::NORMED_EMBEDDING
                             ? reciprocal_root(embedded / cfg::HIDDEN + cfg::TARGET_EPS) * cfg::EMBEDDING_SCALE
                             : cfg::EMBEDDING_SCALE;
    squares = 0.f;
    for_columns<cfg::HIDDEN>([&](int i, int column) {
        h[i] = round_bf16(times(h[i], factor));
        store_bf16x4(p.residual + row * cfg::HIDDEN + column, h[i]);
        squares += square_sum(h[i]);
    });
    const float scale = reciprocal_root(row_sum(squares, 1) / cfg::HIDDEN + cfg::RMS_EPS);
    for_columns<cfg::HIDDEN>([&](int i, int column) {
        tokens::store(p.input, row, column, times(times(h[i], scale), load_bf16x4(p.input_norm + column)));
    });
}

// The same as a function of its own: with several ranks its packets in flight would cost the caller registers.
DEVICE_CALL void embed_row_over_ranks(const Params& p, uint32_t epoch, int row) { embed_row(p, epoch, row); }

// The rows this CTA owns. Every row of the capacity arrives, so that the counter's growth does not depend on the rows.
// row_operation(row) for the launch's rows, beyond(row) for the others.
template <class Ready, class RowOperation, class Beyond>
DEVICE void for_owned_rows(const Params& p, protocol::Counter counter, Ready ready, RowOperation row_operation,
                           Beyond beyond) {
    bool waited = false;
#pragma unroll 1
    for (int row = first_owned_row(); row < cfg::ROW_CAP; row += cfg::SMS) {
        if (!waited) ready();
        waited = true;
        if (row < p.rows) {
            row_operation(row);
        } else {
            beyond(row);
        }
        arrive_math(p, counter);
    }
}

// All math warps: a row of `rows` that the launch does not have.
DEVICE void clear_row(uint16_t* rows, int row) {
    for_columns<cfg::HIDDEN>([&](int, int column) { tokens::clear(rows, row, column); });
}

}  // namespace convolution
