// The NVFP4 decode on its own: a persistent kernel of consumer warps that turn Marlin tiles into mma.sync work, fed from
// shared memory, from L2 or from HBM by a ring of bulk copies. Built and driven by decode_loop.py.
#include <cuda_runtime.h>

#include <cstdio>
#include <type_traits>
#include <utility>

#include "decode/field_order.cuh"
#include "decode/group_tile.cuh"
#include "decode/marlin_order.cuh"
#include "instr/bulk.cuh"
#include "instr/clock.cuh"
#include "instr/mbarrier.cuh"
#include "instr/memory.cuh"
#include "instr/warp.cuh"

namespace {

using decode::TILE_BYTES;
using decode::TILE_SCALES;

enum class Source { ring, shared };

// Control: field order with the fourth pair by one 32 x 32 -> 64-bit product that rotates its bits by 2, -3 and -8.
struct FieldWide {
    DEVICE static void place(uint32_t word, uint32_t (&a)[4]) {
        using decode::PLACED;
        const uint64_t gathered = (word & 0x6c006c00u) * static_cast<uint64_t>((1u << 2) + (1u << 29) + (1u << 24));
        a[0] = word & PLACED;
        a[2] = (word << 3) & PLACED;
        a[1] = (word << 6) & PLACED;
        a[3] = (static_cast<uint32_t>(gathered) | static_cast<uint32_t>(gathered >> 32)) & PLACED;
    }
};
// How a variant turns a lane's share into fragments, and who multiplies.
template <class Order, bool GROUP_>
struct Lean {
    static constexpr bool GROUP = GROUP_, DECODES = true;
    DEVICE static void fragments(const decode::Share& share, uint32_t (&a)[4][4]) {
        decode::decode_tile<Order>(share, a);
    }
};
// Control: one shift and one mask per field, scales broadcast to registers of their own.
struct ShiftAndMask {
    DEVICE static void place(uint32_t word, uint32_t (&a)[4]) {
        using decode::MAGNITUDE, decode::SIGN;
        a[0] = ((word << 6) & MAGNITUDE) | ((word << 12) & SIGN);
        a[2] = ((word << 2) & MAGNITUDE) | ((word << 8) & SIGN);
        a[1] = ((word >> 2) & MAGNITUDE) | ((word << 4) & SIGN);
        a[3] = ((word >> 6) & MAGNITUDE) | (word & SIGN);
    }
    static constexpr bool GROUP = false, DECODES = true;
    DEVICE static void fragments(const decode::Share& share, uint32_t (&a)[4][4]) {
        const uint32_t words[4] = {share.codes.x, share.codes.y, share.codes.z, share.codes.w};
        uint32_t scales[4];
        decode::widen_scales(share.scales.x, scales[0], scales[1]);
        decode::widen_scales(share.scales.y, scales[2], scales[3]);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const uint32_t low = __byte_perm(scales[i], 0, 0x1010), high = __byte_perm(scales[i], 0, 0x3232);
            place(words[i], a[i]);
#pragma unroll
            for (int j = 0; j < 4; ++j) a[i][j] = multiply_bf16x2(a[i][j], j % 2 == 0 ? low : high);
        }
    }
};
// Control: the ring alone; consumers release every stage unread. The roof of this copy pattern.
struct NoDecode {
    static constexpr bool GROUP = false, DECODES = false;
};

struct Params {
    const char* words;    // [stored, k_steps, n_tiles, 512]
    const char* scales;   // [stored, k_steps, n_tiles, 64]
    const uint4* tokens;  // 16 steps of inputs as b operands or as core matrices; inputs repeat after 256
    float* out;           // [experts, PARTS, 8 NT, 64 n_tiles]
    int experts, stored;  // expert e has the weights of e % stored: few enough of them and they stay in L2
    int n_tiles, k_steps;
    int rows;  // that are written; the product always has 8 NT columns
};

constexpr int TOKEN_STEPS = 16;
constexpr int TOKENS_AT = 1024;
constexpr int SPIN_LIMIT = 1 << 20;

