// NVFP4 experts in the Marlin order SGLang keeps them in on Hopper: tiles of 16 inputs x 64 outputs, 512 bytes each.
// A lane's 16 bytes of a tile are four m16 x k16 weight fragments; block scales are E5M3 bytes (e4m3 times 2^7), eight
// outputs that share l / 4 side by side.
#pragma once
#include "gemm.cuh"

namespace marlin {

constexpr int TILE_BYTES = 512, TILE_SCALES = 64;

// Codes are used as bf16 bit patterns (value times 2^-126), scales as E5M3 times 2^15 = e4m3 times 2^22.
constexpr float UNSCALE = 0x1p104f;

// fp32 scale of one expert's matrix, with the power of two that undoes the two placements; BF16 experts have none.
DEVICE float global_scale(const float* scales, int expert) {
    if constexpr (cfg::NVFP4) {
        return constant_load(scales + expert) * UNSCALE;
    } else {
        return 1.f;
    }
}

// A stage holds STEPS k16 steps of TILES tiles: all codes, step after step, then all scales.
template <class G>
struct Stage {
    static constexpr int N_TILES = G::N / 64;           // of one step in memory
    static constexpr int RUN = G::TILES / G::SEGMENTS;  // neighbouring tiles
    static constexpr int CODES = G::STEPS * G::TILES * TILE_BYTES;
    static constexpr int SCALES = G::STEPS * G::TILES * TILE_SCALES;
    static constexpr int K_PARTS = G::K_PARTS;
    static constexpr int WARP_STEPS = G::STEPS / K_PARTS;
    static_assert(G::TILES * K_PARTS <= cfg::MATH_WARPS && G::STEPS % (2 * K_PARTS) == 0,
                  "two steps at a time per warp");
};

// One run of neighbouring tiles of one step is one copy of codes and one of scales.
template <class G, class R>
DEVICE void load_stage(const R& ring, const void* weights, const void* scales, int expert, int block, int chunk,
                       uint64_t policy) {
    using S = Stage<G>;
    if (!elect_one()) return;
    mbarrier_arrive_expect(ring.full(), S::CODES + S::SCALES);
    const int64_t first_step = static_cast<int64_t>(expert) * (G::K / 16) + chunk * G::STEPS;
    const int64_t first_tile = first_step * S::N_TILES + block * S::RUN;
    const char* codes = static_cast<const char*>(weights) + first_tile * TILE_BYTES;
    const char* bytes = static_cast<const char*>(scales) + first_tile * TILE_SCALES;
#pragma unroll
    for (int i = 0; i < G::STEPS * G::SEGMENTS; ++i) {
        const int tile = i / G::SEGMENTS * S::N_TILES + i % G::SEGMENTS * (S::N_TILES / G::SEGMENTS);
        const int place = i * S::RUN;
        bulk_load(ring.weights() + place * TILE_BYTES, codes + tile * TILE_BYTES, S::RUN * TILE_BYTES, ring.full(),
                  policy);
        bulk_load(ring.weights() + S::CODES + place * TILE_SCALES, bytes + tile * TILE_SCALES, S::RUN * TILE_SCALES,
                  ring.full(), policy);
    }
}

// Eight 4-bit codes to the four registers of a fragment, times the scales of its two output rows (low half: row g).
// Nibbles p and p + 4 are a pair of inputs: p = 0, 1 of row g, p = 2, 3 of row g + 8. A code is placed with its sign at
// bit 15 and its magnitude at bits 8..6; a product with two powers of two shifts a nibble twice at once, on the FMA
// pipe instead of the logic pipe, which is what limits this loop.
DEVICE void decode(uint32_t codes, uint32_t scales, uint32_t (&a)[4]) {
    constexpr uint32_t SIGN = 0x80008000u, MAGNITUDE = 0x01c001c0u, PLACED = SIGN | MAGNITUDE;
    const uint32_t upper = codes >> 6;
    a[0] = multiply_bf16x2_by_low(((codes & 0x000f000fu) * ((1u << 6) + (1u << 12))) & PLACED, scales);
    a[2] = multiply_bf16x2_by_low(((codes & 0x00f000f0u) * ((1u << 2) + (1u << 8))) & PLACED, scales);
    a[1] = multiply_bf16x2_by_high(((upper & 0x003c003cu) * ((1u << 4) + (1u << 10))) & PLACED, scales);
    a[3] = multiply_bf16x2_by_high((upper & MAGNITUDE) | (codes & SIGN), scales);
}

// Two of four E5M3 bytes, shifted to bits 11..4 of their halves, are bf16 patterns 2^-112 too small; the product is
// exact, zero and subnormals included.
DEVICE uint32_t widen_scales(uint32_t shifted) {
    constexpr uint32_t FIELD = 0x0ff00ff0u, TWO_TO_127 = 0x7f007f00u;
    return multiply_bf16x2(shifted & FIELD, TWO_TO_127);
}

// This warp's n64 tile and its share of the steps: acc[i] are output rows 16 i .. 16 i + 15 of the tile.
template <class G, int NT>
DEVICE void accumulate(float (&acc)[4][NT][4], uint32_t weights, uint32_t tokens) {
    using S = Stage<G>;
    const int tile = warp_index() % G::TILES, k_part = warp_index() / G::TILES;
    // Tiles lie step by step, and within a step segment by segment: the tile's place in a step is `tile` itself.
    const uint32_t codes_at = weights + tile * TILE_BYTES + lane_index() * 16;
    const uint32_t scales_at = weights + S::CODES + tile * TILE_SCALES + lane_index() / 4 * 8;
#pragma unroll
    for (int pair = 0; pair < S::WARP_STEPS / 2; ++pair) {
        const int step0 = k_part * S::WARP_STEPS + 2 * pair;
        uint4 x[NT];
        read_tokens<NT, G::STEPS * 32>(x, tokens, step0 / 2 * 64);
#pragma unroll
        for (int odd = 0; odd < 2; ++odd) {
            const int step = step0 + odd;
            const uint4 w = shared_load<uint4>(codes_at + step * (G::TILES * TILE_BYTES));
            const uint2 s = shared_load<uint2>(scales_at + step * (G::TILES * TILE_SCALES));
            const uint32_t codes[4] = {w.x, w.y, w.z, w.w};
            const uint32_t placed[4] = {s.x << 4, s.x >> 4, s.y << 4, s.y >> 4};
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                uint32_t a[4];
                decode(codes[i], widen_scales(placed[i]), a);
#pragma unroll
                for (int n = 0; n < NT; ++n) {
                    mma_bf16(acc[i][n], a[0], a[1], a[2], a[3], odd ? x[n].z : x[n].x, odd ? x[n].w : x[n].y);
                }
            }
        }
    }
}

}  // namespace marlin
