// Loader side of the dense products: weight chunks and token-row chunks into the ring. Inline for each product: called
// functions, one copy of the code for all, cost more in jumps than the copies do in the instruction cache.
#pragma once
#include "ring.cuh"
#include "schedule.cuh"

// One stage of `rows` rows of ROW_BYTES, a multiple of AT_ONCE; that many copies are issued in a straight line, because
// from one turn of a loop to the next the copy's uniform registers must be free again.
template <int ROW_BYTES, int AT_ONCE>
DEVICE void load_rows(const Ring& ring, int rows, const char* source, int64_t stride, uint64_t policy) {
    if (!elect_one()) return;
    mbarrier_arrive_expect(ring.full(), rows * ROW_BYTES);
#pragma unroll 1
    for (int group = 0; group < rows / AT_ONCE; ++group) {
        const uint32_t to = ring.weights() + row_offset<ROW_BYTES>(group * AT_ONCE);
#pragma unroll
        for (int row = 0; row < AT_ONCE; ++row) {
            bulk_load(to + row_offset<ROW_BYTES>(row), source + row * stride, ROW_BYTES, ring.full(), policy);
        }
        source += AT_ONCE * stride;
    }
}

// weights: [n, stride bytes].
template <int ROW_BYTES, int AT_ONCE, class Stages>
DEVICE Stages load_weight_chunks(const Params& p, Stages ring, TaskList tasks, const char* weights, int64_t stride,
                                 int n, uint64_t policy) {
    for (DenseTask task; tasks.next(task);) {
        const int left = n - task.block * BLOCK_ROWS, rows = left < BLOCK_ROWS ? left : BLOCK_ROWS;
        const char* block = weights + task.block * BLOCK_ROWS * stride;
#pragma unroll 1
        for (int chunk = task.chunk; chunk < task.chunk_end; ++chunk) {
            ring.wait_empty(p);
            load_rows<ROW_BYTES, AT_ONCE>(ring, rows, block + chunk * ROW_BYTES, stride, policy);
            mark(p, Point::ISSUED, rows * ROW_BYTES / 16);
            ring.next();
        }
    }
    return ring;
}

// The largest power of two up to `most` that divides `value`.
DEVICE constexpr int largest_power_of_two(int value, int most) {
    return value % most == 0 ? most : largest_power_of_two(value, most / 2);
}

template <class G, class Stages>
DEVICE void load_weights(const Params& p, Stages& ring, const void* weights, uint64_t policy) {
    constexpr int AT_ONCE = largest_power_of_two(G::N, 16);
    ring = load_weight_chunks<Geometry<G>::ROW_BYTES, AT_ONCE>(
        p, ring, task_list<G>(), static_cast<const char*>(weights), G::K * (G::WIDE ? 4 : 2), G::N, policy);
}

// rows: [count, stride bytes].
DEVICE Ring load_token_chunks(const Params& p, Ring ring, TaskList tasks, const char* rows, int count, int64_t stride,
                              int bytes, uint64_t policy) {
    for (DenseTask task; tasks.next(task);) {
#pragma unroll 1
        for (int chunk = task.chunk; chunk < task.chunk_end; ++chunk) {
            ring.wait_empty(p);
            if (elect_one()) {
                mbarrier_arrive_expect(ring.full(), count * bytes);
                const char* source = rows + chunk * bytes;
                // In a straight line: in a loop, sixteen rows take longer than the stage's weights.
#pragma unroll
                for (int row = 0; row < cfg::ROW_CAP; ++row) {
                    if (row >= count) break;
                    bulk_load(ring.tokens() + row_offset(row, bytes), source + row * stride, bytes, ring.full(),
                              policy);
                }
            }
            ring.next();
        }
    }
    return ring;
}

// rows: bf16 [T, K], written by other CTAs; the caller has waited for them and fenced.
template <class G>
DEVICE void load_tokens(const Params& p, Ring& ring, const uint16_t* rows, uint64_t policy) {
    ring = load_token_chunks(p, ring, task_list<G>(), reinterpret_cast<const char*>(rows), p.rows, G::K * 2,
                             Geometry<G>::TOKEN_BYTES, policy);
}

// The token loader waits for the rows of a phase; afterwards its bulk copies see them.
DEVICE void wait_rows(const Params& p, protocol::Counter counter, uint32_t epoch) {
    if (lane_index() == 0) wait_counter(p, counter, epoch);
    warp_sync();
    fence_generic_to_async();
}
