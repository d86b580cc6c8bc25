// Loader side of the dense products: weight chunks and token-row chunks into the ring.
#pragma once
#include "ring.cuh"
#include "schedule.cuh"

// One stage of at most ROWS rows of ROW_BYTES; `left` rows exist.
template <int ROWS, int ROW_BYTES>
DEVICE void load_rows(const Ring& ring, int left, const char* source, int64_t stride, uint64_t policy) {
    if (!elect_one()) return;
    if (left >= ROWS) {
        mbarrier_arrive_expect(ring.full(), ROWS * ROW_BYTES);
#pragma unroll 16
        for (int row = 0; row < ROWS; ++row) {
            bulk_load(ring.weights() + row_offset<ROW_BYTES>(row), source + row * stride, ROW_BYTES, ring.full(),
                      policy);
        }
    } else {
        mbarrier_arrive_expect(ring.full(), left * ROW_BYTES);
        for (int row = 0; row < left; ++row) {
            bulk_load(ring.weights() + row_offset<ROW_BYTES>(row), source + row * stride, ROW_BYTES, ring.full(),
                      policy);
        }
    }
}

template <class G, class Stages>
DEVICE void load_weights(const Params& p, Stages& ring, const void* weights, uint64_t policy) {
    using Shape = Geometry<G>;
    const char* base = static_cast<const char*>(weights);
    constexpr int64_t STRIDE = static_cast<int64_t>(G::K) * (G::WIDE ? 4 : 2);
    DenseTasks<G> tasks;
    for (DenseTask task; tasks.next(task);) {
        const int left = G::N - task.block * BLOCK_ROWS;
        const char* block = base + task.block * BLOCK_ROWS * STRIDE;
        for (int chunk = task.chunk; chunk < task.chunk_end; ++chunk) {
            ring.wait_empty(p);
            load_rows<BLOCK_ROWS, Shape::ROW_BYTES>(ring, left, block + chunk * Shape::ROW_BYTES, STRIDE, policy);
            mark(p, Point::ISSUED, (left < BLOCK_ROWS ? left : BLOCK_ROWS) * Shape::ROW_BYTES / 16);
            ring.next();
        }
    }
}

// rows: bf16 [T, K], written by other CTAs; the caller has waited for them and fenced.
template <class G>
DEVICE void load_tokens(const Params& p, Ring& ring, const uint16_t* rows, uint64_t policy) {
    using Shape = Geometry<G>;
    DenseTasks<G> tasks;
    for (DenseTask task; tasks.next(task);) {
        for (int chunk = task.chunk; chunk < task.chunk_end; ++chunk) {
            ring.wait_empty(p);
            if (elect_one()) {
                mbarrier_arrive_expect(ring.full(), p.rows * Shape::TOKEN_BYTES);
#pragma unroll
                for (int row = 0; row < cfg::ROW_CAP; ++row) {
                    if (row < p.rows) {
                        bulk_load(ring.tokens() + row_offset<Shape::TOKEN_BYTES>(row),
                                  rows + static_cast<int64_t>(row) * G::K + chunk * G::CHUNK, Shape::TOKEN_BYTES,
                                  ring.full(), policy);
                    }
                }
            }
            ring.next();
        }
    }
}

// The token loader waits for the rows of a phase; afterwards its bulk copies see them.
DEVICE void wait_rows(const Params& p, protocol::Counter counter, uint32_t epoch) {
    if (lane_index() == 0) wait_counter(p, counter, epoch);
    warp_sync();
    fence_generic_to_async();
}