// Warps are TILES beside each other (n64 each) and PARTS behind each other (inputs of a stage).
template <int TILES_, int PARTS_, int STEPS_, int STAGES_>
struct Shape {
    static constexpr int TILES = TILES_, PARTS = PARTS_, STEPS = STEPS_, STAGES = STAGES_;
    static constexpr int WARPS = TILES * PARTS, WARP_STEPS = STEPS / PARTS;
    static constexpr int CODES = STEPS * TILES * TILE_BYTES, STAGE = STEPS * TILES * (TILE_BYTES + TILE_SCALES);
    static_assert(TOKEN_STEPS % WARP_STEPS == 0 && WARP_STEPS % 2 == 0 );
};

// A whole warp waits. The vote makes the loop's exit uniform, without which the compiler moves every descriptor of a
// warpgroup product through vector registers again.
DEVICE void wait_bounded(uint32_t barrier, uint32_t parity) {
    for (int tries = 0; !all_lanes(mbarrier_try_wait(barrier, parity)); ++tries) {
        if (tries > SPIN_LIMIT) trap();
    }
}

DEVICE void wait_thread(uint32_t barrier, uint32_t parity) {
    for (int tries = 0; !mbarrier_try_wait(barrier, parity); ++tries) {
        if (tries > SPIN_LIMIT) trap();
    }
}

template <class S, int NT>
struct Ring {
    int slot = 0;
    uint32_t parity = 0;
    DEVICE uint32_t stage() const { return TOKENS_AT + TOKEN_STEPS / 2 * NT * 512 + slot * S::STAGE; }
    DEVICE uint32_t full() const { return slot * 8; }
    DEVICE uint32_t empty() const { return (S::STAGES + slot) * 8; }
    DEVICE void next() {
        if (++slot == S::STAGES) {
            slot = 0;
            parity ^= 1u;
        }
    }
};

template <class S, int NT>
constexpr int shared_bytes() {
    return TOKENS_AT + TOKEN_STEPS / 2 * NT * 512 + S::STAGES * S::STAGE;
}

template <class S>
DEVICE int tasks_of(const Params& p) {
    return p.experts * (p.n_tiles / S::TILES);
}

// A stage: STEPS rows of TILES neighbouring tiles, codes and scales, each row one copy. One thread issues them all: copies
// from different lanes are serialised with a handful of moves to uniform registers each, which beside busy math warps
// made this loop the limit (docs/nvfp4-decode.md).
template <class S, int NT>
DEVICE void produce(const Params& p, int stages) {
    if (!elect_one()) return;
    const uint64_t policy = eviction_policy(p.stored < p.experts ? Keep::last_out : Keep::first_out);
    const int blocks = p.n_tiles / S::TILES;
    Ring<S, NT> ring;
    int issued = 0;
    for (int task = cta_index(); task < tasks_of<S>(p); task += gridDim.x) {
        const int64_t first = static_cast<int64_t>(task / blocks % p.stored) * p.k_steps * p.n_tiles +
                              task % blocks * S::TILES;
        const char *words = p.words + first * TILE_BYTES, *scales = p.scales + first * TILE_SCALES;
        for (int step = 0; step < p.k_steps; step += S::STEPS, ++issued) {
            if (issued == stages) return;
            wait_thread(ring.empty(), ring.parity ^ 1u);
            mbarrier_arrive_expect(ring.full(), S::STAGE);
#pragma unroll
            for (int row = 0; row < S::STEPS; ++row) {
                bulk_load(ring.stage() + row * (S::TILES * TILE_BYTES), words, S::TILES * TILE_BYTES, ring.full(),
                          policy);
                bulk_load(ring.stage() + S::CODES + row * (S::TILES * TILE_SCALES), scales, S::TILES * TILE_SCALES,
                          ring.full(), policy);
                words += p.n_tiles * TILE_BYTES;
                scales += p.n_tiles * TILE_SCALES;
            }
            ring.next();
        }
    }
}

