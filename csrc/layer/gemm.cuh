// Math side of the dense products: weights are the 16-row operand, token rows the 8 columns.
// The same tiles, the same split of K and the same order of sums for any number of rows: column n of an mma depends on
// column n of its operand alone, so a row's bits do not depend on the other rows.
#pragma once
#include "instr/convert.cuh"
#include "instr/mma.cuh"
#include "ring.cuh"
#include "schedule.cuh"

constexpr int COLUMN_TILES = cfg::ROW_CAP / 8;          // n8 tiles that hold all rows
constexpr int BLOCK_TILES = BLOCK_ROWS / 16;            // warps side by side on a block of 64 weight rows
constexpr int K_PARTS = cfg::MATH_WARPS / BLOCK_TILES;  // warps behind each other on a chunk's inputs
constexpr int REDUCE_STRIDE = cfg::ROW_CAP + 1;         // floats; odd, against bank conflicts

DEVICE uint32_t reduce_at(int row, int column) { return cfg::REDUCE_AT + (row * REDUCE_STRIDE + column) * 4; }

// This thread's places, found anew where they are used: no register holds them from one phase to the next.
DEVICE int lane_anew() { return static_cast<int>(forget(static_cast<uint32_t>(thread_index())) % WARP); }
DEVICE int warp_anew() { return static_cast<int>(forget(static_cast<uint32_t>(thread_index())) / WARP); }

template <int NT>
DEVICE void clear(float (&acc)[NT][4]) {
#pragma unroll
    for (int n = 0; n < NT; ++n) acc[n][0] = acc[n][1] = acc[n][2] = acc[n][3] = 0.f;
}

// Leaves a 16 x 8 NT tile of sums in the reduction buffer, from buffer row `row0` on.
template <int NT>
DEVICE void park(const float (&acc)[NT][4], int row0) {
    const int lane = lane_anew(), g = lane / 4, t = lane % 4;
#pragma unroll
    for (int n = 0; n < NT; ++n) {
        const int column = n * 8 + 2 * t;
        shared_store(reduce_at(row0 + g, column), acc[n][0]);
        shared_store(reduce_at(row0 + g, column + 1), acc[n][1]);
        shared_store(reduce_at(row0 + g + 8, column), acc[n][2]);
        shared_store(reduce_at(row0 + g + 8, column + 1), acc[n][3]);
    }
}

// Inputs are taken 32 at a time and dealt to the mma's slots so that a lane's share of a row, weights and tokens alike,
// is 16 contiguous bytes: lane t has inputs 8t .. 8t+7.
template <int NT>
DEVICE void multiply_32(float (&acc)[NT][4], const uint4& low, const uint4& high, const uint4 (&x)[NT]) {
#pragma unroll
    for (int n = 0; n < NT; ++n) {
        mma_bf16(acc[n], low.x, high.x, low.y, high.y, x[n].x, x[n].y);
        mma_bf16(acc[n], low.z, high.z, low.w, high.w, x[n].z, x[n].w);
    }
}

// Where a lane of a math warp finds its share of a chunk: bytes from the beginning of weights [64, CHUNK], WIDTH bytes
// each, and of the token rows beside them. A warp has 16 weight rows and STEPS times 32 inputs.
template <int CHUNK, int WIDTH>
struct ChunkShare {
    static constexpr int STEPS = CHUNK / 32 / K_PARTS;
    uint32_t weights, tokens;

    DEVICE ChunkShare() {
        const int warp = warp_anew(), tile = warp % BLOCK_TILES, k_part = warp / BLOCK_TILES;
        const int lane = lane_anew(), g = lane / 4, t = lane % 4, input = k_part * STEPS * 32 + t * 8;
        weights = row_offset<CHUNK * WIDTH>(tile * 16 + g) + input * WIDTH;
        tokens = row_offset<CHUNK * 2>(g) + input * 2;
    }
};

// `tokens`: of this lane's share; columns are token rows of TOKEN_BYTES.
template <int NT, int TOKEN_BYTES>
DEVICE void read_tokens(uint4 (&x)[NT], uint32_t tokens) {
#pragma unroll
    for (int n = 0; n < NT; ++n) x[n] = shared_load<uint4>(tokens + row_offset<TOKEN_BYTES>(n * 8));
}

// A lane's share of a chunk with bf16 weights, in registers: all of it is asked for at once, and the stage is free
// again while it is multiplied. Both addresses are of the lane's share.
template <int CHUNK, int NT>
struct HeldChunk {
    static constexpr int STEPS = ChunkShare<CHUNK, 2>::STEPS;
    uint4 low[STEPS], high[STEPS], x[STEPS][NT];

    DEVICE HeldChunk(uint32_t weights, uint32_t tokens) {
#pragma unroll
        for (int step = 0; step < STEPS; ++step) {
            low[step] = shared_load<uint4>(weights + step * 64);
            high[step] = shared_load<uint4>(weights + row_offset<CHUNK * 2>(8) + step * 64);
            read_tokens<NT, CHUNK * 2>(x[step], tokens + step * 64);
        }
    }
    DEVICE void multiply(float (&acc)[NT][4]) const {
#pragma unroll
        for (int step = 0; step < STEPS; ++step) multiply_32(acc, low[step], high[step], x[step]);
    }
};

