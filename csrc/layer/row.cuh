// Row operations: all math warps of one CTA work on one row; a thread holds groups of four neighbouring columns.
#pragma once
#include "gemm.cuh"
#include "scalar.cuh"

// Which CTA does row `row` (and, beside it, that row's routing): the same for every number of rows.
DEVICE bool owns_row(int row, int shift = 0) { return (row + shift) % cfg::SMS == cta_index(); }
// The first row of this CTA; it has every SMS-th from there on.
DEVICE int first_owned_row(int shift = 0) { return (forget(cta_index()) + cfg::SMS - shift % cfg::SMS) % cfg::SMS; }

template <int WIDTH>
struct RowColumns {
    static constexpr int GROUPS = (WIDTH / 4 + cfg::MATH_THREADS - 1) / cfg::MATH_THREADS;
    static constexpr bool FULL = WIDTH % (4 * cfg::MATH_THREADS) == 0;  // no branches between the groups
    static_assert(WIDTH % 4 == 0, "a thread holds four neighbouring columns");
    DEVICE static int column(int group) { return (group * cfg::MATH_THREADS + thread_index()) * 4; }
    DEVICE static bool valid(int group) { return FULL || column(group) < WIDTH; }
};

// Calls body(group, column) for the column groups of this thread.
template <int WIDTH, class Body>
DEVICE void for_columns(Body body) {
#pragma unroll
    for (int group = 0; group < RowColumns<WIDTH>::GROUPS; ++group) {
        if (RowColumns<WIDTH>::valid(group)) body(group, RowColumns<WIDTH>::column(group));
    }
}

// Sum over all math threads, the same bits in each. `turn` alternates between 0 and 1 from one call to the next, so
// that one barrier per sum is enough.
DEVICE float row_sum(float value, int turn) {
    value = output_gate::warp_sum(value);
    const uint32_t at = cfg::ROW_SUM_AT + turn * cfg::MATH_WARPS * 4;
    if (lane_anew() == 0) shared_store(at + warp_anew() * 4, value);
    math_barrier();
    float sum = 0.f;
#pragma unroll
    for (int warp = 0; warp < cfg::MATH_WARPS; ++warp) sum += shared_load<float>(at + warp * 4);
    return sum;
}

DEVICE float square_sum(const float4& v) { return v.x * v.x + v.y * v.y + v.z * v.z + v.w * v.w; }

// The pair conversion, because that of a single number runs at an eighth of its rate; the high half is the float.
DEVICE float round_bf16(float value) { return bits_float(pack_bf16x2(0.f, value)); }
DEVICE float4 round_bf16(const float4& v) {
    return float4{round_bf16(v.x), round_bf16(v.y), round_bf16(v.z), round_bf16(v.w)};
}
DEVICE uint2 pack_bf16x4(const float4& v) { return uint2{pack_bf16x2(v.x, v.y), pack_bf16x2(v.z, v.w)}; }
DEVICE float4 unpack_bf16x4(const uint2& w) {
    return float4{bf16_to_float(w.x & 0xffffu), bf16_to_float(w.x >> 16), bf16_to_float(w.y & 0xffffu),
                  bf16_to_float(w.y >> 16)};
}
DEVICE float4 load_bf16x4(const uint16_t* address) {
    return unpack_bf16x4(global_load(reinterpret_cast<const uint2*>(address)));
}
DEVICE void store_bf16x4(uint16_t* address, const float4& v) {
    global_store(reinterpret_cast<uint2*>(address), pack_bf16x4(v));
}
DEVICE float4 load_f32x4(const float* address) { return global_load(reinterpret_cast<const float4*>(address)); }

// A thread's columns of a weight vector. Loading one group after the other where it is needed would cost a memory
// latency each: stores keep later loads from being moved ahead. So vectors are asked for as a whole, with plain loads,
// which the compiler may not move behind the stores either.
template <int WIDTH>
struct GammaColumns {
    uint2 bits[RowColumns<WIDTH>::GROUPS] = {};

    DEVICE explicit GammaColumns(const uint16_t* weight) {
        for_columns<WIDTH>([&](int i, int column) {
            bits[i] = global_load(reinterpret_cast<const uint2*>(weight + column));
        });
    }
    DEVICE float4 operator[](int i) const { return unpack_bf16x4(bits[i]); }
    // Zero-centred: 1 + w, added in fp32.
    DEVICE float4 centred(int i) const {
        const float4 w = unpack_bf16x4(bits[i]);
        return float4{1.f + w.x, 1.f + w.y, 1.f + w.z, 1.f + w.w};
    }
};

template <int WIDTH>
struct FloatColumns {
    float4 values[RowColumns<WIDTH>::GROUPS] = {};

    DEVICE explicit FloatColumns(const float* weight) {
        for_columns<WIDTH>([&](int i, int column) {
            values[i] = load_f32x4(weight + column);
        });
    }
    DEVICE const float4& operator[](int i) const { return values[i]; }
    DEVICE float4& operator[](int i) { return values[i]; }
};

DEVICE float4 plus(const float4& a, const float4& b) { return float4{a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w}; }
DEVICE float4 times(const float4& a, const float4& b) { return float4{a.x * b.x, a.y * b.y, a.z * b.z, a.w * b.w}; }
DEVICE float4 times(const float4& a, float b) { return float4{a.x * b, a.y * b, a.z * b, a.w * b}; }

// s' = alpha s + beta n, per channel (A10, F16).
DEVICE float4 gated_residual(const float4& a, const float4& b, const float4& stream, const float4& branch) {
    return float4{a.x * stream.x + b.x * branch.x, a.y * stream.y + b.y * branch.y, a.z * stream.z + b.z * branch.z,
                  a.w * stream.w + b.w * branch.w};
}

// body(group, column, sum of the product's parts in worker order) for the column groups of this thread; the parts of
// some groups are asked for before the first of their sums, as many as leave other values their registers. partial:
// [blocks, PARTS, ROW_CAP, 64] f32.
template <class G, class Body>
DEVICE void sum_row_parts(const float* partial, int row, Body body) {
    using Columns = RowColumns<G::N>;
    constexpr int AT_ONCE = G::PARTS < 24 ? 24 / G::PARTS : 1;
#pragma unroll
    for (int start = 0; start < Columns::GROUPS; start += AT_ONCE) {
        float4 part[G::PARTS][AT_ONCE];
        int parts[AT_ONCE];
        keep_order();
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
            if (start + i >= Columns::GROUPS || !Columns::valid(start + i)) continue;
            const int column = Columns::column(start + i), block = column / BLOCK_ROWS;
            parts[i] = Geometry<G>::parts(block);
            const float* at = partial + ((block * G::PARTS) * cfg::ROW_CAP + row) * BLOCK_ROWS + column % BLOCK_ROWS;
#pragma unroll
            for (int k = 0; k < G::PARTS; ++k) {
                part[k][i] = float4{};  // what only a condition writes is kept from the kernel's beginning on
                if (k == 0 || k < parts[i]) part[k][i] = load_f32x4(at + k * cfg::ROW_CAP * BLOCK_ROWS);
            }
        }
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
            if (start + i >= Columns::GROUPS || !Columns::valid(start + i)) continue;
            float4 sum = part[0][i];
#pragma unroll
            for (int k = 1; k < G::PARTS; ++k) {
                if (k < parts[i]) sum = plus(sum, part[k][i]);
            }
            body(start + i, Columns::column(start + i), sum);
        }
    }
}
