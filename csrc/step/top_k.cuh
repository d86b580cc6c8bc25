// The best scores with their ids, kept in order over the lanes of a warp. Ties go to the lower id.
#pragma once
#include "instr/convert.cuh"
#include "instr/warp.cuh"

namespace top_k {

DEVICE bool better(float value, int id, float other, int other_id) {
    return value > other || (value == other && id < other_id);
}

// Lane i < K has the i-th best of what was offered; NOBODY is an id above all others.
template <int K, int NOBODY>
struct List {
    static_assert(K <= WARP, "one entry per lane");
    float value = -infinity();
    int id = NOBODY;

    // Every lane offers one candidate.
    DEVICE void offer(float candidate, int candidate_id) {
        uint32_t pending = warp_ballot(beats_last(candidate, candidate_id));
        while (pending != 0u) {
            const int source = population_count((pending & (0u - pending)) - 1u);
            pending &= pending - 1u;
            insert(bits_float(shuffle(float_bits(candidate), source)),
                   static_cast<int>(shuffle(static_cast<uint32_t>(candidate_id), source)));
        }
    }

  private:
    DEVICE bool beats_last(float candidate, int candidate_id) const {
        const float last = bits_float(shuffle(float_bits(value), K - 1));
        return better(candidate, candidate_id, last, static_cast<int>(shuffle(static_cast<uint32_t>(id), K - 1)));
    }
    DEVICE void insert(float candidate, int candidate_id) {
        const int lane = lane_index(), before = lane > 0 ? lane - 1 : 0;
        const int place = population_count(warp_ballot(lane < K && better(value, id, candidate, candidate_id)));
        const float value_before = bits_float(shuffle(float_bits(value), before));
        const int id_before = static_cast<int>(shuffle(static_cast<uint32_t>(id), before));
        if (lane > place) {
            value = value_before;
            id = id_before;
        } else if (lane == place) {
            value = candidate;
            id = candidate_id;
        }
    }
};

}  // namespace top_k
