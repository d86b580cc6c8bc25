// NVFP4 experts in the Marlin order SGLang keeps them in on Hopper: tiles of 16 inputs x 64 outputs, 512 bytes each.
// A lane's 16 bytes of a tile are four m16 x k16 weight fragments; block scales are E5M3 bytes (e4m3 times 2^7), eight
// outputs that share l / 4 side by side. Inside each word the bits may have been put into field order.
#pragma once
#include <type_traits>

#include "decode/field_order.cuh"
#include "decode/marlin_order.cuh"
#include "decode/tile.cuh"
#include "gemm.cuh"

namespace marlin {

using decode::TILE_BYTES;
using decode::TILE_SCALES;
using Order = std::conditional_t<cfg::FIELD_ORDER, decode::FieldOrder, decode::MarlinOrder>;

// fp32 scale of one expert's matrix, with the power of two that undoes the two placements; BF16 experts have none.
DEVICE float global_scale(const float* scales, int expert) {
    if constexpr (cfg::NVFP4) {
        return constant_load(scales + expert) * decode::UNSCALE;
    } else {
        return 1.f;
    }
}

// A box holds STEPS k16 steps of a task's TILES tiles: step by step, and within a step segment by segment. A stage
// holds the codes of up to BOXES boxes, then their scales.
template <class G>
struct Box {
    static constexpr int STEPS = 2 * G::K_PARTS;        // two of each warp
    static constexpr int RUN = G::TILES / G::SEGMENTS;  // neighbouring tiles
    static constexpr int CODES = STEPS * G::TILES * TILE_BYTES;
    static constexpr int SCALES = STEPS * G::TILES * TILE_SCALES;
    static constexpr int SCALES_AT = G::BOXES * CODES;
    static constexpr int TOKEN_BYTES = STEPS * 16 * 2;  // of one token row
    static_assert(G::TILES * G::K_PARTS <= cfg::MATH_WARPS && G::K / 16 % (STEPS * G::BOXES) == 0,
                  "boxes tile the inputs");
};

// Boxes of a stage of an expert with `count` rows: all that have room for the same inputs of the rows. The order of
// sums does not depend on it.
template <class G>
DEVICE int stage_boxes(int count) {
    int boxes = G::BOXES;
    while (boxes > 1 && (count + 1) / 2 * (2 * boxes * Box<G>::TOKEN_BYTES + 64) > int(cfg::STAGE_TOKEN_BYTES))
        boxes /= 2;
    return boxes;
}

// `boxes` describes the product's codes, and its scales behind them (megakernel/boxes.py).
template <class G>
DEVICE void load_stage(const Ring& ring, const uint8_t* boxes, int expert, int block, int first_box, int count,
                       uint64_t policy) {
    using B = Box<G>;
    if (!elect_one()) return;
    mbarrier_arrive_expect(ring.full(), count * (B::CODES + B::SCALES));
    const int step = expert * (G::K / 16) + first_box * B::STEPS;
#pragma unroll
    for (int i = 0; i < G::BOXES; ++i) {
        if (i >= count) break;
        bulk_load_box(ring.weights() + i * B::CODES, boxes, block * B::RUN * (TILE_BYTES / 8), 0, step + i * B::STEPS,
                      ring.full(), policy);
        bulk_load_box(ring.weights() + B::SCALES_AT + i * B::SCALES, boxes + 128, block * B::RUN * (TILE_SCALES / 8), 0,
                      step + i * B::STEPS, ring.full(), policy);
    }
}

// Where a lane of a math warp finds its share of a box, and its columns of the token rows: column g + 8 n, or the last
// row where there are fewer.
template <class G, int NT>
struct Lanes {
    uint32_t codes, scales, tokens[NT];

    // count: token rows; row_bytes: of theirs in a stage.
    DEVICE Lanes(int warp, int lane, int count, int row_bytes) {
        const int tile = 2 * (warp / G::TILES) * G::TILES + warp % G::TILES;
        codes = tile * TILE_BYTES + lane * 16;
        scales = Box<G>::SCALES_AT + tile * TILE_SCALES + lane / 4 * 8;
#pragma unroll
        for (int n = 0; n < NT; ++n) {
            const int column = n * 8 + lane / 4, row = column < count ? column : count - 1;
            tokens[n] = row_offset(row, row_bytes) + lane % 4 * 16 + warp / G::TILES * 64;
        }
    }
};

// This warp's tile and its two steps of each of COUNT boxes from `box` on, in registers, so that the stage is free
// again while they are decoded.
template <class G, int COUNT, int NT>
struct Held {
    decode::Share shares[COUNT][2];
    uint4 tokens[COUNT][NT];

    DEVICE Held(const Ring& ring, const Lanes<G, NT>& lanes, int box) {
        using B = Box<G>;
        const uint32_t codes_at = ring.weights() + box * B::CODES + lanes.codes;
        const uint32_t scales_at = ring.weights() + box * B::SCALES + lanes.scales;
        const uint32_t tokens_at = ring.tokens() + box * B::TOKEN_BYTES;
#pragma unroll
        for (int i = 0; i < COUNT; ++i) {
#pragma unroll
            for (int n = 0; n < NT; ++n)
                tokens[i][n] = shared_load<uint4>(tokens_at + lanes.tokens[n] + i * B::TOKEN_BYTES);
#pragma unroll
            for (int odd = 0; odd < 2; ++odd) {
                shares[i][odd] = decode::load_share(codes_at + i * B::CODES + odd * G::TILES * TILE_BYTES,
                                                    scales_at + i * B::SCALES + odd * G::TILES * TILE_SCALES);
            }
        }
    }

    // acc[i] are output rows 16 i .. 16 i + 15 of the tile.
    DEVICE void multiply(float (&acc)[4][NT][4]) const {
#pragma unroll
        for (int i = 0; i < COUNT; ++i) {
#pragma unroll
            for (int odd = 0; odd < 2; ++odd) {
                uint32_t a[4][4];
                decode::decode_tile<Order>(shares[i][odd], a);
                uint2 inputs[NT];
#pragma unroll
                for (int n = 0; n < NT; ++n) {
                    const uint4& x = tokens[i][n];
                    inputs[n] = odd ? uint2{x.z, x.w} : uint2{x.x, x.y};
                }
                decode::multiply_tile(acc, a, inputs);
            }
        }
    }
};

}  // namespace marlin
