// Exchange points: where a rank's part of a row becomes the row of all ranks. o_proj and the experts' combine are
// summed, bf16 on the wire and fp32 in rank order; the columns of pre_expert_proj and post_expert_proj are gathered.
// Every rank does the same with the same packets, so all end with the same bits.
#pragma once
#include "mailbox.cuh"

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

    DEVICE static void run_o_proj(const Params& p, Ring& ring, uint32_t) {
        run_dense_to<OProj>(p, ring, p.o_partial, protocol::Counter::O_PROJ);
    }
    DEVICE static void wait_o_proj(const Params& p, uint32_t epoch) {
        wait_counter_math(p, protocol::Counter::O_PROJ, epoch);
    }
    // A8: body(group, column, four columns of the attention branch), bf16 after the sum over ranks.
    template <class Body>
    DEVICE static void attention_branch(const Params& p, uint32_t, int row, Body body) {
        sum_row_parts<OProj>(p.o_partial, row,
                             [&](int i, int column, const float4& sum) { body(i, column, round_bf16(sum)); });
    }
    // F6: columns of the row before the experts, bf16.
    template <class Body>
    DEVICE static void expert_row(const Params& p, uint32_t, int row, Body body) {
        sum_row_parts<PreProj>(p.pre_partial, row,
                               [&](int i, int column, const float4& sum) { body(i, column, round_bf16(sum)); });
    }
    // F13: the sum of the ranks' combined experts, bf16; local(group, column) is this rank's F12.
    template <class Local, class Body>
    DEVICE static void combined_experts(const Params&, uint32_t, int, Local local, Body body) {
        for_columns<cfg::MOE_HIDDEN>([&](int i, int column) { body(i, column, round_bf16(local(i, column))); });
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
    // Packets a thread polls at once: as many as registers allow, which a phase of its own has fewer of.
    static constexpr int IN_FLIGHT = cfg::SEPARATE ? 8 : 12;

    DEVICE static int first_token(const Params& p) { return p.rank * cfg::VOCAB; }

    // The rank that holds the token sends its row.
    template <class Body>
    DEVICE static void embedding(const Params& p, uint32_t epoch, int row, int64_t token, Body body) {
        const int owner = static_cast<int>(token) / cfg::VOCAB;
        if (owner == p.rank) {
            const uint16_t* source = p.embedding + (token - first_token(p)) * cfg::HIDDEN;
            send<mailbox::EmbeddingRow>(p, epoch, row, [&](int, int column) { return load_bf16x4(source + column); });
        }
        collect<mailbox::EmbeddingRow, 1>(p, epoch, row, owner, body);
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

    // o_proj: a block of outputs is one CTA's, which sends it to all ranks as soon as it has it; four lanes share a
    // packet's columns and deal the destinations among each other.
    DEVICE static void run_o_proj(const Params& p, Ring& ring, uint32_t epoch) {
        static_assert(cfg::HIDDEN % BLOCK_ROWS == 0, "all lanes of a warp have an output");
        run_dense<OProj>(p, ring, [&](const DenseTask&, int, int row, int column, float sum) {
            const uint32_t launch = forget(epoch);
            const int lane = static_cast<int>(forget(static_cast<uint32_t>(lane_index())));
            const float neighbour = shuffle_xor(sum, 1);
            const uint32_t pair = lane % 2 == 0 ? pack_bf16x2(sum, neighbour) : pack_bf16x2(neighbour, sum);
            const uint32_t other = shuffle(pair, lane ^ 2);
            const uint2 data = lane % 4 < 2 ? uint2{pair, other} : uint2{other, pair};
#pragma unroll
            for (int first = 0; first < cfg::RANKS; first += 4) {
                const int rank = first + lane % 4;
                if (rank < cfg::RANKS) mailbox::send<mailbox::OProjSum>(p, launch, row, column / 4, data, rank);
            }
        });
    }
    DEVICE static void wait_o_proj(const Params&, uint32_t) {}

    template <class Body>
    DEVICE static void attention_branch(const Params& p, uint32_t epoch, int row, Body body) {
        sum<mailbox::OProjSum>(p, epoch, row, body);
    }
    template <class Body>
    DEVICE static void expert_row(const Params& p, uint32_t epoch, int row, Body body) {
        gather<mailbox::PreProjRow>(p, epoch, row, body, [&](int, int column) {
            return sum_parts<PreProj>(p.pre_partial, row, column);
        });
    }
    template <class Local, class Body>
    DEVICE static void combined_experts(const Params& p, uint32_t epoch, int row, Local local, Body body) {
        send<mailbox::ExpertSum>(p, epoch, row, local);
        sum<mailbox::ExpertSum>(p, epoch, row, body);
    }
    template <class Body>
    DEVICE static void expert_branch(const Params& p, uint32_t epoch, int row, Body body) {
        gather<mailbox::PostProjRow>(p, epoch, row, body, [&](int, int column) {
            return sum_parts<PostProj>(p.post_partial, row, column);
        });
    }

  private:
    // Below MATH_THREADS in the math warps, and for the compiler: where sizes are multiples of it, all that is said of
    // packets below is constant.
    DEVICE static int first_packet() {
        return static_cast<int>(forget(static_cast<uint32_t>(thread_index())) % cfg::MATH_THREADS);
    }

    DEVICE static constexpr int groups(int packets) { return (packets + cfg::MATH_THREADS - 1) / cfg::MATH_THREADS; }

    // This rank's part of a row to all ranks.
    template <class Point, class Part>
    DEVICE static void send(const Params& p, uint32_t epoch, int row, Part part) {
        epoch = forget(epoch);
        const int first = first_packet();
#pragma unroll
        for (int group = 0; group < groups(Point::PACKETS); ++group) {
            const int packet = group * cfg::MATH_THREADS + first;
            if (packet >= Point::PACKETS) continue;
            mailbox::send_to_all<Point>(p, epoch, row, packet, pack_bf16x4(part(group, packet * 4)));
        }
    }

    // body(group, column, sum of the ranks' four columns).
    template <class Point, class Body>
    DEVICE static void sum(const Params& p, uint32_t epoch, int row, Body body) {
        constexpr int GROUPS = groups(Point::PACKETS);
        constexpr int MOST = cfg::RANKS < IN_FLIGHT ? IN_FLIGHT / cfg::RANKS : 1;
        constexpr int TURN = MOST < GROUPS ? MOST : GROUPS;
        epoch = forget(epoch);
        const int first = first_packet();
#pragma unroll
        for (int start = 0; start < GROUPS; start += TURN) {
            uint2 data[TURN * cfg::RANKS];
            mailbox::receive<Point>(p, epoch, row, first, data, [&](int i) {
                const int group = start + i / cfg::RANKS, packet = group * cfg::MATH_THREADS + first;
                return mailbox::Name{packet < Point::PACKETS, i % cfg::RANKS, packet};
            });
#pragma unroll
            for (int turn = 0; turn < TURN; ++turn) {
                const int group = start + turn, packet = group * cfg::MATH_THREADS + first;
                if (packet >= Point::PACKETS) continue;
                float4 total = unpack_bf16x4(data[turn * cfg::RANKS]);
#pragma unroll
                for (int rank = 1; rank < cfg::RANKS; ++rank) {
                    const float4 more = unpack_bf16x4(data[turn * cfg::RANKS + rank]);
                    total = float4{total.x + more.x, total.y + more.y, total.z + more.z, total.w + more.w};
                }
                body(group, packet * 4, round_bf16(total));
            }
        }
    }

    // body(group, column, four columns of the row that the ranks' parts make up); part(group, column) is this rank's.
    template <class Point, class Body, class Part>
    DEVICE static void gather(const Params& p, uint32_t epoch, int row, Body body, Part part) {
        send<Point>(p, epoch, row, part);
        collect<Point, cfg::RANKS>(p, epoch, row, 0, body);
    }

    // body(group, column, four columns) of the row that the parts of SOURCES ranks from `source` on make up.
    template <class Point, int SOURCES, class Body>
    DEVICE static void collect(const Params& p, uint32_t epoch, int row, int source, Body body) {
        constexpr int PACKETS = Point::PACKETS * SOURCES, GROUPS = groups(PACKETS);
        epoch = forget(epoch);
        const int first = first_packet();
        uint2 data[GROUPS];
        mailbox::receive<Point>(p, epoch, row, first, data, [&](int i) {
            const int packet = i * cfg::MATH_THREADS + first;
            return mailbox::Name{packet < PACKETS, source + packet / Point::PACKETS, packet % Point::PACKETS};
        });
#pragma unroll
        for (int group = 0; group < GROUPS; ++group) {
            const int packet = group * cfg::MATH_THREADS + first;
            if (packet < PACKETS) body(group, packet * 4, unpack_bf16x4(data[group]));
        }
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