template <class S, int NT>
DEVICE void write_out(const Params& p, int task, const float (&acc)[4][NT][4]) {
    const int blocks = p.n_tiles / S::TILES, g = lane_index() / 4, t = lane_index() % 4, n = p.n_tiles * 64;
    const int tile = warp_index() % S::TILES, part = warp_index() / S::TILES;
    float* out = p.out + (static_cast<int64_t>(task / blocks) * S::PARTS + part) * 8 * NT * n +
                 (task % blocks * S::TILES + tile) * 64 + g;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
        for (int column = 0; column < NT; ++column) {
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const int row = column * 8 + 2 * t + j % 2;
                if (row < p.rows) {
                    out[static_cast<int64_t>(row) * n + i * 16 + j / 2 * 8] = acc[i][column][j] * decode::UNSCALE;
                }
            }
        }
    }
}

// Unrolled by the front end: left to a pragma, the compiler keeps some of these loops rolled.
template <class Body, int... STEPS>
DEVICE void for_each_step(Body body, std::integer_sequence<int, STEPS...>) {
    (body(std::integral_constant<int, STEPS>()), ...);
}

// PREFETCH: the next step's codes and scales are loaded before the present step is used, over the stages' borders too.
template <class Order, class S, int NT, bool PREFETCH, Source SOURCE>
DEVICE void consume(const Params& p) {
    const int lane = lane_index(), tile = warp_index() % S::TILES;
    // The same in all lanes, and the compiler must know it: descriptors live in uniform registers.
    const int part = S::PARTS == 1 ? 0 : static_cast<int>(shuffle(warp_index() / S::TILES, 0));
    const uint32_t first = part * S::WARP_STEPS * S::TILES;
    const uint32_t codes = first * TILE_BYTES + tile * TILE_BYTES + lane * 16,
                   scales = S::CODES + first * TILE_SCALES + tile * TILE_SCALES + lane / 4 * 8;
    const auto load = [&](uint32_t stage, int step) {
        return decode::load_share(stage + codes + step * (S::TILES * TILE_BYTES),
                                  stage + scales + step * (S::TILES * TILE_SCALES));
    };
    Ring<S, NT> ring;
    if constexpr (SOURCE == Source::shared) {
        for (int slot = 0; slot < S::STAGES; ++slot) wait_bounded(slot * 8, 0);
    }
    const auto wait = [&] {
        if constexpr (SOURCE == Source::ring) wait_bounded(ring.full(), ring.parity);
    };
    const int chunks = p.k_steps / S::STEPS;
    int left = ((tasks_of<S>(p) - cta_index() + gridDim.x - 1) / gridDim.x) * chunks;
    decode::Share ahead{};
    if constexpr (PREFETCH) {
        if (left > 0) {
            wait();
            ahead = load(ring.stage(), 0);
        }
    }
    for (int task = cta_index(); task < tasks_of<S>(p); task += gridDim.x) {
        float acc[4][NT][4] = {};
        for (int chunk = 0; chunk < chunks; ++chunk) {
            if constexpr (!PREFETCH) wait();
            const Ring<S, NT> here = ring;
            ring.next();
            --left;
            if constexpr (Order::DECODES) {
                const uint32_t tokens =
                    TOKENS_AT + (chunk * S::STEPS + part * S::WARP_STEPS) % TOKEN_STEPS * (NT * 256);
                const uint64_t columns = columns_descriptor(shared_address(tokens), 128, 256);
                uint4 x[NT];
                for_each_step(
                    [&](auto index) {
                        constexpr int step = decltype(index)::value;
                        decode::Share share = ahead;
                        if constexpr (!PREFETCH) {
                            share = load(here.stage(), step);
                        } else if constexpr (step + 1 < S::WARP_STEPS) {
                            ahead = load(here.stage(), step + 1);
                        } else if (left > 0) {
                            wait();
                            ahead = load(ring.stage(), 0);
                        }
                        uint32_t a[4][4];
                        Order::fragments(share, a);
                        if constexpr (Order::GROUP) {
                            decode::multiply_tile_by_group(acc, a, columns + step * NT * 256 / 16);
                        } else {
                            uint2 b[NT];
#pragma unroll
                            for (int n = 0; n < NT; ++n) {
                                if (step % 2 == 0) {
                                    x[n] = shared_load<uint4>(tokens + (step / 2 * NT + n) * 512 + lane * 16);
                                }
                                b[n] = step % 2 == 0 ? make_uint2(x[n].x, x[n].y) : make_uint2(x[n].z, x[n].w);
                            }
                            decode::multiply_tile(acc, a, b);
                        }
                    },
                    std::make_integer_sequence<int, S::WARP_STEPS>());
            }
            if constexpr (SOURCE == Source::ring) {
                warp_sync();
                if (lane == 0) mbarrier_arrive(here.empty());
            }
        }
        if constexpr (Order::GROUP) warpgroup_wait<0>();
        write_out<S>(p, task, acc);
    }
}

