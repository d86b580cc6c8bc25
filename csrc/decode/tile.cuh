// One NVFP4 tile of 16 inputs x 64 outputs (512 bytes of codes, 64 of block scales) times 8 NT token columns.
#pragma once
#include "../instr/convert.cuh"
#include "../instr/mma.cuh"

namespace decode {

constexpr int TILE_BYTES = 512, TILE_SCALES = 64;

// What a tile's sums must be multiplied by, beside the global scale: codes are placed as e2m1 * 2^-126, scales as
// e4m3 * 2^22.
constexpr float UNSCALE = 0x1p104f;

// One lane's share of a tile: four m16 x k16 weight fragments, and the scales of their rows g and g + 8.
struct Share {
    uint4 codes;
    uint2 scales;
};

// `codes` and `scales` are the lane's own addresses in the first tile (lane * 16 and lane / 4 * 8 bytes in).
DEVICE Share load_share(uint32_t codes, uint32_t scales) {
    return {shared_load<uint4>(codes), shared_load<uint2>(scales)};
}

// Marlin's scale bytes (E5M3 = e4m3 * 2^7) of four rows to two bf16 pairs: fragment 2i has bytes 0 and 2 as rows g and
// g + 8, fragment 2i + 1 bytes 1 and 3. A byte at bits 11..4 is a bf16 2^-112 too small; the product with 2^127 is
// exact and keeps a zero scale zero, which setting exponent bits would not.
DEVICE void widen_scales(uint32_t bytes, uint32_t& first, uint32_t& second) {
    constexpr uint32_t BYTE_FIELD = 0x0ff00ff0u, TWO_TO_127 = 0x7f007f00u;
    first = multiply_bf16x2((bytes << 4) & BYTE_FIELD, TWO_TO_127);
    second = multiply_bf16x2((bytes >> 4) & BYTE_FIELD, TWO_TO_127);
}

// One word to the weights of an m16 x k16 fragment, rows g (low half of `scales`) and g + 8. e2m1 * e4m3 has at most 6
// significant bits: exact in bf16, so these are the specification's own weights times 2^-104.
template <class Order>
DEVICE void decode_fragment(uint32_t word, uint32_t scales, uint32_t (&a)[4]) {
    Order::place(word, a);
    a[0] = multiply_bf16x2_by_low(a[0], scales);
    a[1] = multiply_bf16x2_by_high(a[1], scales);
    a[2] = multiply_bf16x2_by_low(a[2], scales);
    a[3] = multiply_bf16x2_by_high(a[3], scales);
}

// All four fragments of the tile: a[i] is output rows 16 i .. 16 i + 15.
template <class Order>
DEVICE void decode_tile(const Share& share, uint32_t (&a)[4][4]) {
    uint32_t scales[4];
    widen_scales(share.scales.x, scales[0], scales[1]);
    widen_scales(share.scales.y, scales[2], scales[3]);
    decode_fragment<Order>(share.codes.x, scales[0], a[0]);
    decode_fragment<Order>(share.codes.y, scales[1], a[1]);
    decode_fragment<Order>(share.codes.z, scales[2], a[2]);
    decode_fragment<Order>(share.codes.w, scales[3], a[3]);
}

// acc[i] += fragment i times the tokens' 16 inputs (b operands in `tokens`), one warp on its own.
template <int NT>
DEVICE void multiply_tile(float (&acc)[4][NT][4], const uint32_t (&a)[4][4], const uint2 (&tokens)[NT]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
        for (int n = 0; n < NT; ++n) {
            mma_bf16(acc[i][n], a[i][0], a[i][1], a[i][2], a[i][3], tokens[n].x, tokens[n].y);
        }
    }
}

}  // namespace decode
