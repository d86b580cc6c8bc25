// Dense products over weights in fragment order: what a lane feeds to one mma lies together, so a chunk of 64 rows is
// one contiguous copy, and reading it from shared memory touches every bank once without padding.
// Order in memory: block of 64 rows, chunk, m16 tile, step of 32 inputs, half (rows g, rows g + 8), lane, 8 inputs.
// Lane 4 g + t has inputs 8 t .. 8 t + 7 of the step. Sums are made in the order of layer/gemm.cuh.
#pragma once
#include "layer/gemm.cuh"
#include "products.cuh"
#include "tokens.cuh"

template <class G>
constexpr int CHUNK_BYTES = BLOCK_ROWS * G::CHUNK * 2;

template <class G>
DEVICE const char* chunk_address(const void* weights, const DenseTask& task, int chunk) {
    return static_cast<const char*>(weights) +
           (static_cast<int64_t>(task.block) * Geometry<G>::CHUNKS + chunk) * CHUNK_BYTES<G>;
}

// Weight loader.
template <class G>
DEVICE void load_product(const Params& p, Ring& ring, const void* weights, uint64_t policy) {
    DenseTasks<G> tasks;
    for (DenseTask task; tasks.next(task);) {
#pragma unroll 1
        for (int chunk = task.chunk; chunk < task.chunk_end; ++chunk) {
            ring.wait_empty(p);
            if (elect_one()) {
                mbarrier_arrive_expect(ring.full(), CHUNK_BYTES<G>);
                bulk_load(ring.weights(), chunk_address<G>(weights, task, chunk), CHUNK_BYTES<G>, ring.full(), policy);
            }
            ring.next();
        }
    }
}

// This warp's 16 rows and its share of the chunk's inputs.
template <class G, int NT>
DEVICE void accumulate_fragments(float (&acc)[NT][4], uint32_t weights, uint32_t rows) {
    constexpr int ALL_STEPS = G::CHUNK / 32, STEPS = ALL_STEPS / K_PARTS;
    constexpr uint32_t HALF_BYTES = WARP * 16;
    const int tile = warp_anew() % BLOCK_TILES, k_part = warp_anew() / BLOCK_TILES;
    const uint32_t mine = weights + (tile * ALL_STEPS + k_part * STEPS) * 2 * HALF_BYTES + lane_anew() * 16;
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
        uint4 x[NT];
        if constexpr (G::ROW_MAJOR) {
            read_tokens<NT, G::CHUNK * 2>(x, rows + ChunkShare<G::CHUNK, 2>().tokens + step * 64);
        } else {
            tokens::read(x, rows, k_part * STEPS + step);
        }
        const uint32_t at = mine + step * 2 * HALF_BYTES;
        multiply_32(acc, shared_load<uint4>(at), shared_load<uint4>(at + HALF_BYTES), x);
    }
}

// Runs this CTA's tasks of product G; finish(task, turn, row, weight_row, value) gets every sum once, where row <
// p.rows and weight_row < N. The lanes of a warp share `row`, and come to `finish` together where N is a multiple
// of 32.
template <class G, class Finish>
DEVICE void run_product(const Params& p, Ring& ring, Finish finish) {
    const int warp = warp_anew(), tile = warp % BLOCK_TILES, k_part = warp / BLOCK_TILES;
    DenseTasks<G> tasks;
    for (DenseTask task; tasks.next(task);) {
        float acc[COLUMN_TILES][4];
        clear(acc);
#pragma unroll 1
        for (int chunk = task.chunk; chunk < task.chunk_end; ++chunk) {
            ring.wait_full(p);
            accumulate_fragments<G>(acc, ring.weights(), ring.tokens());
            ring.release();
        }
        park(acc, k_part * BLOCK_ROWS + tile * 16);
        math_barrier();
        const int local = thread_index() % BLOCK_ROWS, weight_row = task.block * BLOCK_ROWS + local;
#pragma unroll
        for (int turn = 0; turn < ROW_TURNS; ++turn) {
            const int row = thread_index() / BLOCK_ROWS + turn * ROWS_AT_ONCE;
            if (row >= p.rows || weight_row >= G::N) continue;
            finish(task, turn, row, weight_row, parked_sum(local, row));
        }
        math_barrier();
    }
}

// Parts to partial [blocks, PARTS, ROW_CAP, 64] f32.
template <class G>
DEVICE void run_parts(const Params& p, Ring& ring, float* partial) {
    run_product<G>(p, ring, StorePart{partial, G::PARTS});
}

// The usual end: one arrival publishes the parts.
template <class G>
DEVICE void run_product_to(const Params& p, Ring& ring, float* partial, protocol::Counter counter) {
    run_parts<G>(p, ring, partial);
    arrive_math(p, counter);
}
