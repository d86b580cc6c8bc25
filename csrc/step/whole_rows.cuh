// Rows of logits for the accept rule. Of several ranks each has the logits of its own ids; a sampled request needs whole
// rows, which every rank then has, the same bits.
#pragma once
#include "layer/mailbox.cuh"
#include "together.cuh"

namespace mailbox {

// Two neighbouring logits to a packet.
struct Logits {
    static constexpr int AT = 0, PACKETS = cfg::LOCAL_VOCAB / 2;
    static constexpr protocol::Site SITE = protocol::Site::LOGITS_MAIL;
};
static_assert(cfg::RANKS == 1 || cfg::LOCAL_VOCAB % 2 == 0, "a rank's ids are whole packets");

}  // namespace mailbox

namespace whole_rows {

DEVICE const float* row(const Params& p, int row) {
    const float* logits = cfg::RANKS > 1 ? p.whole_logits : p.logits;
    return logits + static_cast<int64_t>(row) * cfg::VOCAB;
}

// The logit of a row's greedy token, which is `best`; needs no whole rows.
DEVICE float top(const Params& p, int row, int64_t best) {
    if constexpr (cfg::RANKS > 1) return global_load(p.greedy_logits + row);
    return global_load(p.logits + static_cast<int64_t>(row) * cfg::VOCAB + best);
}

// All CTAs of the row: this rank's part to all ranks, and all ranks' parts into the whole row.
DEVICE void gather(const Params& p, together::Team& team, uint32_t epoch) {
    if constexpr (cfg::RANKS > 1) {
        constexpr int PACKETS = mailbox::Logits::PACKETS, STEP = cfg::SHARES * cfg::THREADS;
        const int first = team.share * cfg::THREADS + thread_index();
        const float* own = p.logits + static_cast<int64_t>(team.row) * cfg::LOCAL_VOCAB;
#pragma unroll 4
        for (int packet = first; packet < PACKETS; packet += STEP) {
            const float2 pair = global_load(reinterpret_cast<const float2*>(own + 2 * packet));
            mailbox::send_to_all<mailbox::Logits>(p, epoch, team.row, packet,
                                                  uint2{float_bits(pair.x), float_bits(pair.y)});
        }
        float* whole = p.whole_logits + static_cast<int64_t>(team.row) * cfg::VOCAB;
#pragma unroll 1
        for (int packet = first; packet < PACKETS; packet += STEP) {
            uint2 pairs[cfg::RANKS];
            mailbox::receive<mailbox::Logits>(p, epoch, team.row, packet, pairs,
                                              [&](int rank) { return mailbox::Name{true, rank, packet}; });
#pragma unroll
            for (int rank = 0; rank < cfg::RANKS; ++rank) {
                global_store(reinterpret_cast<float2*>(whole + rank * cfg::LOCAL_VOCAB + 2 * packet),
                             float2{bits_float(pairs[rank].x), bits_float(pairs[rank].y)});
            }
        }
        team.sum(0u);  // whoever comes back from it sees what all CTAs of the row have stored
    }
}

}  // namespace whole_rows