template <class Order, class S, int NT, bool PREFETCH, Source SOURCE>
__global__ void __launch_bounds__((S::WARPS + 1) * WARP, 1) decode_loop(const __grid_constant__ Params p) {
    for (int i = thread_index(); i < TOKEN_STEPS / 2 * NT * 32; i += blockDim.x) {
        shared_store<uint4>(TOKENS_AT + i * 16, p.tokens[i]);
    }
    fence_generic_to_async();  // warpgroup products read the tokens through the async proxy
    if (thread_index() == 0) {
        for (int slot = 0; slot < S::STAGES; ++slot) {
            mbarrier_init(slot * 8, 1);
            mbarrier_init((S::STAGES + slot) * 8, S::WARPS);
        }
        mbarrier_init_fence();
    }
    __syncthreads();
    if (warp_index() == S::WARPS) {
        produce<S, NT>(p, SOURCE == Source::shared ? S::STAGES : -1);
    } else {
        consume<Order, S, NT, PREFETCH, SOURCE>(p);
    }
}

struct Variant {
    const char *order, *shape;
    int rows, warps, tiles, parts, prefetch, group;
    int shared;
    void (*ring)(Params);
    void (*resident)(Params);
};

template <class Order, class S, int NT, bool PREFETCH = true>
constexpr Variant variant(const char* order, const char* shape) {
    static_assert(!Order::GROUP || S::TILES % 4 == 0, "the four warps of a group are side by side");
    return {order, shape, 8 * NT, S::WARPS, S::TILES, S::PARTS, PREFETCH, Order::GROUP, shared_bytes<S, NT>(),
            decode_loop<Order, S, NT, PREFETCH, Source::ring>, decode_loop<Order, S, NT, PREFETCH, Source::shared>};
}

using Eight = Shape<8, 1, 8, 6>;
using EightDeep = Shape<4, 2, 16, 6>;
using Twelve = Shape<12, 1, 8, 4>;
using Sixteen = Shape<16, 1, 4, 6>;
using SixteenDeep = Shape<8, 2, 16, 3>;

template <int NT>
struct Family {
    static constexpr Variant list[] = {
        variant<NoDecode, Eight, NT, false>("none", "8x1"),
        variant<NoDecode, EightDeep, NT, false>("none", "4x2"),
        variant<NoDecode, Twelve, NT, false>("none", "12x1"),
        variant<NoDecode, Sixteen, NT, false>("none", "16x1"),
        variant<ShiftAndMask, Eight, NT>("shift", "8x1"),
        variant<ShiftAndMask, Twelve, NT>("shift", "12x1"),
        variant<Lean<decode::MarlinOrder, false>, Eight, NT>("marlin", "8x1"),
        variant<Lean<decode::MarlinOrder, false>, EightDeep, NT>("marlin", "4x2"),
        variant<Lean<decode::MarlinOrder, false>, Twelve, NT>("marlin", "12x1"),
        variant<Lean<decode::MarlinOrder, false>, Sixteen, NT>("marlin", "16x1"),
        variant<Lean<decode::MarlinOrder, false>, SixteenDeep, NT>("marlin", "8x2"),
        variant<Lean<decode::MarlinOrder, false>, Eight, NT, false>("marlin", "8x1"),
        variant<Lean<decode::MarlinOrder, true>, Eight, NT>("marlin", "8x1"),
        variant<Lean<decode::MarlinOrder, true>, Twelve, NT>("marlin", "12x1"),
        variant<Lean<decode::MarlinOrder, true>, SixteenDeep, NT>("marlin", "8x2"),
        variant<Lean<decode::FieldOrder, false>, Eight, NT>("field", "8x1"),
        variant<Lean<decode::FieldOrder, false>, EightDeep, NT>("field", "4x2"),
        variant<Lean<decode::FieldOrder, false>, Twelve, NT>("field", "12x1"),
        variant<Lean<decode::FieldOrder, false>, Sixteen, NT>("field", "16x1"),
        variant<Lean<decode::FieldOrder, false>, SixteenDeep, NT>("field", "8x2"),
        variant<Lean<decode::FieldOrder, false>, Eight, NT, false>("field", "8x1"),
        variant<Lean<decode::FieldOrder, true>, Eight, NT>("field", "8x1"),
        variant<Lean<decode::FieldOrder, true>, Twelve, NT>("field", "12x1"),
        variant<Lean<decode::FieldOrder, true>, SixteenDeep, NT>("field", "8x2"),
        variant<Lean<FieldWide, false>, Eight, NT>("field wide", "8x1"),
        variant<Lean<FieldWide, true>, Eight, NT>("field wide", "8x1"),
    };
    static constexpr int COUNT = sizeof(list) / sizeof(list[0]);
};

