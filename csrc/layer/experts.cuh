// F8-F10: the experts. A task is one expert and one block of its outputs over the whole K, so nothing about a row's
// sums depends on how many experts or rows are active. All gate/up tasks come first, then the down tasks in the same
// expert order; one list, dealt round the CTAs.
#pragma once
#include "load.cuh"
#include "marlin.cuh"
#include "routing.cuh"

namespace experts {

struct GateUp {
    static constexpr int N = 2 * cfg::MOE_INTER, K = cfg::MOE_HIDDEN, SEGMENTS = 2;  // segments: gate rows, up rows
    static constexpr int TILES = cfg::GATE_UP_TILES, STEPS = cfg::GATE_UP_STEPS, K_PARTS = cfg::GATE_UP_K_PARTS,
                         CHUNK = cfg::GATE_UP_CHUNK;
};
struct Down {
    static constexpr int N = cfg::MOE_HIDDEN, K = cfg::MOE_INTER, SEGMENTS = 1;
    static constexpr int TILES = cfg::DOWN_TILES, STEPS = cfg::DOWN_STEPS, K_PARTS = cfg::DOWN_K_PARTS,
                         CHUNK = cfg::DOWN_CHUNK;
};

template <class G>
struct Shape {
    static constexpr int ROWS = cfg::NVFP4 ? G::TILES * 64 : BLOCK_ROWS;  // weight rows of a task, all segments
    static constexpr int SEGMENT_ROWS = ROWS / G::SEGMENTS;
    static constexpr int BLOCKS = G::N / ROWS;
    static constexpr int CHUNK = cfg::NVFP4 ? G::STEPS * 16 : G::CHUNK;
    static constexpr int CHUNKS = G::K / CHUNK;
    static constexpr int TOKEN_BYTES = CHUNK * 2;
    static constexpr int CHUNK_BYTES = cfg::NVFP4 ? ROWS * CHUNK / 16 * 9 : ROWS * CHUNK * 2;  // weights of a stage
    static_assert(G::N % ROWS == 0 && G::K % CHUNK == 0, "tasks tile the expert");
    // Row of the expert's matrix that row `local` of block `block` is.
    DEVICE static int weight_row(int block, int local) {
        return local / SEGMENT_ROWS * (G::N / G::SEGMENTS) + block * SEGMENT_ROWS + local % SEGMENT_ROWS;
    }
};

// Walks this CTA's (expert, block) tasks of one of the two products.
template <class G>
struct Tasks {
    int at, end;

