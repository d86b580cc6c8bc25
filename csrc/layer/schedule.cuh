// Which CTA does what: fixed by the sizes and the number of SMs, never by the number of rows.
#pragma once
#include "wait.cuh"

// A dense product G is [N, K] x rows: blocks of 64 weight rows, chunks of CHUNK inputs; a unit is one chunk of one
// block. WIDE: fp32 weights; WHOLE_K: a block keeps its whole K on one CTA; PARTS: CTAs that share a block at most.
constexpr int BLOCK_ROWS = 64;

template <class G>
struct Geometry {
    static constexpr int BLOCKS = (G::N + BLOCK_ROWS - 1) / BLOCK_ROWS;
    static constexpr int CHUNKS = G::K / G::CHUNK;
    static constexpr int UNITS = BLOCKS * CHUNKS;
    static constexpr int WORKERS = UNITS < cfg::SMS ? UNITS : cfg::SMS;
    static constexpr int ROW_BYTES = G::CHUNK * (G::WIDE ? 4 : 2);
    static constexpr int TOKEN_BYTES = G::CHUNK * 2;
    static_assert(G::K % G::CHUNK == 0, "a chunk divides K");

    // Worker w owns the units from first_unit(w) up to first_unit(w + 1). 32-bit divisions by constants: these run on
    // the critical path of every hand-off.
    static_assert(static_cast<int64_t>(UNITS + 1) * (WORKERS + 1) < (int64_t{1} << 31), "unit numbers fit 32 bits");
    DEVICE static int first_unit(int worker) { return static_cast<int>(uint32_t(worker) * uint32_t(UNITS) / WORKERS); }
    DEVICE static int worker_of(int unit) { return static_cast<int>((uint32_t(unit + 1) * WORKERS - 1u) / UNITS); }
    DEVICE static int first_worker(int block) { return worker_of(block * CHUNKS); }
    DEVICE static int parts(int block) {
        return G::WHOLE_K ? 1 : worker_of(block * CHUNKS + CHUNKS - 1) - first_worker(block) + 1;
    }
};

// One stretch of chunks of one block, done by one CTA, whose sum is part `part` of the block's outputs.
struct DenseTask {
    int block, chunk, chunk_end, part;
};

// The tasks of this CTA, in order; the loaders and the math warps walk the same list.
template <class G>
struct DenseTasks {
    int at, end;

    DEVICE DenseTasks() {
        const int cta = cta_index();
        if (G::WHOLE_K) {
            at = cta;
            end = Geometry<G>::BLOCKS;
        } else {
            at = Geometry<G>::first_unit(cta < Geometry<G>::WORKERS ? cta : Geometry<G>::WORKERS);
            end = Geometry<G>::first_unit(cta < Geometry<G>::WORKERS ? cta + 1 : Geometry<G>::WORKERS);
        }
    }
    DEVICE bool next(DenseTask& task) {
        constexpr int CHUNKS = Geometry<G>::CHUNKS;
        if (at >= end) return false;
        if (G::WHOLE_K) {
            task = {at, 0, CHUNKS, 0};
            at += cfg::SMS;
            return true;
        }
        task.block = at / CHUNKS;
        task.chunk = at % CHUNKS;
        const int stop = (task.block + 1) * CHUNKS;
        const int upto = stop < end ? stop : end;
        task.chunk_end = task.chunk + (upto - at);
        task.part = cta_index() - Geometry<G>::first_worker(task.block);
        at = upto;
        return true;
    }
};

// Sums of the parts of four neighbouring outputs, in worker order. partial: [blocks, PARTS, ROW_CAP, 64] f32.
template <class G>
DEVICE float4 sum_parts(const float* partial, int row, int column) {
    const int block = column / BLOCK_ROWS;
    const int parts = Geometry<G>::parts(block);
    const float* at = partial + ((block * G::PARTS) * cfg::ROW_CAP + row) * BLOCK_ROWS + column % BLOCK_ROWS;
    float4 sum = global_load(reinterpret_cast<const float4*>(at));
#pragma unroll 8
    for (int part = 1; part < G::PARTS; ++part) {
        if (part < parts) {
            const float4 more = global_load(reinterpret_cast<const float4*>(at + part * cfg::ROW_CAP * BLOCK_ROWS));
            sum.x += more.x;
            sum.y += more.y;
            sum.z += more.z;
            sum.w += more.w;
        }
    }
    return sum;
}