const Variant* find(int index) {
    if (index < Family<1>::COUNT) return &Family<1>::list[index];
    index -= Family<1>::COUNT;
    return index < Family<2>::COUNT ? &Family<2>::list[index] : nullptr;
}

template <bool BACK>
__global__ void reorder(const uint4* from, uint4* to, int64_t count) {
    for (int64_t i = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x; i < count;
         i += static_cast<int64_t>(gridDim.x) * blockDim.x) {
        const auto move = [](uint32_t word) {
            return BACK ? decode::to_marlin_order(word) : decode::to_field_order(word);
        };
        const uint4 w = from[i];
        to[i] = make_uint4(move(w.x), move(w.y), move(w.z), move(w.w));
    }
}

}  // namespace

extern "C" {

// Fills integers [rows, warps, tiles, k parts, prefetch, group, registers, spilled bytes, shared bytes] and the two names.
int decode_loop_variant(int index, int* integers, char* order, char* shape) {
    const Variant* v = find(index);
    if (v == nullptr) return -1;
    cudaFuncAttributes attributes;
    const cudaError_t status = cudaFuncGetAttributes(&attributes, reinterpret_cast<const void*>(v->ring));
    if (status != cudaSuccess) return status;
    const int values[] = {v->rows,     v->warps, v->tiles, v->parts, v->prefetch, v->group, attributes.numRegs,
                          static_cast<int>(attributes.localSizeBytes), v->shared};
    for (int i = 0; i < 9; ++i) integers[i] = values[i];
    snprintf(order, 32, "%s", v->order);
    snprintf(shape, 32, "%s", v->shape);
    return 0;
}

// Writes the first `rows` rows of the variant's.
int decode_loop_run(int index, int resident, const void* words, const void* scales, const void* tokens, void* out,
                    int experts, int stored, int n_tiles, int k_steps, int rows, int ctas, void* stream) {
    const Variant* v = find(index);
    if (v == nullptr || rows > v->rows) return -1;
    const auto kernel = resident ? v->resident : v->ring;
    cudaError_t status = cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel),
                                              cudaFuncAttributeMaxDynamicSharedMemorySize, v->shared);
    if (status != cudaSuccess) return status;
    const Params p{static_cast<const char*>(words), static_cast<const char*>(scales),
                   static_cast<const uint4*>(tokens), static_cast<float*>(out), experts, stored, n_tiles, k_steps,
                   rows};
    kernel<<<ctas, (v->warps + 1) * WARP, v->shared, static_cast<cudaStream_t>(stream)>>>(p);
    return cudaGetLastError();
}

// `bytes` is a multiple of 16; in place when from == to.
int decode_loop_reorder(const void* from, void* to, int64_t bytes, int back, void* stream) {
    const auto kernel = back ? reorder<true> : reorder<false>;
    kernel<<<132 * 8, 256, 0, static_cast<cudaStream_t>(stream)>>>(static_cast<const uint4*>(from),
                                                                   static_cast<uint4*>(to), bytes / 16);
    return cudaGetLastError();
}
}
