// top-k, top-p and min-p: the ids that stay are a prefix of the order by falling logit, ties by rising id.
// The prefix ends where a measure (how many ids, or their mass) reaches its goal. The end is found by narrowing a range
// of logits with passes over the row until few ids are left in it, and then among those.
#pragma once
#include "mass.cuh"

namespace filter {

using mass::Row;
using together::Team;

constexpr int LIST = cfg::LIST_CAP;  // ids a warp can put aside
constexpr int HALVINGS = 6;          // of the range of values, before ids are put aside

// Ids above the key stay; of those at the key, the ids up to last_tie. min_weight is on top.
struct Prefix {
    uint32_t key = 0;
    int last_tie = cfg::VOCAB;
    uint64_t min_weight = 0;

    DEVICE bool keeps(int id, float z) const {
        const uint32_t k = mass::key_of(z);
        return k > key || (k == key && id <= last_tie);
    }
    DEVICE uint64_t weight(const Row& row, int id, float z) const {
        if (!keeps(id, z)) return 0;
        const uint64_t w = row.weight(z);
        return w >= min_weight ? w : 0;
    }
};

// What an id adds to the measure.
template <bool MASS>
DEVICE uint64_t measure(const Row& row, float z) {
    if constexpr (MASS) return row.weight(z);
    return 1;
}

// Measure of the ids with a key of at least `key`, and how many they are. All CTAs of the row, like all that follows.
struct Above {
    uint64_t measure, count;
};
template <bool MASS>
DEVICE Above above(Team& team, const Row& row, uint32_t key) {
    uint64_t sum = 0, count = 0;
    mass::for_segments(team, [&](int segment) {
        mass::for_ids(row, segment, [&](int, float z) {
            if (mass::key_of(z) < key) return;
            sum += measure<MASS>(row, z);
            ++count;
        });
    });
    const auto all = team.sum({{sum, count, 0, 0}});
    return {all.at[0], all.at[1]};
}

DEVICE uint32_t list_at() { return cfg::LISTS_AT + warp_index() * LIST * 4; }

// Puts the keys in [low, high) aside, each warp its own. Returns how many this warp has, or LIST + 1.
DEVICE int put_aside(const Team& team, const Row& row, uint32_t low, uint32_t high) {
    int count = 0;
    mass::for_segments(team, [&](int segment) {
#pragma unroll
        for (int step = 0; step < mass::SEGMENT / WARP; ++step) {
            const int id = segment * mass::SEGMENT + step * WARP + lane_index();
            const uint32_t key = id < cfg::VOCAB ? mass::key_of(global_load(row.logits + id)) : 0u;
            const bool inside = id < cfg::VOCAB && key >= low && key < high;
            const uint32_t all = warp_ballot(inside);
            const int place = count + population_count(all & ((1u << lane_index()) - 1u));
            if (inside && place < LIST) shared_store(list_at() + place * 4, key);
            count += population_count(all);
            if (count > LIST) count = LIST + 1;
        }
    });
    warp_sync();
    return count;
}

// Measures of the listed ids at and above three keys at once.
template <bool MASS>
DEVICE together::Values above_three(Team& team, const Row& row, const uint32_t (&keys)[3], int listed) {
    together::Values mine{{0, 0, 0, 0}};
    const auto count = [&](uint32_t key, float z) {
        if (key < keys[0]) return;
        const uint64_t m = measure<MASS>(row, z);
        mine.at[0] += m;
        mine.at[1] += key >= keys[1] ? m : 0u;
        mine.at[2] += key >= keys[2] ? m : 0u;
    };
    for (int i = lane_index(); i < listed; i += WARP) {
        const uint32_t key = shared_load<uint32_t>(list_at() + i * 4);
        count(key, mass::of_key(key));
    }
    return team.sum(mine);
}

// The prefix whose measure first reaches `goal` (at least 1, at most the measure of all ids, which is `whole`).
template <bool MASS>
DEVICE Prefix reach(Team& team, const Row& row, uint64_t goal, uint64_t whole) {
    // Invariant: the ids from `low` on reach the goal, those from `high` on do not.
    uint32_t low = 0, high = mass::key_of(row.top) + 1u;
    Above at_low{whole, cfg::VOCAB}, at_high{0, 0};
    // Softcapped logits lie within 2 SOFTCAP of each other; without a cap the range is a guess and costs only time.
    float step = cfg::SOFTCAP > 0.f ? cfg::SOFTCAP : 32.f;
    float cut = row.top - step;
    constexpr uint64_t ROOM = static_cast<uint64_t>(LIST) * mass::WARPS * cfg::SHARES / 2;
    for (int halving = 0; halving < HALVINGS && at_low.count - at_high.count > ROOM; ++halving) {
        const uint32_t key = mass::key_of(cut);
        step /= 2;
        if (key <= low || key >= high) {
            cut += key <= low ? step : -step;
            continue;
        }
        const Above found = above<MASS>(team, row, key);
        const bool reached = found.measure >= goal;
        (reached ? low : high) = key;
        (reached ? at_low : at_high) = found;
        cut += reached ? step : -step;
    }
    const int listed = put_aside(team, row, low, high);
    const bool fits = team.sum(listed > LIST ? 1u : 0u) == 0u;
    const uint64_t unlisted = at_high.measure;
    uint64_t reached = at_low.measure, beyond = at_high.measure;  // of the ids from `low` on, and from `high` on
    const auto narrow = [&](uint32_t key, uint64_t found) {
        if (key <= low || key >= high) return;
        if (found >= goal) {
            low = key;
            reached = found;
        } else {
            high = key;
            beyond = found;
        }
    };
    while (high - low > 1u) {
        const uint32_t quarter = (high - low) / 4, half = low + (high - low) / 2;
        if (fits) {
            const uint32_t keys[3] = {low + quarter, half, half + quarter};
            const together::Values found = above_three<MASS>(team, row, keys, listed);
#pragma unroll
            for (int i = 0; i < 3; ++i) narrow(keys[i], unlisted + found.at[i]);
        } else {
            narrow(half, above<MASS>(team, row, half).measure);
        }
    }
    // Ids at the key `low` stay until the goal is reached; all of them have the same measure.
    const uint64_t each = measure<MASS>(row, mass::of_key(low));
    const uint64_t ties = (reached - beyond) / each, needed = (goal - beyond + each - 1) / each;
    Prefix prefix;
    prefix.key = low;
    if (needed < ties) {
        const auto tie = [&](int, float z) -> uint64_t { return mass::key_of(z) == low ? 1 : 0; };
        mass::sum_segments(team, row, tie);
        int last = 0;
        if (team.leads()) {
            mass::fetch_segments(team);
            last = mass::locate(row, needed - 1, tie);
        }
        prefix.last_tie = static_cast<int>(team.sum(team.leads() && thread_index() == 0 ? last : 0));
    }
    return prefix;
}

}  // namespace filter
