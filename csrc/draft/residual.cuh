// B7-B9, or the end of B10 with B11: the sublayer's output into the residual, and the norm of what follows. Every row
// is shared by ROW_SHARES CTAs, which meet once, for the row's sum of squares; a stretch is one CTA's columns of one
// row.
#pragma once
#include "convolution.cuh"
#include "product.cuh"

namespace residual {

constexpr int SHARES = cfg::ROW_SHARES, COLUMNS = cfg::HIDDEN / SHARES;
constexpr int STRETCHES = cfg::ROW_CAP * SHARES;
constexpr int TURNS = (STRETCHES + cfg::SMS - 1) / cfg::SMS;  // most stretches of a CTA
constexpr int GROUPS = (COLUMNS / 4 + cfg::MATH_THREADS - 1) / cfg::MATH_THREADS;
static_assert(COLUMNS % 4 == 0, "a thread holds four neighbouring columns");

struct Sublayer {
    const float* output;  // parts of its last product
    const uint16_t *base, *norm;
    uint16_t* normed;  // operand order
    int shift;         // row r is normed into row r - shift, where the first `shift` rows are not wanted
    protocol::Counter ready, squares, done;
};

struct Stretch {
    int row, share;
    DEVICE explicit Stretch(int turn) {
        const int index = forget(cta_index() + turn * cfg::SMS);
        row = index / SHARES;
        share = index % SHARES;
    }
    DEVICE bool exists() const { return row < cfg::ROW_CAP; }
};

// Calls body(group, column) for the columns of a stretch that this thread has.
template <class Body>
DEVICE void for_stretch(const Stretch& s, Body body) {
#pragma unroll
    for (int group = 0; group < GROUPS; ++group) {
        const int local = (group * cfg::MATH_THREADS + thread_index()) * 4;
        if (local < COLUMNS) body(group, s.share * COLUMNS + local);
    }
}

// Four columns of the sublayer's output, bf16: of a row, and of the row before it, which is zero before the first.
struct Pair {
    float4 row, before;
};

// Four columns of a row, summed over the ranks.
template <class Point>
DEVICE float4 receive_sum(const Params& p, uint32_t epoch, int row, int column) {
    const int packet = column / 4;
    uint2 parts[cfg::RANKS];
    mailbox::receive<Point>(p, epoch, row, packet, parts, [&](int rank) {
        return mailbox::Name{true, rank, packet};
    });
    float4 total = unpack_bf16x4(parts[0]);
#pragma unroll
    for (int rank = 1; rank < cfg::RANKS; ++rank) total = plus(total, unpack_bf16x4(parts[rank]));
    return round_bf16(total);
}

template <class G, class Point>
DEVICE Pair output_pair(const Params& p, const Sublayer& sublayer, uint32_t epoch, int row, int column) {
    constexpr float4 ZERO{0.f, 0.f, 0.f, 0.f};
    if constexpr (cfg::RANKS > 1) {
        const float4 y = receive_sum<Point>(p, epoch, row, column);
        return {y, row > 0 ? receive_sum<Point>(p, epoch, row - 1, column) : ZERO};
    } else {
        const float4 y = round_bf16(sum_parts<G>(sublayer.output, row, column));
        return {y, row > 0 ? round_bf16(sum_parts<G>(sublayer.output, row - 1, column)) : ZERO};
    }
}

// The sublayer's last product: parts in memory, or packets to all ranks.
template <class G, class Point>
DEVICE void run_outputs(const Params& p, Ring& ring, float* partial, protocol::Counter counter, uint32_t epoch) {
    if constexpr (cfg::RANKS > 1) {
        static_assert(G::N % BLOCK_ROWS == 0, "all lanes of a warp have an output");
        run_product<G>(p, ring, [&](const DenseTask&, int, int row, int column, float sum) {
            row_mail::send_column<Point>(p, epoch, row, column, sum);
        });
    } else {
        run_product_to<G>(p, ring, partial, counter);
    }
}

template <class G, class Point>
DEVICE void add(const Params& p, const Sublayer& sublayer, uint32_t epoch, const Stretch& s, int turn,
                float4 (&h)[GROUPS]) {
    using namespace convolution;
    float squares = 0.f;
    for_stretch(s, [&](int group, int column) {
        uint16_t* at = p.residual + s.row * cfg::HIDDEN + column;
        const float4 before = load_bf16x4(at);
        const float d0 = global_load(output_tap(p, s.row, 0, column)),
                    d1 = global_load(output_tap(p, s.row, 1, column));
        const Pair y = output_pair<G, Point>(p, sublayer, epoch, s.row, column);
        const float4 branch = convolve(sublayer.base, OUTPUT, column, d0, d1, y.row, y.before);
        h[group] =
            round_bf16(float4{before.x + branch.x, before.y + branch.y, before.z + branch.z, before.w + branch.w});
        store_bf16x4(at, h[group]);
        squares += square_sum(h[group]);
    });
    squares = row_sum(squares, turn % 2);
    if (thread_index() == 0) global_store(p.row_squares + s.row * SHARES + s.share, squares);
}

DEVICE void norm(const Params& p, const Sublayer& sublayer, const Stretch& s, const float4 (&h)[GROUPS]) {
    const int to = (s.row + cfg::ROW_CAP - sublayer.shift) % cfg::ROW_CAP;
    if (s.row >= p.rows || s.row < sublayer.shift) {
        for_stretch(s, [&](int, int column) { tokens::clear(sublayer.normed, to, column); });
        return;
    }
    float squares = 0.f;
#pragma unroll
    for (int share = 0; share < SHARES; ++share) squares += global_load(p.row_squares + s.row * SHARES + share);
    const float scale = reciprocal_root(squares / cfg::HIDDEN + cfg::RMS_EPS);
    for_stretch(s, [&](int group, int column) {
        tokens::store(sublayer.normed, to, column, times(times(h[group], scale), load_bf16x4(sublayer.norm + column)));
    });
}

template <class G, class Point>
DEVICE void run(const Params& p, const Sublayer& sublayer, uint32_t epoch) {
    const bool busy = Stretch(0).exists();
    float4 h[TURNS][GROUPS] = {};
    if (busy && cfg::RANKS == 1) wait_counter_math(p, sublayer.ready, epoch);
#pragma unroll
    for (int turn = 0; turn < TURNS; ++turn) {
        const Stretch s(turn);
        if (s.exists() && s.row < p.rows) add<G, Point>(p, sublayer, epoch, s, turn, h[turn]);
    }
    arrive_math(p, sublayer.squares);
    if (busy) wait_counter_math(p, sublayer.squares, epoch);
#pragma unroll
    for (int turn = 0; turn < TURNS; ++turn) {
        const Stretch s(turn);
        if (s.exists()) norm(p, sublayer, s, h[turn]);
    }
    arrive_math(p, sublayer.done);
}

}  // namespace residual
