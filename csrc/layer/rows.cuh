// What the rows of a step see of the key range, from the step's inputs alone.
#pragma once
#include "wait.cuh"

namespace attention {

DEVICE constexpr int log2_of(int value) { return value == 1 ? 0 : 1 + log2_of(value / 2); }
constexpr int MIN_SHIFT = log2_of(cfg::MIN_SPLIT);
static_assert(cfg::MIN_SPLIT == 1 << MIN_SHIFT, "splits are powers of two");

// A row at `position` has splits of 2^shift keys: small, so that short contexts spread over the SMs, doubling from
// where there would be more than SPLITS_CAP of them.
DEVICE int split_shift(const Params& p, int position) {
    const int last = position < p.window ? position : p.window - 1;
    int shift = MIN_SHIFT;
#pragma unroll 1
    while (last >> shift >= cfg::SPLITS_CAP) ++shift;
    return shift;
}

struct Rows {
    int length, first, end;        // keys [first, end) are seen by some row
    int small_shift, large_shift;  // rows of a step may lie on both sides of a doubling; these differ then
    int position = 0, shift;       // of row lane_index()
    uint32_t own = 0;              // rows of the step that this lane's row sees; 0: there is no such row

    // A whole warp.
    DEVICE explicit Rows(const Params& p) {
        const bool here = lane_index() < p.rows;
        length = global_load(p.length);
        if (here) {
            position = static_cast<int>(global_load(p.positions + lane_index()));
            own = global_load(p.ancestors + lane_index()) & ((1u << p.rows) - 1u);
        }
        const int lowest = warp_minimum(here ? position : 0x7fffffff), highest = warp_maximum(position);
        end = length + p.rows;
        first = lowest - p.window + 1;
        first = first < 0 ? 0 : (first < length ? first : length);
        shift = split_shift(p, position);
        small_shift = warp_minimum(here ? shift : 31);
        large_shift = warp_maximum(here ? shift : 0);
        if (highest - lowest >= p.window) {
#pragma unroll 1
            for (int other = 0; other < p.rows; ++other) {
                if (position - position_of(other) >= p.window) own &= ~(1u << other);
            }
        }
    }
    DEVICE int position_of(int row) const {
        return static_cast<int>(shuffle(static_cast<uint32_t>(position), row));
    }
    DEVICE int shift_of(int row) const { return static_cast<int>(shuffle(static_cast<uint32_t>(shift), row)); }
    DEVICE int first_split(int shift) const { return first >> shift; }
    DEVICE int splits(int shift) const { return ((end - 1) >> shift) + 1 - first_split(shift); }
};

DEVICE uint32_t lowest_bits(int count) { return count <= 0 ? 0u : count < 32 ? (1u << count) - 1u : ~0u; }

// Which keys a row sees: committed ones from `oldest` on, and a set of the step's own rows.
struct RowView {
    int oldest;
    uint32_t own;

    RowView() = default;
    // A whole warp; every lane names its row. A row whose splits have another size is done with the units of that size,
    // and absent here; what an absent row sees does not matter.
    DEVICE RowView(const Params& p, const Rows& rows, int row, int shift) {
        const int position = rows.position_of(row);
        own = shuffle(rows.own, row);
        if (rows.shift_of(row) != shift) own = 0u;
        oldest = own != 0u ? position - p.window + 1 : 0;
    }
    DEVICE bool present() const { return own != 0u; }  // every row sees itself
    // Bit i: key first + i is seen.
    DEVICE uint32_t seen(const Rows& rows, int first) const {
        const int committed = rows.length - first;
        const uint32_t mine = committed >= 32 ? 0u : committed >= 0 ? own << committed : own >> -committed;
        return (lowest_bits(committed) & ~lowest_bits(oldest - first)) | mine;
    }
};

}  // namespace attention
