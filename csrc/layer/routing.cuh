// F3-F5 and F7: which experts a row goes to, and the row the experts read; then the table of active experts that every
// CTA builds for itself.
#pragma once
#include "boundary.cuh"

namespace routing {

// Position of input k of an expert row in memory. Two k16 steps of NVFP4 weights in Marlin order need, per lane t, the
// inputs {2t, 2t+1, 2t+8, 2t+9} of both steps: they are stored side by side, as one 16-byte access. BF16 experts
// read rows in their natural order.
DEVICE int expert_position(int k) {
    if constexpr (cfg::NVFP4) {
        const int in16 = k % 16;
        return k / 32 * 32 + (in16 % 8) / 2 * 8 + (k / 16 % 2) * 4 + in16 / 8 * 2 + k % 2;
    } else {
        return k;
    }
}

// F7: x = bf(N1(h)), stored in the experts' order.
DEVICE void expert_input_row(const Params& p, uint32_t epoch, int row) {
    using Columns = RowColumns<cfg::MOE_HIDDEN>;
    const GammaColumns<cfg::MOE_HIDDEN> gamma(p.pre_expert_norm);
    wait_counter_math(p, protocol::Counter::PRE_PROJ, epoch);
    float4 h[Columns::GROUPS] = {};
    float squares = 0.f;
    Exchange::expert_row(p, epoch, row, [&](int i, int, const float4& columns) {
        h[i] = columns;
        squares += square_sum(columns);
    });
    const float scale = reciprocal_root(row_sum(squares, 0) / cfg::MOE_HIDDEN + cfg::RMS_EPS);
    uint16_t* out = p.expert_input + row * cfg::MOE_HIDDEN;
    for_columns<cfg::MOE_HIDDEN>([&](int i, int column) {
        const float4 x = times(times(h[i], scale), gamma.centred(i));
        global_store(reinterpret_cast<uint32_t*>(out + expert_position(column)), pack_bf16x2(x.x, x.y));
        global_store(reinterpret_cast<uint32_t*>(out + expert_position(column + 2)), pack_bf16x2(x.z, x.w));
    });
}

// Four experts of a lane: logits from the router's parts, then scores and selection scores.
constexpr int QUADS = (cfg::EXPERTS / 4 + WARP - 1) / WARP;

DEVICE bool has_quad(int quad) { return quad * WARP + lane_index() < cfg::EXPERTS / 4; }
DEVICE int first_of_quad(int quad) { return (quad * WARP + lane_index()) * 4; }

// Integers in the order of the floats; TAKEN comes before all of them.
constexpr int TAKEN = static_cast<int>(0x80000000u);
DEVICE int order_of(float value) {
    const int bits = static_cast<int>(float_bits(value));
    return bits ^ ((bits >> 31) & 0x7fffffff);
}

// Sums of the router's parts in worker order, a third of them in a turn: straight code for all is fetched slower than
// the loads come.
DEVICE void sum_quads(const Params& p, int row, float4 (&sum)[QUADS]) {
    constexpr int TURNS = (Router::PARTS + 10) / 11, BATCH = (Router::PARTS + TURNS - 1) / TURNS;
    const float* at[QUADS];
    int parts[QUADS];
#pragma unroll
    for (int quad = 0; quad < QUADS; ++quad) {
        sum[quad] = float4{-0.f, -0.f, -0.f, -0.f};  // the first part keeps its sign
        const int column = first_of_quad(quad), block = column / BLOCK_ROWS;
        parts[quad] = has_quad(quad) ? Geometry<Router>::parts(block) : 0;
        at[quad] = p.router_partial + ((block * Router::PARTS) * cfg::ROW_CAP + row) * BLOCK_ROWS + column % BLOCK_ROWS;
    }
#pragma unroll 1
    for (int first = 0; first < Router::PARTS; first += BATCH) {
        float4 part[BATCH][QUADS];
#pragma unroll
        for (int i = 0; i < BATCH; ++i) {
#pragma unroll
            for (int quad = 0; quad < QUADS; ++quad) {
                part[i][quad] = float4{-0.f, -0.f, -0.f, -0.f};  // adds nothing, whatever the sum is
                if (first + i < parts[quad]) part[i][quad] = load_f32x4(at[quad] + i * cfg::ROW_CAP * BLOCK_ROWS);
            }
        }
#pragma unroll
        for (int quad = 0; quad < QUADS; ++quad) {
#pragma unroll
            for (int i = 0; i < BATCH; ++i) sum[quad] = plus(sum[quad], part[i][quad]);
            at[quad] += BATCH * cfg::ROW_CAP * BLOCK_ROWS;
        }
    }
}

// F3-F5 for one row, by one warp: TOP_K times the best that is left; ties go to the lower id.
DEVICE void route_row(const Params& p, int row) {
    const uint32_t score_at = cfg::ROUTE_AT, chosen_at = score_at + cfg::EXPERTS * 4;
    int selection[QUADS][4];  // in order_of's numbers
    float4 sums[QUADS], bias[QUADS];
#pragma unroll
    for (int quad = 0; quad < QUADS; ++quad) {
        if (has_quad(quad)) bias[quad] = load_f32x4(p.router_bias + first_of_quad(quad));
    }
    sum_quads(p, row, sums);
#pragma unroll
    for (int quad = 0; quad < QUADS; ++quad) {
#pragma unroll
        for (int i = 0; i < 4; ++i) selection[quad][i] = TAKEN;
        if (!has_quad(quad)) continue;
        const int first = first_of_quad(quad);
        const float4 sum = sums[quad];
        global_store(reinterpret_cast<float4*>(p.router_logits + row * cfg::EXPERTS + first), sum);
        const float4 b = bias[quad];
        const float logit[4] = {sum.x, sum.y, sum.z, sum.w}, shift[4] = {b.x, b.y, b.z, b.w};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float score = output_gate::sigmoid(logit[i] * cfg::OUTPUT_MULTIPLIER);
            shared_store(score_at + (first + i) * 4, score);
            selection[quad][i] = order_of(score + shift[i]);
        }
    }
    warp_sync();
    float sum = 0.f;
#pragma unroll 1
    for (int slot = 0; slot < cfg::TOP_K; ++slot) {
        int best = TAKEN;
#pragma unroll
        for (int quad = 0; quad < QUADS; ++quad) {
#pragma unroll
            for (int i = 0; i < 4; ++i) best = selection[quad][i] > best ? selection[quad][i] : best;
        }
        best = warp_maximum(best);
        int id = cfg::EXPERTS;
#pragma unroll
        for (int quad = QUADS - 1; quad >= 0; --quad) {
#pragma unroll
            for (int i = 3; i >= 0; --i) {
                if (selection[quad][i] == best && has_quad(quad)) id = first_of_quad(quad) + i;
            }
        }
        id = warp_minimum(id);  // a tie keeps the lower one
#pragma unroll
        for (int quad = 0; quad < QUADS; ++quad) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                if (first_of_quad(quad) + i == id) selection[quad][i] = TAKEN;
            }
        }
        const float score = shared_load<float>(score_at + id * 4);
        sum += score;
        if (lane_index() == 0) {
            global_store(p.route_ids + row * cfg::TOP_K + slot, id);
            shared_store(chosen_at + slot * 4, score);
        }
    }
    warp_sync();
    const float scale = cfg::ROUTED_SCALING / (sum + 1e-15f);
    for (int slot = lane_index(); slot < cfg::TOP_K; slot += WARP) {
        global_store(p.route_weights + row * cfg::TOP_K + slot, shared_load<float>(chosen_at + slot * 4) * scale);
    }
    warp_sync();
}

