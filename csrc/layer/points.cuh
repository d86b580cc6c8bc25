// The exchange points of the target's kernels.
#pragma once
#include "mailbox.cuh"
#include "products.cuh"

namespace mailbox {

// Four neighbouring columns of a row to a packet.
struct OProjSum {
    static constexpr int AT = cfg::O_PROJ_MAIL_AT, PACKETS = cfg::HIDDEN / 4;
    static constexpr protocol::Site SITE = protocol::Site::O_PROJ_MAIL;
};
struct PreProjRow {
    static constexpr int AT = cfg::PRE_PROJ_MAIL_AT, PACKETS = PreProj::N / 4;
    static constexpr protocol::Site SITE = protocol::Site::PRE_PROJ_MAIL;
};
struct ExpertSum {
    static constexpr int AT = cfg::EXPERT_MAIL_AT, PACKETS = cfg::MOE_HIDDEN / 4;
    static constexpr protocol::Site SITE = protocol::Site::EXPERT_MAIL;
};
struct PostProjRow {
    static constexpr int AT = cfg::POST_PROJ_MAIL_AT, PACKETS = PostProj::N / 4;
    static constexpr protocol::Site SITE = protocol::Site::POST_PROJ_MAIL;
};

struct EmbeddingRow {
    static constexpr int AT = cfg::EMBEDDING_MAIL_AT, PACKETS = cfg::HIDDEN / 4;
    static constexpr protocol::Site SITE = protocol::Site::EMBEDDING_MAIL;
};
struct BestToken {  // a score and an id to a packet
    static constexpr int AT = cfg::BEST_TOKEN_MAIL_AT, PACKETS = 1;
    static constexpr protocol::Site SITE = protocol::Site::BEST_TOKEN_MAIL;
};

}  // namespace mailbox
