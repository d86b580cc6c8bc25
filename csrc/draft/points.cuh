// The exchange points of the draft's kernels and of the target's head in fragment order.
#pragma once
#include "layer/mailbox.cuh"
#include "products.cuh"

namespace mailbox {

// Four neighbouring columns of a row to a packet.
struct Anchor {
    static constexpr int AT = cfg::ANCHOR_MAIL_AT, PACKETS = cfg::HIDDEN / 4;
    static constexpr protocol::Site SITE = protocol::Site::ANCHOR_MAIL;
};
struct DraftOutput {
    static constexpr int AT = cfg::DRAFT_OUTPUT_MAIL_AT, PACKETS = cfg::HIDDEN / 4;
    static constexpr protocol::Site SITE = protocol::Site::DRAFT_OUTPUT_MAIL;
};
struct DraftDown {
    static constexpr int AT = cfg::DRAFT_DOWN_MAIL_AT, PACKETS = cfg::HIDDEN / 4;
    static constexpr protocol::Site SITE = protocol::Site::DRAFT_DOWN_MAIL;
};
struct FusionRow {
    static constexpr int AT = cfg::FUSION_MAIL_AT, PACKETS = Fusion::N / 4;
    static constexpr protocol::Site SITE = protocol::Site::FUSION_MAIL;
};

// A score and an id to a packet, the best first.
struct Candidates {
    static constexpr int AT = cfg::CANDIDATE_MAIL_AT, PACKETS = cfg::SELECTOR_K;
    static constexpr protocol::Site SITE = protocol::Site::CANDIDATE_MAIL;
};
struct BestToken {
    static constexpr int AT = cfg::BEST_TOKEN_MAIL_AT, PACKETS = 1;
    static constexpr protocol::Site SITE = protocol::Site::BEST_TOKEN_MAIL;
};

}  // namespace mailbox
