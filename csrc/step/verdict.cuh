// Section 8, sampled: whether the target keeps the draft after a row, and the token that follows if it does not.
#pragma once
#include "filter.cuh"
#include "philox.cuh"
#include "whole_rows.cuh"

namespace verdict {

using protocol::Request;

enum Kind : int64_t { REJECTED = 0, ACCEPTED = 1, BROKEN = 2 };

struct Verdict {
    int64_t kind, token;
};

// Rows of the launch that count.
DEVICE int counted(const Params& p) {
    const int live = global_load(p.live);
    return live < p.rows ? live : p.rows;
}

// Which ids the request's filters leave, in the order top-k, top-p, min-p.
DEVICE filter::Prefix choose_prefix(const Params& p, mass::Team& team, const mass::Row& row) {
    filter::Prefix prefix;
    const int64_t top_k = request::word(p, Request::TOP_K);
    if (top_k > 0 && top_k < cfg::VOCAB)
        prefix = filter::reach<false>(team, row, static_cast<uint64_t>(top_k), cfg::VOCAB);
    const double top_p = request::number(p, Request::TOP_P);
    if (top_p < 1.) {
        // The mass that counts is that of what top-k left; its order is the beginning of the whole order.
        const uint64_t whole = filter::above<true>(team, row, 0u).measure;
        const uint64_t total = top_k > 0 && top_k < cfg::VOCAB
                                   ? mass::sum_segments(
                                         team, row, [&](int id, float z) { return prefix.weight(row, id, z); })
                                   : whole;
        const double share = top_p * static_cast<double>(total);
        uint64_t goal = static_cast<uint64_t>(share);
        if (static_cast<double>(goal) < share) ++goal;
        goal = goal < 1u ? 1u : (goal < total ? goal : total);
        prefix = filter::reach<true>(team, row, goal, whole);
    }
    const double least = request::number(p, Request::MIN_P) * static_cast<double>(mass::ONE);
    prefix.min_weight = static_cast<uint64_t>(least);
    if (static_cast<double>(prefix.min_weight) < least) ++prefix.min_weight;
    return prefix;
}

// The candidates' share of the proposal, in shared memory: ids, and how much of an id's weight it takes away.
DEVICE uint32_t cut_at(int candidate) { return cfg::CUTS_AT + candidate * 16; }

DEVICE uint64_t cut_of(int id) {
    uint64_t cut = 0;
    for (int c = 0; c < cfg::SELECTOR_K; ++c) {
        if (shared_load<int>(cut_at(c)) == id) cut += shared_load<uint64_t>(cut_at(c) + 8);
    }
    return cut;
}

// Fills the cuts, takes them off the segments' sums, and returns what they come to. The leader's threads.
DEVICE uint64_t take_cuts(const Params& p, const mass::Row& row, const filter::Prefix& prefix, int slot,
                          uint64_t total) {
    if (thread_index() == 0) {
        uint64_t sum = 0;
        for (int c = 0; c < cfg::SELECTOR_K; ++c) {
            const int id = static_cast<int>(global_load(p.candidates + slot * cfg::SELECTOR_K + c));
            const double q = global_load(p.probabilities + slot * cfg::SELECTOR_K + c);
            const uint64_t proposed = static_cast<uint64_t>(q * static_cast<double>(total));
            const uint64_t weight = prefix.weight(row, id, global_load(row.logits + id));
            const uint64_t cut = proposed < weight ? proposed : weight;
            shared_store(cut_at(c), id);
            shared_store(cut_at(c) + 8, cut);
            sum += cut;
        }
        if (sum < total) {  // nothing left, which only rounding can cause: the target's own distribution (D-40)
            for (int c = 0; c < cfg::SELECTOR_K; ++c) {
                const uint32_t segment = cfg::SEGMENTS_AT + shared_load<int>(cut_at(c)) / mass::SEGMENT * 8;
                shared_store(segment, shared_load<uint64_t>(segment) - shared_load<uint64_t>(cut_at(c) + 8));
            }
        } else {
            sum = 0;
            for (int c = 0; c < cfg::SELECTOR_K; ++c) shared_store(cut_at(c) + 8, uint64_t{0});
        }
        shared_store(cfg::FOUND_AT + 8, sum);
    }
    mass::cta_barrier();
    return shared_load<uint64_t>(cfg::FOUND_AT + 8);
}

// u q(x) total < weight(x), and q(x) > 0.
DEVICE bool keeps_draft(const Params& p, const mass::Row& row, const filter::Prefix& prefix, int slot, uint64_t total,
                        uint32_t bits, int64_t token) {
    double q = 0.;
    for (int c = 0; c < cfg::SELECTOR_K; ++c) {
        if (global_load(p.candidates + slot * cfg::SELECTOR_K + c) == token) {
            q += global_load(p.probabilities + slot * cfg::SELECTOR_K + c);
        }
    }
    const int id = static_cast<int>(token);
    const uint64_t weight = prefix.weight(row, id, global_load(row.logits + id));
    return q > 0. && bits * 0x1p-24 * q * static_cast<double>(total) < static_cast<double>(weight);
}

// All CTAs of the row; the leader's threads get the verdict.
DEVICE Verdict judge(const Params& p, mass::Team& team) {
    const int slot = team.row;
    const int64_t best = global_load(p.greedy_ids + slot);
    if (best < 0 || best >= cfg::VOCAB) return {BROKEN, 0};
    const float* logits = whole_rows::row(p, slot);
    const float top = global_load(logits + best);
    const mass::Row row{logits, top, static_cast<float>(1. / request::number(p, Request::TEMPERATURE))};
    const filter::Prefix prefix = choose_prefix(p, team, row);
    bool broken = !(top < infinity() && top > -infinity());
    const uint64_t total = mass::sum_segments(team, row, [&](int id, float z) {
        broken = broken || z != z;
        return prefix.weight(row, id, z);
    });
    if (team.sum(broken ? 1u : 0u) != 0u) return {BROKEN, 0};
    if (!team.leads()) return {REJECTED, 0};
    mass::fetch_segments(team);

    const int depth = p.nodes > 0 ? global_load(p.depths + slot) : slot;
    const uint64_t seed = request::seed(p), position = static_cast<uint64_t>(global_load(p.length)) + 1u + depth;
    const uint32_t draw = philox::bits(seed, position, philox::SAMPLE);
    if (p.nodes > 0 || slot + 1 >= counted(p)) {  // a tree's rows leave it to the draw
        return {REJECTED, mass::locate(row, mass::fraction(draw, total),
                                       [&](int id, float z) { return prefix.weight(row, id, z); })};
    }
    const int64_t token = global_load(p.token_ids + slot + 1);
    const uint32_t bits = philox::bits(seed, position, philox::ACCEPT);
    if (keeps_draft(p, row, prefix, slot, total, bits, token)) return {ACCEPTED, token};
    const uint64_t left = total - take_cuts(p, row, prefix, slot, total);
    return {REJECTED, mass::locate(row, mass::fraction(draw, left),
                                   [&](int id, float z) { return prefix.weight(row, id, z) - cut_of(id); })};
}

}  // namespace verdict