    // `before`: tasks of the list that precede this product's.
    DEVICE Tasks(int active, int before) {
        const int ahead = (before + cfg::SMS - 1 - cta_index()) / cfg::SMS * cfg::SMS + cta_index() - before;
        at = ahead;
        end = active * Shape<G>::BLOCKS;
    }
    DEVICE bool next(int& index, int& block) {
        if (at >= end) return false;
        index = at / Shape<G>::BLOCKS;
        block = at % Shape<G>::BLOCKS;
        at += cfg::SMS;
        return true;
    }
};

DEVICE int tasks_before_down(int active) { return active * Shape<GateUp>::BLOCKS; }

template <class G>
DEVICE void load_weight_stage(const Ring& ring, const void* weights, const void* scales, int expert, int block,
                              int chunk, uint64_t policy) {
    if constexpr (cfg::NVFP4) {
        marlin::load_stage<G>(ring, weights, scales, expert, block, chunk, policy);
    } else {
        using S = Shape<G>;
        constexpr int ROW_BYTES = S::CHUNK * 2;
        if (!elect_one()) return;
        mbarrier_arrive_expect(ring.full(), S::ROWS * ROW_BYTES);
        const uint16_t* base =
            static_cast<const uint16_t*>(weights) + static_cast<int64_t>(expert) * G::N * G::K + chunk * S::CHUNK;
#pragma unroll 16
        for (int row = 0; row < S::ROWS; ++row) {
            bulk_load(ring.weights() + row_offset<ROW_BYTES>(row),
                      base + static_cast<int64_t>(S::weight_row(block, row)) * G::K, ROW_BYTES, ring.full(), policy);
        }
    }
}

template <class G>
DEVICE void load_weights(const Params& p, Ring& ring, const void* weights, const void* scales, int before,
                         uint64_t policy) {
    Tasks<G> tasks(routing::Table::active(), before);
    for (int index, block; tasks.next(index, block);) {
        for (int chunk = 0; chunk < Shape<G>::CHUNKS; ++chunk) {
            ring.wait_empty(p);
            load_weight_stage<G>(ring, weights, scales, routing::Table::expert(index), block, chunk, policy);
            mark(p, Point::ISSUED, Shape<G>::CHUNK_BYTES / 16);
            ring.next();
        }
    }
}

// A down task needs all of its expert's activations: one flag per gate/up task holds the tag of the launch that wrote
// it last. Tags are odd, so that a flag nobody ever wrote (0) is no launch's.
DEVICE uint32_t activation_tag(uint32_t epoch) { return 2u * epoch + 1u; }

DEVICE const uint32_t* activation_flags(const Params& p, int index) { return p.flags + index * Shape<GateUp>::BLOCKS; }

DEVICE void wait_activations(const Params& p, int index, uint32_t epoch) {
    if constexpr (cfg::SEPARATE) return;
    const uint32_t* flags = activation_flags(p, index);
    for (int block = lane_index(); block < Shape<GateUp>::BLOCKS; block += WARP) {
        spin_until(p, static_cast<uint32_t>(protocol::Site::EXPERT_ACTIVATION), activation_tag(epoch),
                   [&](uint32_t& seen) {
                       seen = load_acquire(flags + block);
                       return seen == activation_tag(epoch);
                   });
    }
    warp_sync();
    fence_generic_to_async();
}

// Column c of a task's product is the expert's c-th row: its line of x (gate/up) or of the activations (down).
template <class G>
DEVICE void load_tokens(const Params& p, Ring& ring, int before, uint32_t epoch, uint64_t policy) {
    using S = Shape<G>;
    Tasks<G> tasks(routing::Table::active(), before);
    for (int index, block; tasks.next(index, block);) {
        const uint32_t rows = routing::Table::rows_of(routing::Table::expert(index));
        const int count = population_count(rows);
        const uint16_t* lines = p.expert_input;
        if constexpr (G::SEGMENTS == 1) {
            wait_activations(p, index, epoch);
            lines = p.activated + static_cast<int64_t>(routing::Table::first_line(index)) * G::K;
        }
        for (int chunk = 0; chunk < S::CHUNKS; ++chunk) {
            ring.wait_empty(p);
            if (elect_one()) {
                mbarrier_arrive_expect(ring.full(), count * S::TOKEN_BYTES);
                uint32_t left = rows;
                for (int column = 0; column < count; ++column, left &= left - 1u) {
                    const int line = G::SEGMENTS == 1 ? column : lowest_bit(left);
                    bulk_load(ring.tokens() + row_offset<S::TOKEN_BYTES>(column),
                              lines + static_cast<int64_t>(line) * G::K + chunk * S::CHUNK, S::TOKEN_BYTES, ring.full(),
                              policy);
                }
            }
            ring.next();
        }
    }
}

// Sums of one task, NT n8 tiles of columns, left in the reduction buffer as [k parts, ROWS] rows.
template <class G, int NT>
DEVICE void accumulate_task(const Params& p, Ring& ring) {
    using S = Shape<G>;
    if constexpr (cfg::NVFP4) {
        constexpr int BUSY_WARPS = G::TILES * G::K_PARTS;  // small experts leave warps without a share
        const bool busy = BUSY_WARPS == cfg::MATH_WARPS || warp_index() < BUSY_WARPS;
        float acc[4][NT][4];
#pragma unroll
        for (int i = 0; i < 4; ++i) clear(acc[i]);
        for (int chunk = 0; chunk < S::CHUNKS; ++chunk) {
            ring.wait_full(p);
            if (busy) marlin::accumulate<G>(acc, ring.weights(), ring.tokens());
            ring.release();
        }
        const int tile = warp_index() % G::TILES, k_part = warp_index() / G::TILES;
#pragma unroll
        for (int i = 0; i < 4; ++i)
            if (busy) park(acc[i], k_part * S::ROWS + tile * 64 + i * 16);
    } else {
        float acc[NT][4];
        clear(acc);
        for (int chunk = 0; chunk < S::CHUNKS; ++chunk) {
            ring.wait_full(p);
            accumulate_bf16<S::CHUNK>(acc, ring.weights(), ring.tokens());
            ring.release();
        }
        park(acc, warp_index() / BLOCK_TILES * S::ROWS + warp_index() % BLOCK_TILES * 16);
    }
    math_barrier();
}

template <class G>
DEVICE void accumulate_rows(const Params& p, Ring& ring, int count) {
    if (COLUMN_TILES == 1 || count <= 8) {
        accumulate_task<G, 1>(p, ring);
    } else {
        accumulate_task<G, COLUMN_TILES>(p, ring);
    }
}

template <class G>
DEVICE float task_sum(int local, int column) {
    constexpr int PARTS = cfg::NVFP4 ? G::K_PARTS : K_PARTS;
    float sum = shared_load<float>(reduce_at(local, column));
#pragma unroll
    for (int part = 1; part < PARTS; ++part)
        sum += shared_load<float>(reduce_at(part * Shape<G>::ROWS + local, column));
    return sum;
}

// F8, F9: gate and up of the same outputs meet in the reduction buffer. NVFP4: fp32 up to the one rounding of the
// result; BF16 experts round both products as well (specification, section 4.1).
DEVICE void run_gate_up(const Params& p, Ring& ring, uint32_t epoch) {
    using S = Shape<GateUp>;
    Tasks<GateUp> tasks(routing::Table::active(), 0);
    for (int index, block; tasks.next(index, block);) {
        const int expert = routing::Table::expert(index);
        const int count = population_count(routing::Table::rows_of(expert));
        accumulate_rows<GateUp>(p, ring, count);
        const float gate_scale = marlin::global_scale(p.gate_scale, expert),
                    up_scale = marlin::global_scale(p.up_scale, expert);
        for (int i = thread_index(); i < S::SEGMENT_ROWS / 2 * count; i += cfg::MATH_THREADS) {
            const int local = i % (S::SEGMENT_ROWS / 2) * 2, column = i / (S::SEGMENT_ROWS / 2);
            float value[2];
#pragma unroll
            for (int side = 0; side < 2; ++side) {
                float gate = task_sum<GateUp>(local + side, column) * gate_scale;
                float up = task_sum<GateUp>(S::SEGMENT_ROWS + local + side, column) * up_scale;
                if constexpr (!cfg::NVFP4) {
                    gate = round_bf16(gate);
                    up = round_bf16(up);
                }
                value[side] = gate * output_gate::sigmoid(gate) * up;
            }
            uint16_t* line =
                p.activated + static_cast<int64_t>(routing::Table::first_line(index) + column) * cfg::MOE_INTER;
            global_store(reinterpret_cast<uint32_t*>(line + routing::expert_position(block * S::SEGMENT_ROWS + local)),
                         pack_bf16x2(value[0], value[1]));
        }
        math_barrier();
        if (thread_index() == 0)
            store_release(const_cast<uint32_t*>(activation_flags(p, index)) + block, activation_tag(epoch));
        mark(p, Point::TASK, index * S::BLOCKS + block);
    }
}

// F10: expert_output [lines, MOE_HIDDEN] in fp32; BF16 experts hold bf16 values in it.
DEVICE void run_down(const Params& p, Ring& ring) {
    using S = Shape<Down>;
    const int active = routing::Table::active();
    Tasks<Down> tasks(active, tasks_before_down(active));
    for (int index, block; tasks.next(index, block);) {
        const int expert = routing::Table::expert(index);
        const int count = population_count(routing::Table::rows_of(expert));
        accumulate_rows<Down>(p, ring, count);
        const float scale = marlin::global_scale(p.down_scale, expert);
        for (int i = thread_index(); i < S::ROWS * count; i += cfg::MATH_THREADS) {
            const int local = i % S::ROWS, column = i / S::ROWS;
            float y = task_sum<Down>(local, column) * scale;
            if constexpr (!cfg::NVFP4) y = round_bf16(y);
            float* line =
                p.expert_output + static_cast<int64_t>(routing::Table::first_line(index) + column) * cfg::MOE_HIDDEN;
            global_store(line + block * S::ROWS + local, y);
        }
        math_barrier();
        mark(p, Point::TASK, index * S::BLOCKS + block);
    }
    arrive_math(p, protocol::Counter::EXPERT_OUTPUT);
}

}  // namespace experts
