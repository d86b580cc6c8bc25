// What a draft's probability is worth, bit for bit as in sgl_muse_mega.speculative.calibration: conditionals of the
// lattice and their calibration from outcomes, in fp32 operations that are rounded one by one.
#pragma once
#include "instr/convert.cuh"
#include "instr/warp.cuh"
#include "request.cuh"

namespace calibration {

constexpr int K = cfg::SELECTOR_K;
constexpr int GROUPS = 4, BINS = 16, CELLS = GROUPS * BINS;
constexpr int ONE = 1 << 16, LIMIT = 1 << 26;
static_assert(CELLS == 2 * WARP, "a lane looks after two cells");

// e^x for x <= 0: 2^n p(f), p by Horner's scheme.
DEVICE float power_of_e(float x) {
    constexpr float COEFFICIENTS[7] = {1.5403530393381608e-4f, 1.3333558146428443e-3f, 9.618129107628477e-3f,
                                       5.550410866482158e-2f,  2.402265069591007e-1f,  6.931471805599453e-1f,
                                       1.f};
    if (!(x >= -80.f)) return 0.f;
    const float scaled = rounded_product(x, 1.4426950408889634f);
    const float whole = round_down(rounded_sum(scaled, 0.5f)), rest = rounded_sum(scaled, -whole);
    float value = COEFFICIENTS[0];
#pragma unroll
    for (int i = 1; i < 7; ++i) value = rounded_sum(rounded_product(value, rest), COEFFICIENTS[i]);
    return rounded_product(value, bits_float(static_cast<uint32_t>(static_cast<int>(whole) + 127) << 23));
}

// q of the candidates of one lattice row, by one thread.
DEVICE void conditionals(const float* scores, float temperature, float (&q)[K]) {
    float top = -infinity(), total = 0.f;
#pragma unroll
    for (int c = 0; c < K; ++c) {
        q[c] = rounded_quotient(global_load(scores + c), temperature);
        top = q[c] > top ? q[c] : top;
    }
#pragma unroll
    for (int c = 0; c < K; ++c) {
        q[c] = power_of_e(rounded_sum(q[c], -top));
        total = rounded_sum(total, q[c]);
    }
#pragma unroll
    for (int c = 0; c < K; ++c) q[c] = total > 0.f ? rounded_quotient(q[c], total) : 0.f;
}

// The request's temperature, 1 for greedy.
DEVICE float temperature(const Params& p) {
    return request::greedy(p) ? 1.f : static_cast<float>(request::number(p, protocol::Request::TEMPERATURE));
}

// The cell of a draft `depth` rows behind the anchor, from 1 to 15.
DEVICE int cell(int depth, float q) {
    const int group = depth >= 8 ? 3 : depth >= 4 ? 2 : depth >= 2 ? 1 : 0;
    const int bin = static_cast<int>(rounded_product(q, static_cast<float>(BINS)));
    return group * BINS + (bin < BINS - 1 ? bin : BINS - 1);
}

// accepted / expected of a cell.
DEVICE float ratio(const Params& p, int cell) {
    const uint2 counts = global_load(reinterpret_cast<const uint2*>(p.calibration) + cell);
    return rounded_quotient(static_cast<float>(counts.x), static_cast<float>(counts.y));
}
DEVICE float worth(float q, float ratio) {
    const float product = rounded_product(q, ratio);
    return product < 1.f ? product : 1.f;
}

// One warp, lane = row of the step: `trial` where the row's turn came, `kept` with what outcome.
DEVICE void learn(const Params& p, int rows, int depth, float q, bool trial, bool kept) {
    const uint32_t where = static_cast<uint32_t>(trial ? cell(depth, q) : CELLS);
    const uint32_t accepted = kept ? ONE : 0u;
    const uint32_t expected = static_cast<uint32_t>(static_cast<int>(rounded_product(q, static_cast<float>(ONE))));
    uint4* cells = reinterpret_cast<uint4*>(p.calibration) + lane_index();
    uint4 mine = global_load(cells);
    for (int row = 1; row < rows; ++row) {
        const uint32_t from = shuffle(where, row), more = shuffle(accepted, row), hoped = shuffle(expected, row);
        if (from / 2 != static_cast<uint32_t>(lane_index())) continue;
        (from % 2 == 0 ? mine.x : mine.z) += more;
        (from % 2 == 0 ? mine.y : mine.w) += hoped;
    }
    if (mine.x >= LIMIT || mine.y >= LIMIT) {  // old outcomes fade
        mine.x = (mine.x + 1u) >> 1;
        mine.y = (mine.y + 1u) >> 1;
    }
    if (mine.z >= LIMIT || mine.w >= LIMIT) {
        mine.z = (mine.z + 1u) >> 1;
        mine.w = (mine.w + 1u) >> 1;
    }
    global_store(cells, mine);
}

}  // namespace calibration
