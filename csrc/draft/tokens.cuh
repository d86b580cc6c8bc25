// Token rows in operand order, [K / 32][ROW_CAP][32 inputs]: a chunk of any product is one contiguous copy, and what
// the lanes of a warp feed to an mma are 512 contiguous bytes. Rows that the launch does not have are zero.
#pragma once
#include "layer/load.cuh"
#include "layer/row.cuh"

namespace tokens {

constexpr int INPUTS = 32, LINE_BYTES = INPUTS * 2;

DEVICE uint16_t* at(uint16_t* rows, int row, int column) {
    return rows + (column / INPUTS * cfg::ROW_CAP + row) * INPUTS + column % INPUTS;
}
DEVICE float4 load(uint16_t* rows, int row, int column) { return load_bf16x4(at(rows, row, column)); }
DEVICE void store(uint16_t* rows, int row, int column, const float4& values) {
    store_bf16x4(at(rows, row, column), values);
}
DEVICE void clear(uint16_t* rows, int row, int column) { store(rows, row, column, float4{0.f, 0.f, 0.f, 0.f}); }

// Token loader: the chunks of this CTA's tasks. The caller has waited for the rows and fenced.
template <class G>
DEVICE void load_chunks(const Params& p, Ring& ring, const uint16_t* rows, uint64_t policy) {
    constexpr int BYTES = cfg::ROW_CAP * G::CHUNK * 2;
    DenseTasks<G> tasks;
    for (DenseTask task; tasks.next(task);) {
#pragma unroll 1
        for (int chunk = task.chunk; chunk < task.chunk_end; ++chunk) {
            ring.wait_empty(p);
            if (elect_one()) {
                mbarrier_arrive_expect(ring.full(), BYTES);
                bulk_load(ring.tokens(), reinterpret_cast<const char*>(rows) + chunk * BYTES, BYTES, ring.full(),
                          policy);
            }
            ring.next();
        }
    }
}

// Inputs 8t .. 8t+7 of a step of 32, for the rows of every column tile.
template <int NT>
DEVICE void read(uint4 (&x)[NT], uint32_t chunk, int step) {
#pragma unroll
    for (int n = 0; n < NT; ++n) {
        x[n] = shared_load<uint4>(chunk + (step * cfg::ROW_CAP + n * 8) * LINE_BYTES + lane_index() * 16);
    }
}

}  // namespace tokens
