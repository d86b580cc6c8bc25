// Decodes whole NVFP4 tiles in both word orders; used by test_decode.py.
#include "decode/field_order.cuh"
#include "decode/tile.cuh"
#include "instr/memory.cuh"

struct Params {
    const uint32_t* words;   // [tiles, 32 lanes, 4]
    const uint32_t* scales;  // [tiles, 8, 2]
    uint32_t* fragments;     // [2 orders, tiles, 32 lanes, 4, 4]
    uint32_t* returned;      // [tiles, 32 lanes, 4], words through field order and back
    uint32_t tiles, unused;
};

template <class Order>
DEVICE void decode_to(uint32_t* out, const uint32_t (&words)[4], const uint32_t (&scales)[2]) {
    uint32_t a[4][4];
    decode::decode_tile<Order>({{words[0], words[1], words[2], words[3]}, {scales[0], scales[1]}}, a);
    for (int i = 0; i < 16; ++i) global_store(out + i, a[i / 4][i % 4]);
}

KERNEL(decode_tiles, Params, WARP) {
    const uint32_t lane = lane_index();
    for (uint32_t tile = 0; tile < p.tiles; ++tile) {
        const uint32_t share = tile * WARP + lane;
        uint32_t words[4], moved[4], scales[2];
        for (int i = 0; i < 2; ++i) scales[i] = global_load(p.scales + tile * 16 + lane / 4 * 2 + i);
        for (int i = 0; i < 4; ++i) {
            words[i] = global_load(p.words + share * 4 + i);
            moved[i] = decode::to_field_order(words[i]);
            global_store(p.returned + share * 4 + i, decode::to_marlin_order(moved[i]));
        }
        decode_to<decode::MarlinOrder>(p.fragments + share * 16, words, scales);
        decode_to<decode::FieldOrder>(p.fragments + (p.tiles * WARP + share) * 16, moved, scales);
    }
}
