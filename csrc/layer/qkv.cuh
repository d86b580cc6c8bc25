// A3-A5 for the next layer: QK norm, rotation, cache write; v and the output gate pass through.
#pragma once
#include "boundary.cuh"

namespace qkv {

static_assert(cfg::HEAD_DIM == BLOCK_ROWS, "a head is one block of the product");

DEVICE void store_cached(void* cache, int64_t element, float low, float high) {
    if constexpr (cfg::FP8_CACHE) {
        const uint32_t bytes = float_to_e4m3(low) | (static_cast<uint32_t>(float_to_e4m3(high)) << 8);
        global_store(reinterpret_cast<uint16_t*>(static_cast<uint8_t*>(cache) + element), static_cast<uint16_t>(bytes));
    } else {
        global_store(reinterpret_cast<uint32_t*>(static_cast<uint16_t*>(cache) + element), pack_bf16x2(low, high));
    }
}

// What a unit needs beside the product: known before the product is.
struct Place {
    int64_t slot = 0;  // in the caches
    float cosine = 1.f, sine = 0.f;

    Place() = default;
    DEVICE Place(const Params& p, int row) {
        slot = global_load(p.next_slots + row);
        if (p.next_rope == nullptr) return;
        const float* angles = p.next_rope + global_load(p.positions + row) * cfg::HEAD_DIM + lane_index();
        cosine = global_load(angles);
        sine = global_load(angles + cfg::HEAD_DIM / 2);
    }
};

// One warp, one 64-wide block of one row: blocks are q heads, k heads, v heads, gate heads. Lane l has 2l and 2l + 1.
DEVICE void run_unit(const Params& p, int row, int block, const Place& place) {
    const int parts = Geometry<QkvProj>::parts(block);
    const float* at = p.qkv_partial + ((block * QkvProj::PARTS) * cfg::ROW_CAP + row) * BLOCK_ROWS + 2 * lane_index();
    float2 value = global_load(reinterpret_cast<const float2*>(at));
#pragma unroll
    for (int part = 1; part < QkvProj::PARTS; ++part) {
        if (part < parts) {
            const float2 more = global_load(reinterpret_cast<const float2*>(at + part * cfg::ROW_CAP * BLOCK_ROWS));
            value.x += more.x;
            value.y += more.y;
        }
    }
    float low = round_bf16(value.x), high = round_bf16(value.y);
    const bool is_query = block < cfg::HEADS, is_key = !is_query && block < cfg::HEADS + cfg::KV_HEADS;
    if (is_query || is_key) {
        const float scale =
            reciprocal_root(output_gate::warp_sum(low * low + high * high) / cfg::HEAD_DIM + cfg::RMS_EPS);
        low = round_bf16(low * scale);
        high = round_bf16(high * scale);
        if (p.next_rope != nullptr) {
            const float rotated = round_bf16(low * place.cosine - high * place.sine);
            high = round_bf16(high * place.cosine + low * place.sine);
            low = rotated;
        }
    }
    if (is_query) {
        global_store(reinterpret_cast<uint32_t*>(p.query + (row * cfg::HEADS + block) * cfg::HEAD_DIM) + lane_index(),
                     pack_bf16x2(low, high));
    } else if (block < cfg::HEADS + 2 * cfg::KV_HEADS) {
        const int head = (block - cfg::HEADS) % cfg::KV_HEADS;
        const int64_t element = (place.slot * cfg::KV_HEADS + head) * cfg::HEAD_DIM + 2 * lane_index();
        store_cached(is_key ? p.next_key_cache : p.next_value_cache, element, low, high);
    } else {
        const int head = block - cfg::HEADS - 2 * cfg::KV_HEADS;
        global_store(reinterpret_cast<uint32_t*>(p.gate + (row * cfg::HEADS + head) * cfg::HEAD_DIM) + lane_index(),
                     pack_bf16x2(low, high));
    }
}

DEVICE void run(const Params& p, uint32_t epoch) {
    constexpr int BLOCKS = Geometry<QkvProj>::BLOCKS, STEP = cfg::SMS * cfg::MATH_WARPS;
    const int units = p.has_next != 0 ? p.rows * BLOCKS : 0;
    int unit = cta_index() + cfg::SMS * warp_index();
    Place place;
    if (unit < units) place = Place(p, unit / BLOCKS);
    wait_counter_math(p, protocol::Counter::QKV_PROJ, epoch);
    while (unit < units) {
        run_unit(p, unit / BLOCKS, unit % BLOCKS, place);
        unit += STEP;
        if (unit < units) place = Place(p, unit / BLOCKS);
    }
}

}  // namespace qkv