// A row that nobody wants to know the result of: experts of no rank, so that it costs no expert's bytes.
DEVICE void route_nowhere(const Params& p, int row) {
    for (int slot = lane_index(); slot < cfg::TOP_K; slot += WARP) {
        global_store(p.route_ids + row * cfg::TOP_K + slot, -1);
        global_store(p.route_weights + row * cfg::TOP_K + slot, 0.f);
    }
}

// Routing warp: the rows this CTA routes, while the math warps work on pre_expert_proj. Other CTAs than those that own
// the rows, where there are enough. Rows from `live` on exist, but go to no experts.
DEVICE void route_rows(const Params& p, uint32_t epoch) {
    const int live = global_load(p.live);
    bool waited = false;
#pragma unroll 1
    for (int row = first_owned_row(cfg::ROW_CAP); row < cfg::ROW_CAP; row += cfg::SMS) {
        if (row < p.rows && row < live) {
            if (!waited) wait_counter_warp(p, protocol::Counter::ROUTER, epoch);
            waited = true;
            route_row(p, row);
        } else if (row < p.rows) {
            route_nowhere(p, row);
        }
        warp_sync();
        if (!cfg::SEPARATE && lane_index() == 0) add_release(counter_address(p, protocol::Counter::ROUTED), 1u);
    }
}

