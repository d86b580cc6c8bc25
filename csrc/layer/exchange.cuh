// Exchange points: where a rank's part of a row becomes the row of all ranks. o_proj and the experts' combine are
// summed, bf16 on the wire and fp32 in rank order; the columns of pre_expert_proj and post_expert_proj are gathered.
// Every rank does the same with the same packets, so all end with the same bits.
#pragma once
#include "mailbox.cuh"

// A single rank holds everything: row operations read the products' parts themselves.
struct OneRank {
    DEVICE static void run_o_proj(const Params& p, Ring& ring, uint32_t) {
        run_dense_to<OProj>(p, ring, p.o_partial, protocol::Counter::O_PROJ);
    }
    DEVICE static void wait_o_proj(const Params& p, uint32_t epoch) {
        wait_counter_math(p, protocol::Counter::O_PROJ, epoch);
    }
    // A8: body(group, column, four columns of the attention branch), bf16 after the sum over ranks.
    template <class Body>
    DEVICE static void attention_branch(const Params& p, uint32_t, int row, Body body) {
        for_columns<cfg::HIDDEN>(
            [&](int i, int column) { body(i, column, round_bf16(sum_parts<OProj>(p.o_partial, row, column))); });
    }
    // F6: columns of the row before the experts, bf16.
    template <class Body>
    DEVICE static void expert_row(const Params& p, uint32_t, int row, Body body) {
        for_columns<cfg::MOE_HIDDEN>(
            [&](int i, int column) { body(i, column, round_bf16(sum_parts<PreProj>(p.pre_partial, row, column))); });
    }
    // F13: the sum of the ranks' combined experts, bf16; local(column) is this rank's F12.
    template <class Local, class Body>
    DEVICE static void combined_experts(const Params&, uint32_t, int, Local local, Body body) {
        for_columns<cfg::MOE_HIDDEN>([&](int i, int column) { body(i, column, round_bf16(local(column))); });
    }
    // F14: the expert branch, bf16.
    template <class Body>
    DEVICE static void expert_branch(const Params& p, uint32_t, int row, Body body) {
        for_columns<cfg::HIDDEN>(
            [&](int i, int column) { body(i, column, round_bf16(sum_parts<PostProj>(p.post_partial, row, column))); });
    }
};

// Several ranks, or one that plays all of them (loop-back): the same code, other addresses.
struct ManyRanks {
    static constexpr int IN_FLIGHT = 16;  // packets a thread polls at once: as many as registers allow

    // o_proj: a block of outputs is one CTA's, which sends it to all ranks as soon as it has it; four lanes share a
    // packet's columns and deal the destinations among each other.
    DEVICE static void run_o_proj(const Params& p, Ring& ring, uint32_t epoch) {
        static_assert(cfg::HIDDEN % BLOCK_ROWS == 0, "all lanes of a warp have an output");
        run_dense<OProj>(p, ring, [&](const DenseTask&, int, int row, int column, float sum) {
            const int lane = lane_index();
            const float neighbour = shuffle_xor(sum, 1);
            const uint32_t pair = lane % 2 == 0 ? pack_bf16x2(sum, neighbour) : pack_bf16x2(neighbour, sum);
            const uint32_t other = shuffle(pair, lane ^ 2);
            const uint2 data = lane % 4 < 2 ? uint2{pair, other} : uint2{other, pair};
#pragma unroll
            for (int first = 0; first < cfg::RANKS; first += 4) {
                const int rank = first + lane % 4;
                if (rank < cfg::RANKS) mailbox::send<mailbox::OProjSum>(p, epoch, row, column - lane % 4, data, rank);
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
        for_columns<PreProj::N>([&](int, int column) {
            const float4 part = sum_parts<PreProj>(p.pre_partial, row, column);
            mailbox::send_to_all<mailbox::PreProjRow>(p, epoch, row, column, pack_bf16x4(part));
        });
        gather<mailbox::PreProjRow>(p, epoch, row, body);
    }
    template <class Local, class Body>
    DEVICE static void combined_experts(const Params& p, uint32_t epoch, int row, Local local, Body body) {
        for_columns<cfg::MOE_HIDDEN>([&](int, int column) {
            mailbox::send_to_all<mailbox::ExpertSum>(p, epoch, row, column, pack_bf16x4(local(column)));
        });
        sum<mailbox::ExpertSum>(p, epoch, row, body);
    }
    template <class Body>
    DEVICE static void expert_branch(const Params& p, uint32_t epoch, int row, Body body) {
        for_columns<PostProj::N>([&](int, int column) {
            const float4 part = sum_parts<PostProj>(p.post_partial, row, column);
            mailbox::send_to_all<mailbox::PostProjRow>(p, epoch, row, column, pack_bf16x4(part));
        });
        gather<mailbox::PostProjRow>(p, epoch, row, body);
    }

  private:
    template <class Point, class Body>
    DEVICE static void sum(const Params& p, uint32_t epoch, int row, Body body) {
        using Columns = RowColumns<Point::WIDTH>;
        constexpr int GROUPS = cfg::RANKS < IN_FLIGHT ? IN_FLIGHT / cfg::RANKS : 1;
        constexpr int TURN = GROUPS < Columns::GROUPS ? GROUPS : Columns::GROUPS;
#pragma unroll
        for (int first = 0; first < Columns::GROUPS; first += TURN) {
            uint2 data[TURN * cfg::RANKS];
            mailbox::receive<Point>(
                p, epoch, row, data,
                [&](int i) {
                    const int group = first + i / cfg::RANKS;
                    return group < Columns::GROUPS && Columns::valid(group);
                },
                [](int i) { return i % cfg::RANKS; }, [&](int i) { return Columns::column(first + i / cfg::RANKS); });
#pragma unroll
            for (int turn = 0; turn < TURN; ++turn) {
                const int group = first + turn;
                if (group >= Columns::GROUPS || !Columns::valid(group)) continue;
                float4 total = unpack_bf16x4(data[turn * cfg::RANKS]);
#pragma unroll
                for (int rank = 1; rank < cfg::RANKS; ++rank) {
                    const float4 more = unpack_bf16x4(data[turn * cfg::RANKS + rank]);
                    total = float4{total.x + more.x, total.y + more.y, total.z + more.z, total.w + more.w};
                }
                body(group, Columns::column(group), round_bf16(total));
            }
        }
    }

    template <class Point, class Body>
    DEVICE static void gather(const Params& p, uint32_t epoch, int row, Body body) {
        using Columns = RowColumns<Point::WIDTH * cfg::RANKS>;
        uint2 data[Columns::GROUPS];
        mailbox::receive<Point>(
            p, epoch, row, data, [](int i) { return Columns::valid(i); },
            [](int i) { return Columns::column(i) / Point::WIDTH; },
            [](int i) { return Columns::column(i) % Point::WIDTH; });
#pragma unroll
        for (int group = 0; group < Columns::GROUPS; ++group) {
            if (Columns::valid(group)) body(group, Columns::column(group), unpack_bf16x4(data[group]));
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
