// Section 7.3: candidates of each slot, the lattice, and the walk. Slot s is row s of this launch, row s + 1 of the
// block.
#pragma once
#include "draft/product.cuh"
#include "layer/row.cuh"
#include "philox.cuh"
#include "request.cuh"
#include "vocabulary.cuh"

namespace selector {

constexpr int K = cfg::SELECTOR_K;
constexpr int LISTS = 2 * cfg::SMS;  // per slot: 64 threads, two warps, of every CTA look at the slot's scores
using List = vocabulary::List<K>;

static_assert(cfg::RANK % 4 == 0, "codebook rows are read four elements at a time");

// Scores of the head, rounded to bf16, into each warp's lists; the lists go to memory.
DEVICE void run_scores(const Params& p, Ring& ring) {
    List best[ROW_TURNS];
    run_product<LmHead>(p, ring, [&](const DenseTask&, int turn, int, int row, float score) {
        vocabulary::offer(p, best[turn], round_bf16(score), row);
    });
#pragma unroll
    for (int turn = 0; turn < ROW_TURNS; ++turn) {
        const int slot = thread_index() / BLOCK_ROWS + ROWS_AT_ONCE * turn;
        if (slot >= p.rows || lane_index() >= K) continue;
        const int64_t at = (static_cast<int64_t>(slot) * LISTS + 2 * cta_index() + warp_index() % 2) * K + lane_index();
        global_store(p.list_scores + at, best[turn].value);
        global_store(p.list_ids + at, best[turn].id);
    }
    arrive_math(p, protocol::Counter::SCORES);
}

// Merges a slot's lists: candidates [slot, K] and U = softcap(z). All math warps of the owner.
DEVICE void choose(const Params& p, uint32_t epoch, int slot) {
    const int64_t first = static_cast<int64_t>(slot) * LISTS * K;
    List best;
    for (int i = warp_index() * WARP; i < LISTS * K; i += cfg::MATH_THREADS) {
        const bool there = i + lane_index() < LISTS * K;
        const int64_t at = first + (there ? i + lane_index() : 0);
        best.offer(there ? global_load(p.list_scores + at) : -infinity(),
                   there ? global_load(p.list_ids + at) : vocabulary::IDS);
    }
    const uint32_t mine = cfg::REDUCE_AT + (warp_index() * WARP + lane_index()) * 8;
    shared_store(mine, best.value);
    shared_store(mine + 4, best.id);
    math_barrier();
    if (warp_index() != 0) return;
    for (int warp = 1; warp < cfg::MATH_WARPS; ++warp) {
        const uint32_t at = cfg::REDUCE_AT + (warp * WARP + lane_index()) * 8;
        const bool there = lane_index() < K;
        best.offer(there ? shared_load<float>(at) : -infinity(), there ? shared_load<int>(at + 4) : vocabulary::IDS);
    }
    vocabulary::merge<mailbox::Candidates>(p, epoch, slot, best);
    if (lane_index() < K) {
        const float scaled = best.value * cfg::OUTPUT_MULTIPLIER;
        const int id = best.id < vocabulary::IDS ? best.id : vocabulary::IDS - 1;  // rows of NaN have no best
        global_store(p.candidates + slot * K + lane_index(), static_cast<int64_t>(id));
        global_store(p.candidate_scores + slot * K + lane_index(),
                     cfg::SOFTCAP * hyperbolic_tangent(scaled / cfg::SOFTCAP));
    }
}

// S[p, c] = U[c] + <A[pred_p] . e, B[cand_c]>: products in fp32, their sum in fp64, one addition in fp32.
DEVICE void score_pairs(const Params& p, int slot) {
    for (int i = thread_index(); i < cfg::RANK / 4; i += cfg::MATH_THREADS) {
        shared_store(cfg::REDUCE_AT + i * 16, round_bf16(sum_parts<SelectorState>(p.selector_partial, slot, i * 4)));
    }
    math_barrier();
    for (int pair = thread_index(); pair < K * K; pair += cfg::MATH_THREADS) {
        const int before = pair / K, candidate = pair % K;
        const int64_t predecessor =
            slot == 0 ? global_load(p.token_ids) : global_load(p.candidates + (slot - 1) * K + before);
        const uint16_t* a = p.predecessors + predecessor * cfg::RANK;
        const uint16_t* b = p.successors + global_load(p.candidates + slot * K + candidate) * cfg::RANK;
        double sum = 0.;
#pragma unroll 8
        for (int i = 0; i < cfg::RANK; i += 4) {
            const float4 left = times(load_bf16x4(a + i), shared_load<float4>(cfg::REDUCE_AT + i * 4));
            const float4 right = load_bf16x4(b + i);
            sum += static_cast<double>(left.x) * right.x;
            sum += static_cast<double>(left.y) * right.y;
            sum += static_cast<double>(left.z) * right.z;
            sum += static_cast<double>(left.w) * right.w;
        }
        global_store(p.lattice + slot * K * K + pair,
                     global_load(p.candidate_scores + slot * K + candidate) + static_cast<float>(sum));
    }
}

// First maximum; NaN counts as the maximum, and the first NaN wins. Lane c has S[p, c].
DEVICE int pick_greedy(float score) {
    const uint32_t none = warp_ballot(lane_index() < K && score != score);
    if (none != 0u) return population_count((none & (0u - none)) - 1u);
    float value = lane_index() < K ? score : -infinity();
    int id = lane_index();
#pragma unroll
    for (int step = 16; step > 0; step /= 2) {
        const float other = shuffle_xor(value, step);
        const int other_id = shuffle_xor(id, step);
        if (top_k::better(other, other_id, value, id)) {
            value = other;
            id = other_id;
        }
    }
    return id;
}

// Inverse transform on softmax(S[p, .] / temperature), sums from the first candidate on; `probability` is q.
DEVICE int pick_sampled(float score, float temperature, float uniform, float& probability) {
    const float scaled = lane_index() < K ? score / temperature : -infinity();
    float top = scaled;
#pragma unroll
    for (int step = 16; step > 0; step /= 2) {
        const float other = shuffle_xor(top, step);
        top = other > top ? other : top;
    }
    const float weight = lane_index() < K ? exponential(scaled - top) : 0.f;
    float total = 0.f;
#pragma unroll
    for (int c = 0; c < K; ++c) total += bits_float(shuffle(float_bits(weight), c));
    probability = weight / total;
    float running = 0.f;
    int passed = 0;
#pragma unroll
    for (int c = 0; c < K; ++c) {
        running += bits_float(shuffle(float_bits(probability), c));
        passed += running <= uniform ? 1 : 0;
    }
    return passed < K - 1 ? passed : K - 1;
}

// One warp. The tokens go to rows 1 .. of the verify step's inputs, q to the accept rule.
DEVICE void walk(const Params& p) {
    const bool greedy = request::greedy(p);
    const float temperature = static_cast<float>(request::number(p, protocol::Request::TEMPERATURE));
    const uint64_t seed = request::seed(p), position = static_cast<uint64_t>(global_load(p.length)) + 1u;
    const int lane = lane_index() < K ? lane_index() : 0;
    int path = 0;
    for (int slot = 0; slot < p.rows; ++slot) {
        const float score = global_load(p.lattice + (slot * K + path) * K + lane);
        float probability;
        if (greedy) {
            path = pick_greedy(score);
            probability = lane_index() == path ? 1.f : 0.f;
        } else {
            path = pick_sampled(score, temperature, philox::uniform(seed, position + slot, philox::DRAFT), probability);
        }
        if (lane_index() < K) global_store(p.probabilities + slot * K + lane_index(), probability);
        if (lane_index() == 0) global_store(p.token_ids + 1 + slot, global_load(p.candidates + slot * K + path));
    }
}

}  // namespace selector