// The leading eight bits of both numbers as a bf16 pair; the numbers keep what is left. Cutting off, not rounding:
// three turns take all 24 bits, and no turn needs a conversion.
DEVICE uint32_t take_bf16x2(float& low, float& high) {
    const uint32_t low_head = float_bits(low) & 0xffff0000u, high_head = float_bits(high) & 0xffff0000u;
    low -= bits_float(low_head);
    high -= bits_float(high_head);
    return high_head | (low_head >> 16);
}

// fp32 weights (the router): three bf16 products carry all 24 bits of the significand.
template <int CHUNK, int NT>
DEVICE void accumulate_fp32(float (&acc)[NT][4], uint32_t weights, uint32_t tokens) {
#pragma unroll 1  // few turns a launch: fetching more code takes longer than it saves
    for (int step = 0; step < ChunkShare<CHUNK, 4>::STEPS; ++step) {
        uint4 x[NT];
        read_tokens<NT, CHUNK * 2>(x, tokens + step * 64);
        float4 rest[2][2];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const uint32_t row = weights + row_offset<CHUNK * 4>(8 * half) + step * 128;
            rest[half][0] = shared_load<float4>(row);
            rest[half][1] = shared_load<float4>(row + 16);
        }
#pragma unroll
        for (int term = 0; term < 3; ++term) {
            uint4 word[2];
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                word[half].x = take_bf16x2(rest[half][0].x, rest[half][0].y);
                word[half].y = take_bf16x2(rest[half][0].z, rest[half][0].w);
                word[half].z = take_bf16x2(rest[half][1].x, rest[half][1].y);
                word[half].w = take_bf16x2(rest[half][1].z, rest[half][1].w);
            }
            multiply_32(acc, word[0], word[1], x);
        }
    }
}

// After a task, 64 threads hold the sums of one row's 64 outputs; a thread has row `turn` times ROWS_AT_ONCE further
// on.
constexpr int ROWS_AT_ONCE = cfg::MATH_THREADS / BLOCK_ROWS;
constexpr int ROW_TURNS = (cfg::ROW_CAP + ROWS_AT_ONCE - 1) / ROWS_AT_ONCE;

// What the warps behind each other left of weight row `local` of the block and token row `row`, added in their order.
DEVICE float parked_sum(int local, int row) {
    float sum = shared_load<float>(reduce_at(local, row));
#pragma unroll
    for (int part = 1; part < K_PARTS; ++part) sum += shared_load<float>(reduce_at(part * BLOCK_ROWS + local, row));
    return sum;
}

// What becomes of the sums of a product that several CTAs may share: partial [blocks, parts, ROW_CAP, 64] f32.
struct StorePart {
    float* partial;
    int parts;

    DEVICE void operator()(const DenseTask& task, int, int row, int weight_row, float sum) const {
        global_store(
            partial + ((task.block * parts + task.part) * cfg::ROW_CAP + row - task.block) * BLOCK_ROWS + weight_row,
            sum);
    }
};

// Runs tasks of a product of n weight rows; finish(task, turn, row, weight_row, value) gets every sum once, where row <
// count and weight_row < n. AT_ONCE: turns whose code is there side by side.
template <int CHUNK, int WIDTH, int AT_ONCE, class Finish>
DEVICE void run_tasks(const Params& p, Ring& ring, TaskList tasks, int n, int count, Finish finish) {
    const ChunkShare<CHUNK, WIDTH> share;
    for (DenseTask task; tasks.next(task);) {
        float acc[COLUMN_TILES][4];
        clear(acc);
#pragma unroll 1
        for (int chunk = task.chunk; chunk < task.chunk_end; ++chunk) {
            ring.wait_full(p);
            const uint32_t weights = ring.weights() + share.weights, rows = ring.tokens() + share.tokens;
            if constexpr (WIDTH == 4) {
                accumulate_fp32<CHUNK>(acc, weights, rows);
                ring.release();
            } else {
                const HeldChunk<CHUNK, COLUMN_TILES> held(weights, rows);
                ring.release();
                held.multiply(acc);
            }
        }
        park(acc, warp_anew() * 16);
        math_barrier();
        const uint32_t thread = forget(static_cast<uint32_t>(thread_index()));
        const int local = static_cast<int>(thread % BLOCK_ROWS), weight_row = task.block * BLOCK_ROWS + local;
#pragma unroll AT_ONCE
        for (int turn = 0; turn < ROW_TURNS; ++turn) {
            const int row = static_cast<int>(thread / BLOCK_ROWS) + turn * ROWS_AT_ONCE;
            if (row >= count || weight_row >= n) continue;
            finish(task, turn, row, weight_row, parked_sum(local, row));
        }
        math_barrier();
    }
}

// The same as one piece of code for all products of the same chunks: what is fetched for the first is there for the
// next.
template <int CHUNK, int WIDTH, class Finish>
DEVICE_CALL void run_tasks_shared(const Params& p, Ring ring, TaskList tasks, int n, int rows, Finish finish) {
    run_tasks<CHUNK, WIDTH, 1>(p, ring, tasks, n, rows, finish);
}
