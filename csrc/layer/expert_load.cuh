// Loader side of the experts: weights of the tasks into the ring, and the rows that go to them.
#pragma once
#include "expert_tasks.cuh"

namespace experts {

// BF16: rows of the expert's matrix, sixteen side by side at a time, which are of one segment.
DEVICE void load_rows_of(const Params& p, const Ring& ring, const Product& product, const Task& task, int unit,
                         uint64_t policy) {
    constexpr int AT_ONCE = 16, SEGMENT_ROWS = Shape<GateUp>::SEGMENT_ROWS;
    static_assert(cfg::NVFP4 || (SEGMENT_ROWS % AT_ONCE == 0 && Shape<Down>::ROWS == BLOCK_ROWS), "groups of rows");
    if (!elect_one()) return;
    const int row_bytes = product.unit() * 2;
    mbarrier_arrive_expect(ring.full(), BLOCK_ROWS * row_bytes);
    const char* matrix = static_cast<const char*>(product.gate_up ? p.gate_up : p.down);
    const int64_t stride = product.k() * 2;
    const int64_t first = static_cast<int64_t>(task.expert) * product.choose(GateUp::N, Down::N);
#pragma unroll 1
    for (int local = 0; local < BLOCK_ROWS; local += AT_ONCE) {
        const int row = product.gate_up ? local / SEGMENT_ROWS * (GateUp::N / 2) + task.block * SEGMENT_ROWS +
                                              local % SEGMENT_ROWS
                                        : task.block * BLOCK_ROWS + local;
        const char* source = matrix + (first + row) * stride + unit * row_bytes;
        const uint32_t to = ring.weights() + row_offset(local, row_bytes);
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
            bulk_load(to + row_offset(i, row_bytes), source + i * stride, row_bytes, ring.full(), policy);
        }
    }
}

// Before load_weights, while there is time.
DEVICE void prepare_boxes(const Params& p) {
    if constexpr (cfg::NVFP4) {
#pragma unroll 1
        for (int i = 0; i < 4; ++i) acquire_boxes(p.expert_boxes + i * 128);
    }
}

// A ring asked for at once by all SMs comes as a whole, and token rows queue behind it; half a stage's time apart, the
// first stage comes first.
constexpr uint32_t FIRST_STAGES_APART_NS = 500;

DEVICE void load_weights(const Params& p, Ring& ring, Product product, uint64_t policy) {
    Tasks tasks(product);
    int early = product.gate_up ? cfg::STAGES - 1 : 0;  // stages to ask for before the first is used
    for (Task task; tasks.next(task);) {
        const int units = product.stage_units(task.count);
#pragma unroll 1
        for (int unit = 0; unit < product.units(); unit += units) {
            ring.wait_empty(p);
            if constexpr (cfg::NVFP4) {
                const auto matrix = product.gate_up ? marlin::Matrix::of<GateUp>(p.expert_boxes)
                                                    : marlin::Matrix::of<Down>(p.expert_boxes + 2 * 128);
                marlin::load_stage<(GateUp::BOXES > Down::BOXES ? GateUp::BOXES : Down::BOXES)>(
                    ring, matrix, task.expert, task.block, unit, units, policy);
            } else {
                load_rows_of(p, ring, product, task, unit, policy);
            }
            mark(p, Point::ISSUED, product.stage_bytes(units) / 16);
            if (early > 0) {
                --early;
                sleep_nanoseconds(FIRST_STAGES_APART_NS);
            }
            ring.next();
        }
    }
}

DEVICE void wait_activations(const Params& p, int index, uint32_t epoch) {
    if constexpr (cfg::SEPARATE) return;
    const uint32_t* flags = activation_flags(p, index);
#pragma unroll 1
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
DEVICE void load_tokens(const Params& p, Ring& ring, Product product, uint32_t epoch, uint64_t policy) {
    Tasks tasks(product);
    for (Task task; tasks.next(task);) {
        const uint16_t* lines = p.expert_input;
        uint32_t rows = task.rows;
        if (!product.gate_up) {
            wait_activations(p, task.index, epoch);
            lines = p.activated + static_cast<int64_t>(routing::Table::first_line(task.index)) * Down::K;
            rows = (1u << task.count) - 1u;
        }
        const int units = product.stage_units(task.count), row_bytes = units * product.unit() * 2;
#pragma unroll 1
        for (int unit = 0; unit < product.units(); unit += units) {
            ring.wait_empty(p);
            if (elect_one()) {
                mbarrier_arrive_expect(ring.full(), task.count * row_bytes);
                uint32_t left = rows;
#pragma unroll COLUMN_TILES  // one by one, sixteen rows would take as long as the stage's weights
                for (int column = 0; column < task.count; ++column, left &= left - 1u) {
                    bulk_load(ring.tokens() + row_offset(column, row_bytes),
                              lines + lowest_bit(left) * product.k() + unit * product.unit(), row_bytes, ring.full(),
                              policy);
                }
            }
            ring.next();
        }
    }
}

}  // namespace experts
