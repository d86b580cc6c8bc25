// B4: per-head norm with plain gamma, rounding, rotate-half rotation; one warp per head of one row.
#pragma once
#include "layer/row.cuh"
#include "products.cuh"

namespace heads {

static_assert(cfg::HEAD_DIM == 2 * BLOCK_ROWS, "a head is two blocks of the product, one per half");

// A lane's four dimensions: j, j + 1 of the first half and of the second, j = 2 lane.
struct Values {
    float2 first, second;
};

template <class G>
DEVICE float2 sum_pair(const float* partial, int row, int block) {
    const int parts = Geometry<G>::parts(block);
    const float* at = partial + ((block * G::PARTS) * cfg::ROW_CAP + row) * BLOCK_ROWS + 2 * lane_index();
    float2 sum = global_load(reinterpret_cast<const float2*>(at));
#pragma unroll
    for (int part = 1; part < G::PARTS; ++part) {
        if (part < parts) {
            const float2 more = global_load(reinterpret_cast<const float2*>(at + part * cfg::ROW_CAP * BLOCK_ROWS));
            sum.x += more.x;
            sum.y += more.y;
        }
    }
    return float2{round_bf16(sum.x), round_bf16(sum.y)};
}

// Head `head` of the product's outputs, bf16.
template <class G>
DEVICE Values load(const float* partial, int row, int head) {
    return {sum_pair<G>(partial, row, 2 * head), sum_pair<G>(partial, row, 2 * head + 1)};
}

DEVICE float2 load_pair(const uint16_t* address) {
    const uint32_t pair = global_load(reinterpret_cast<const uint32_t*>(address));
    return float2{bf16_to_float(pair & 0xffffu), bf16_to_float(pair >> 16)};
}

// norm: bf16 [HEAD_DIM]; angles: the position's row of the table, cosines then sines.
DEVICE Values norm_and_rotate(const Values& x, const uint16_t* norm, const float* angles) {
    const float squares =
        x.first.x * x.first.x + x.first.y * x.first.y + x.second.x * x.second.x + x.second.y * x.second.y;
    const float scale = reciprocal_root(output_gate::warp_sum(squares) / cfg::HEAD_DIM + cfg::RMS_EPS);
    const int j = 2 * lane_index();
    const float2 low = load_pair(norm + j), high = load_pair(norm + cfg::HEAD_DIM / 2 + j);
    const float2 a{round_bf16(x.first.x * scale * low.x), round_bf16(x.first.y * scale * low.y)};
    const float2 b{round_bf16(x.second.x * scale * high.x), round_bf16(x.second.y * scale * high.y)};
    const float2 cosine = global_load(reinterpret_cast<const float2*>(angles + j));
    const float2 sine = global_load(reinterpret_cast<const float2*>(angles + cfg::HEAD_DIM / 2 + j));
    return {float2{a.x * cosine.x - b.x * sine.x, a.y * cosine.y - b.y * sine.y},
            float2{b.x * cosine.x + a.x * sine.x, b.y * cosine.y + a.y * sine.y}};
}

DEVICE void store(uint16_t* head, const Values& x) {
    uint32_t* words = reinterpret_cast<uint32_t*>(head) + lane_index();
    global_store(words, pack_bf16x2(x.first.x, x.first.y));
    global_store(words + cfg::HEAD_DIM / 4, pack_bf16x2(x.second.x, x.second.y));
}

// Queries, keys and values of the block's rows.
DEVICE void run(const Params& p, int layer, uint32_t epoch) {
    constexpr int UNITS = cfg::HEADS + 2 * cfg::KV_HEADS;
    wait_counter_math(p, protocol::Counter::QKV, epoch);
    const int length = global_load(p.length);
    for (int unit = cta_index() + cfg::SMS * warp_index(); unit < p.rows * UNITS; unit += cfg::SMS * cfg::MATH_WARPS) {
        const int row = unit / UNITS, head = unit % UNITS;
        const float* angles = p.rope + static_cast<int64_t>(length + row) * cfg::HEAD_DIM;
        Values x = load<Qkv>(p.qkv_partial, row, head);
        if (head < cfg::HEADS) {
            store(p.query + (row * cfg::HEADS + head) * cfg::HEAD_DIM, norm_and_rotate(x, p.query_norm[layer], angles));
        } else if (head < cfg::HEADS + cfg::KV_HEADS) {
            store(p.block_keys + (row * cfg::KV_HEADS + head - cfg::HEADS) * cfg::HEAD_DIM,
                  norm_and_rotate(x, p.key_norm[layer], angles));
        } else {
            store(p.block_values + (row * cfg::KV_HEADS + head - cfg::HEADS - cfg::KV_HEADS) * cfg::HEAD_DIM, x);
        }
    }
    arrive_math(p, protocol::Counter::HEADS_READY);
}

}  // namespace heads
