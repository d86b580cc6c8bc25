// Loader side of the dense products: weight chunks and token-row chunks into the ring.
#pragma once
#include "ring.cuh"
#include "schedule.cuh"

template <class G>
DEVICE void load_weights(const Params& p, Ring& ring, const void* weights, uint64_t policy) {
    using Shape = Geometry<G>;
    const char* base = static_cast<const char*>(weights);
    constexpr int64_t STRIDE = static_cast<int64_t>(G::K) * (G::WIDE ? 4 : 2);
    DenseTasks<G> tasks;
    for (DenseTask task; tasks.next(task);) {
        const int left = G::N - task.block * BLOCK_ROWS;
        const int rows = left < BLOCK_ROWS ? left : BLOCK_ROWS;
        for (int chunk = task.chunk; chunk < task.chunk_end; ++chunk) {
            ring.wait_empty(p);
            if (lane_index() == 0) mbarrier_arrive_expect(ring.full(), rows * Shape::ROW_BYTES);
            warp_sync();
            for (int row = lane_index(); row < rows; row += WARP) {
                bulk_load(ring.weights() + row_offset<Shape::ROW_BYTES>(row),
                          base + (task.block * BLOCK_ROWS + row) * STRIDE + chunk * Shape::ROW_BYTES, Shape::ROW_BYTES,
                          ring.full(), policy);
            }
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
            if (lane_index() == 0) mbarrier_arrive_expect(ring.full(), p.rows * Shape::TOKEN_BYTES);
            warp_sync();
            if (lane_index() < p.rows) {
                bulk_load(ring.tokens() + row_offset<Shape::TOKEN_BYTES>(lane_index()),
                          rows + static_cast<int64_t>(lane_index()) * G::K + chunk * G::CHUNK, Shape::TOKEN_BYTES,
                          ring.full(), policy);
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
