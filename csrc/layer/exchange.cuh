// Exchange points: where a rank's part of a row becomes the row of all ranks. o_proj and the experts' combine are
// summed, bf16 on the wire and fp32 in rank order; the columns of pre_expert_proj and post_expert_proj are gathered.
// Every rank does the same with the same packets, so all end with the same bits.
#pragma once
#include "points.cuh"
#include "row_mail.cuh"

// A single rank holds everything: row operations read the products' parts themselves.
struct OneRank {
    // Rows of embedding and head before this rank's.
    DEVICE static int first_token(const Params&) { return 0; }
    // E1: body(group, column, four columns of a token's embedding).
    template <class Body>
    DEVICE static void embedding(const Params& p, uint32_t, int, int64_t token, Body body) {
        const uint16_t* source = p.embedding + token * cfg::HIDDEN;
        for_columns<cfg::HIDDEN>([&](int i, int column) { body(i, column, load_bf16x4(source + column)); });
    }
    // One warp has this rank's best token of a row in all lanes; lanes get offer(value, id) of others.
    template <class Offer>
    DEVICE static void best_token(const Params&, uint32_t, int, float, int, Offer) {}

    struct Finish : StorePart {  // of the bf16 products
        DEVICE Finish(const Params&, const StorePart& store) : StorePart(store) {}
    };
    DEVICE static Finish finish_o_proj(const Params& p, uint32_t) { return {p, {p.o_partial, OProj::PARTS}}; }
    DEVICE static void arrive_o_proj(const Params& p) { arrive_math(p, protocol::Counter::O_PROJ); }
    DEVICE static void wait_o_proj(const Params& p, uint32_t epoch) {
        wait_counter_math(p, protocol::Counter::O_PROJ, epoch);
    }
    // A8: body(column, four columns of the attention branch), bf16 after the sum over ranks.
    template <class Body>
    DEVICE static void attention_branch(const Params& p, uint32_t, int row, Body body) {
        sum_row_parts<OProj>(p.o_partial, row,
                             [&](int, int column, const float4& sum) { body(column, pack_bf16x4(sum)); });
    }
    // F6: columns of the row before the experts, bf16.
    template <class Body>
    DEVICE static void expert_row(const Params& p, uint32_t, int row, Body body) {
        sum_row_parts<PreProj>(p.pre_partial, row,
                               [&](int i, int column, const float4& sum) { body(i, column, round_bf16(sum)); });
    }
    // F13: body(column, the sum of the ranks' combined experts), bf16; local(group, column) is this rank's F12.
    template <class Local, class Body>
    DEVICE static void combined_experts(const Params&, uint32_t, int, Local local, Body body) {
        for_columns<cfg::MOE_HIDDEN>([&](int i, int column) { body(column, pack_bf16x4(local(i, column))); });
    }
    // F14: the expert branch, bf16.
    template <class Body>
    DEVICE static void expert_branch(const Params& p, uint32_t, int row, Body body) {
        sum_row_parts<PostProj>(p.post_partial, row,
                                [&](int i, int column, const float4& sum) { body(i, column, round_bf16(sum)); });
    }
};

// Several ranks, or one that plays all of them (loop-back): the same code, other addresses.
struct ManyRanks {
    DEVICE static int first_token(const Params& p) { return p.rank * cfg::VOCAB; }

    // The rank that holds the token sends its row.
    template <class Body>
    DEVICE static void embedding(const Params& p, uint32_t epoch, int row, int64_t token, Body body) {
        const int owner = static_cast<int>(token) / cfg::VOCAB;
        if (owner == p.rank) {
            const uint16_t* source = p.embedding + (token - first_token(p)) * cfg::HIDDEN;
            row_mail::send<mailbox::EmbeddingRow>(p, epoch, row,
                                                  [&](int, int column) { return load_bf16x4(source + column); });
        }
        row_mail::collect<mailbox::EmbeddingRow, 1>(p, epoch, row, owner, body);
    }
    template <class Offer>
    DEVICE static void best_token(const Params& p, uint32_t epoch, int row, float value, int id, Offer offer) {
        const int lane = lane_index();
        const uint2 own{float_bits(value), static_cast<uint32_t>(id)};
        if (lane < cfg::RANKS) mailbox::send<mailbox::BestToken>(p, epoch, row, 0, own, lane);
        uint2 best[1] = {own};
        mailbox::receive<mailbox::BestToken>(p, epoch, row, 0, best,
                                             [&](int) { return mailbox::Name{lane < cfg::RANKS, lane, 0}; });
        offer(bits_float(best[0].x), static_cast<int>(best[0].y));
    }

