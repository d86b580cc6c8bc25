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

// The tasks of a CTA, in order; the loaders and the math warps walk the same list. The sizes are values, so that one
// piece of code serves several products.
struct TaskList {
    int block, chunk, part;  // of the next task
    int left;                // units
    int chunks, block_step;

    DEVICE bool next(DenseTask& task) {
        if (left <= 0) return false;
        const int end = chunk + left < chunks ? chunk + left : chunks;
        task = {block, chunk, end, part};
        left -= end - chunk;
        block += block_step;
        chunk = part = 0;  // a CTA starts every block but its first
        return true;
    }
};

template <class G>
DEVICE TaskList task_list() {
    using Shape = Geometry<G>;
    const int cta = forget(cta_index());
    if constexpr (G::WHOLE_K) {
        const int blocks = (Shape::BLOCKS + cfg::SMS - 1 - cta) / cfg::SMS;
        return {cta, 0, 0, blocks * Shape::CHUNKS, Shape::CHUNKS, cfg::SMS};
    } else {
        const int worker = cta < Shape::WORKERS ? cta : Shape::WORKERS;
        const int first = Shape::first_unit(worker), block = first / Shape::CHUNKS;
        const int units = worker < Shape::WORKERS ? Shape::first_unit(worker + 1) - first : 0;
        return {block, first % Shape::CHUNKS, cta - Shape::first_worker(block), units, Shape::CHUNKS, 1};
    }
}

template <class G>
struct DenseTasks : TaskList {
    DEVICE DenseTasks() : TaskList(task_list<G>()) {}
};

// Sums of the parts of four neighbouring outputs, in worker order. partial: [blocks, PARTS, ROW_CAP, 64] f32.
template <class G>
DEVICE float4 sum_parts(const float* partial, int row, int column) {
    const int block = column / BLOCK_ROWS;
    const int parts = Geometry<G>::parts(block);
    const float* at = partial + ((block * G::PARTS) * cfg::ROW_CAP + row) * BLOCK_ROWS + column % BLOCK_ROWS;
    float4 sum = global_load(reinterpret_cast<const float4*>(at));
    constexpr int MOST = 17, TURNS = G::PARTS < 2 ? 1 : (G::PARTS - 1 + MOST - 1) / MOST;
    constexpr int BATCH = G::PARTS < 2 ? 1 : (G::PARTS - 1 + TURNS - 1) / TURNS;  // asked for at once
#pragma unroll 1
    for (int first = 1; first < G::PARTS; first += BATCH) {
        float4 more[BATCH];
#pragma unroll
        for (int i = 0; i < BATCH; ++i) {
            more[i] = float4{};  // see sum_row_parts
            if (first + i < parts)
                more[i] = global_load(reinterpret_cast<const float4*>(at + (first + i) * cfg::ROW_CAP * BLOCK_ROWS));
        }
#pragma unroll
        for (int i = 0; i < BATCH; ++i) {
            if (first + i >= parts) continue;
            sum.x += more[i].x;
            sum.y += more[i].y;
            sum.z += more[i].z;
            sum.w += more[i].w;
        }
    }
    return sum;
}
