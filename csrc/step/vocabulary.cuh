// A vocabulary that ranks share: rank r has the ids from r VOCAB on. Lists of the best ids are merged on every rank.
#pragma once
#include "draft/points.cuh"
#include "top_k.cuh"

namespace vocabulary {

constexpr int IDS = cfg::VOCAB * cfg::RANKS;  // of all ranks
template <int K>
using List = top_k::List<K, IDS>;

DEVICE int first_id(const Params& p) { return cfg::RANKS > 1 ? p.rank * cfg::VOCAB : 0; }

// Every lane offers the score of `row`, one of this rank's rows of the head. The rows of a block that the head does not
// have are padding.
template <int K>
DEVICE void offer(const Params& p, List<K>& best, float score, int row) {
    if constexpr (cfg::VOCAB % WARP == 0) {
        best.offer(score, first_id(p) + row);
    } else {
        const bool there = row < cfg::VOCAB;
        best.offer(there ? score : -infinity(), there ? first_id(p) + row : IDS);
    }
}

// One warp, with the best of this rank; afterwards with the best of all, the same on every rank.
template <class Point, int K>
DEVICE void merge(const Params& p, uint32_t epoch, int row, List<K>& best) {
    if constexpr (cfg::RANKS > 1) {
        static_assert(Point::PACKETS == K, "one packet per entry");
        const int lane = lane_index();
        const bool entry = lane < K;
        if (entry) {
            const uint2 own{float_bits(best.value), static_cast<uint32_t>(best.id)};
            mailbox::send_to_all<Point>(p, epoch, row, lane, own);
        }
        uint2 lists[cfg::RANKS];
        mailbox::receive<Point>(p, epoch, row, lane, lists,
                                [&](int rank) { return mailbox::Name{entry, rank, lane}; });
        best = List<K>();
#pragma unroll
        for (int rank = 0; rank < cfg::RANKS; ++rank) {
            best.offer(entry ? bits_float(lists[rank].x) : -infinity(), entry ? static_cast<int>(lists[rank].y) : IDS);
        }
    }
}

}  // namespace vocabulary
