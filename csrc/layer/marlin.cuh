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
    static constexpr int TOKEN_BYTES = STEPS * 16 * 2;  // of one token row
    static_assert(G::TILES * G::K_PARTS <= cfg::MATH_WARPS && G::K / 16 % (STEPS * G::BOXES) == 0,
                  "boxes tile the inputs");
};

// How the boxes of a product's task lie in a stage, which follows from the warps that share them.
template <int BUSY_WARPS, int MOST_BOXES>
struct Layout {
    static constexpr int WARPS = BUSY_WARPS, BOXES = MOST_BOXES;
    static constexpr int CODES = 2 * WARPS * TILE_BYTES, SCALES = 2 * WARPS * TILE_SCALES;  // bytes of a box
    static constexpr int SCALES_AT = BOXES * CODES;
};
template <class G>
using LayoutOf = Layout<G::TILES * G::K_PARTS, G::BOXES>;

// Boxes of a stage of an expert with `count` rows: all of `most` that have room for the same inputs of the rows,
// `token_bytes` of each a box. The order of sums does not depend on it.
DEVICE int stage_boxes(int most, int token_bytes, int count) {
    int boxes = most;
#pragma unroll 1
    while (boxes > 1 && (count + 1) / 2 * (2 * boxes * token_bytes + 64) > int(cfg::STAGE_TOKEN_BYTES)) boxes /= 2;
    return boxes;
}

// A product's weights as values. `boxes` describes the codes, and the scales behind them (megakernel/boxes.py).
struct Matrix {
    const uint8_t* boxes;
    int steps, box_steps, run;  // k16 steps of an expert and of a box; neighbouring tiles of a box
    int codes, scales, scales_at;

    template <class G>
    DEVICE static Matrix of(const uint8_t* boxes) {
        using L = LayoutOf<G>;
        return {boxes, G::K / 16, Box<G>::STEPS, Box<G>::RUN, L::CODES, L::SCALES, L::SCALES_AT};
    }
};

// MOST: boxes of a stage, at most; their copies are issued in a straight line.
template <int MOST>
DEVICE void load_stage(const Ring& ring, const Matrix& matrix, int expert, int block, int first_box, int count,
                       uint64_t policy) {
    if (!elect_one()) return;
    mbarrier_arrive_expect(ring.full(), count * (matrix.codes + matrix.scales));
    const int step = expert * matrix.steps + first_box * matrix.box_steps, tile = block * matrix.run;
#pragma unroll
    for (int i = 0; i < MOST; ++i) {
        if (i >= count) break;
        bulk_load_box(ring.weights() + i * matrix.codes, matrix.boxes, tile * (TILE_BYTES / 8), 0,
                      step + i * matrix.box_steps, ring.full(), policy);
        bulk_load_box(ring.weights() + matrix.scales_at + i * matrix.scales, matrix.boxes + 128,
                      tile * (TILE_SCALES / 8), 0, step + i * matrix.box_steps, ring.full(), policy);
    }
}

// A math warp's place among those that share a task, and the distance between its two tiles of a box.
struct Place {
    int tile, k_part, tiles, token_bytes;

    template <class G>
    DEVICE static Place of(int warp) {
        return {warp % G::TILES, warp / G::TILES, G::TILES, Box<G>::TOKEN_BYTES};
    }
};

// Where a lane of a math warp finds its share of a box, and its columns of the token rows: column g + 8 n, or the last
// row where there are fewer.
template <class L, int NT>
struct Lanes {
    uint32_t codes, scales, tokens[NT];
    int tiles, token_bytes;

    // count: token rows; boxes: of a stage.
    DEVICE Lanes(const Place& place, int lane, int count, int boxes)
        : tiles(place.tiles), token_bytes(place.token_bytes) {
        const int tile = 2 * place.k_part * tiles + place.tile;
        codes = tile * TILE_BYTES + lane * 16;
        scales = L::SCALES_AT + tile * TILE_SCALES + lane / 4 * 8;
#pragma unroll
        for (int n = 0; n < NT; ++n) {
            const int column = n * 8 + lane / 4, row = column < count ? column : count - 1;
            tokens[n] = row_offset(row, boxes * token_bytes) + lane % 4 * 16 + place.k_part * 64;
        }
    }
};

// This warp's tile and its two steps of each of COUNT boxes from `box` on, in registers, so that the stage is free
// again while they are decoded.
template <class L, int COUNT, int NT>
struct Held {
    decode::Share shares[COUNT][2];
    uint4 tokens[COUNT][NT];

    DEVICE Held(const Ring& ring, const Lanes<L, NT>& lanes, int box) {
        const uint32_t codes_at = ring.weights() + box * L::CODES + lanes.codes;
        const uint32_t scales_at = ring.weights() + box * L::SCALES + lanes.scales;
        const uint32_t tokens_at = ring.tokens() + box * lanes.token_bytes;
#pragma unroll
        for (int i = 0; i < COUNT; ++i) {
#pragma unroll
            for (int n = 0; n < NT; ++n)
                tokens[i][n] = shared_load<uint4>(tokens_at + lanes.tokens[n] + i * lanes.token_bytes);
#pragma unroll
            for (int odd = 0; odd < 2; ++odd) {
                shares[i][odd] = decode::load_share(codes_at + i * L::CODES + odd * lanes.tiles * TILE_BYTES,
                                                    scales_at + i * L::SCALES + odd * lanes.tiles * TILE_SCALES);
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