// Math warps: F7 of the rows this CTA owns.
DEVICE void run(const Params& p, uint32_t epoch) {
    boundary::for_owned_rows(p, protocol::Counter::EXPERT_INPUT, 2, [&](int row) { expert_input_row(p, epoch, row); });
}

// The table of a step, in shared memory: active local experts in ascending order, each with the set of its rows.
// A (row, expert) pair has one line of the activations: first_line(j) + place of the row among the expert's rows.
struct Table {
    static constexpr uint32_t ROWS_OF = cfg::TABLES_AT;                      // [LOCAL_EXPERTS] row sets
    static constexpr uint32_t INDEX_OF = ROWS_OF + cfg::LOCAL_EXPERTS * 4;   // [LOCAL_EXPERTS] place in the list
    static constexpr uint32_t EXPERT = INDEX_OF + cfg::LOCAL_EXPERTS * 4;    // [active] local expert
    static constexpr uint32_t FIRST_LINE = EXPERT + cfg::LOCAL_EXPERTS * 4;  // [active]
    static constexpr uint32_t ACTIVE = FIRST_LINE + cfg::LOCAL_EXPERTS * 4;  // one word

    DEVICE static int active() { return static_cast<int>(shared_load<uint32_t>(ACTIVE)); }
    DEVICE static int expert(int index) { return static_cast<int>(shared_load<uint32_t>(EXPERT + index * 4)); }
    DEVICE static int first_line(int index) { return static_cast<int>(shared_load<uint32_t>(FIRST_LINE + index * 4)); }
    DEVICE static uint32_t rows_of(int expert) { return shared_load<uint32_t>(ROWS_OF + expert * 4); }
    // Line of (row, local expert); the expert must be active for the row.
    DEVICE static int line(int row, int expert) {
        const int index = static_cast<int>(shared_load<uint32_t>(INDEX_OF + expert * 4));
        return first_line(index) + population_count(rows_of(expert) & ((1u << row) - 1u));
    }
};

// Routing warp: builds the table and publishes it to the CTA.
DEVICE void build_table(const Params& p, uint32_t epoch) {
    const int lane = lane_index();
    for (int expert = lane; expert < cfg::LOCAL_EXPERTS; expert += WARP) shared_store(Table::ROWS_OF + expert * 4, 0u);
    wait_counter_warp(p, protocol::Counter::ROUTED, epoch);
    for (int i = lane; i < p.rows * cfg::TOP_K; i += WARP) {
        const int expert = global_load(p.route_ids + i) - p.first_expert;
        if (expert >= 0 && expert < cfg::LOCAL_EXPERTS) shared_or(Table::ROWS_OF + expert * 4, 1u << (i / cfg::TOP_K));
    }
    warp_sync();
    int active = 0, lines = 0;
    for (int first = 0; first < cfg::LOCAL_EXPERTS; first += WARP) {
        const int expert = first + lane;
        const uint32_t rows = expert < cfg::LOCAL_EXPERTS ? Table::rows_of(expert) : 0u;
        const uint32_t set = warp_ballot(rows != 0u);
        int sum = population_count(rows);
#pragma unroll
        for (int step = 1; step < WARP; step *= 2) {
            const int below = static_cast<int>(shuffle(static_cast<uint32_t>(sum), lane >= step ? lane - step : lane));
            if (lane >= step) sum += below;
        }
        if (rows != 0u) {
            const int index = active + population_count(set & ((1u << lane) - 1u));
            shared_store(Table::INDEX_OF + expert * 4, static_cast<uint32_t>(index));
            shared_store(Table::EXPERT + index * 4, static_cast<uint32_t>(expert));
            shared_store(Table::FIRST_LINE + index * 4, static_cast<uint32_t>(lines + sum - population_count(rows)));
        }
        active += population_count(set);
        lines += static_cast<int>(shuffle(static_cast<uint32_t>(sum), WARP - 1));
    }
    if (lane == 0) shared_store(Table::ACTIVE, static_cast<uint32_t>(active));
    arrive_warp(cfg::ROUTING_BARRIER_AT);
}

DEVICE void wait_table(const Params& p) {
    wait_mbarrier(p, cfg::ROUTING_BARRIER_AT, 0u, protocol::Site::ROUTING_TABLE);
}

}  // namespace routing