    // o_proj: a block of outputs is one CTA's, which sends it to all ranks as soon as it has it. One piece of code
    // serves this product and the others.
    struct Finish : StorePart {
        const Params& p;
        uint32_t epoch;

        DEVICE Finish(const Params& p, const StorePart& store, uint32_t epoch = 0)
            : StorePart(store), p(p), epoch(epoch) {}
        DEVICE void operator()(const DenseTask& task, int turn, int row, int weight_row, float sum) const {
            if (partial == nullptr) {
                row_mail::send_column<mailbox::OProjSum>(p, epoch, row, weight_row, sum);
            } else {
                StorePart::operator()(task, turn, row, weight_row, sum);
            }
        }
    };
    DEVICE static Finish finish_o_proj(const Params& p, uint32_t epoch) {
        static_assert(cfg::HIDDEN % BLOCK_ROWS == 0, "all lanes of a warp have an output");
        return {p, {nullptr, 0}, epoch};
    }
    DEVICE static void arrive_o_proj(const Params&) {}
    DEVICE static void wait_o_proj(const Params&, uint32_t) {}

    template <class Body>
    DEVICE static void attention_branch(const Params& p, uint32_t epoch, int row, Body body) {
        row_mail::sum<mailbox::OProjSum>(p, epoch, row, body);
    }
    template <class Body>
    DEVICE static void expert_row(const Params& p, uint32_t epoch, int row, Body body) {
        row_mail::gather<mailbox::PreProjRow>(p, epoch, row, body, [&](int, int column) {
            return sum_parts<PreProj>(p.pre_partial, row, column);
        });
    }
    template <class Local, class Body>
    DEVICE static void combined_experts(const Params& p, uint32_t epoch, int row, Local local, Body body) {
        row_mail::send<mailbox::ExpertSum>(p, epoch, row, local);
        row_mail::sum<mailbox::ExpertSum>(p, epoch, row, body);
    }
    template <class Body>
    DEVICE static void expert_branch(const Params& p, uint32_t epoch, int row, Body body) {
        row_mail::gather<mailbox::PostProjRow>(p, epoch, row, body, [&](int, int column) {
            return sum_parts<PostProj>(p.post_partial, row, column);
        });
    }
};

template <bool SEVERAL>
struct ExchangeOf {
    using Type = OneRank;
};
template <>
struct ExchangeOf<true> {
    using Type = ManyRanks;
};
using Exchange = ExchangeOf<(cfg::RANKS > 1)>::Type;

template <class G, class Finish>
DEVICE void run_product(const Params& p, Ring& ring, Finish finish) {
    const TaskList tasks = task_list<G>();
    const Ring from = ring;
    ring.skip(tasks.left);  // what the call will take up: a value that comes back would pass through memory
    run_tasks_shared<G::CHUNK, G::WIDE ? 4 : 2>(p, from, tasks, G::N, p.rows, finish);
}
// The usual end: parts go to partial [blocks, PARTS, ROW_CAP, 64] f32, and one arrival publishes them.
template <class G>
DEVICE void run_product_to(const Params& p, Ring& ring, float* partial, protocol::Counter counter) {
    const StorePart finish{partial, G::PARTS};
    if constexpr (G::WIDE) {
        run_product<G>(p, ring, finish);
    } else {
        run_product<G>(p, ring, Exchange::Finish(p, finish));
    }
    arrive_math(p, counter);
}
DEVICE void run_o_proj(const Params& p, Ring& ring, uint32_t epoch) {
    run_product<OProj>(p, ring, Exchange::finish_o_proj(p, epoch));
    Exchange::arrive_o_proj(p);
}
