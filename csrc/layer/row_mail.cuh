// Rows over ranks: a rank's part of a row to all of them, and what their parts make up. All math warps of one CTA work
// on a row; a packet is four neighbouring columns, bf16.
#pragma once
#include "mailbox.cuh"
#include "row.cuh"

namespace row_mail {

// Packets a thread polls at once, four registers each.
constexpr int IN_FLIGHT = 16;

// Below MATH_THREADS in the math warps, and for the compiler: where sizes are multiples of it, all that is said of
// packets below is constant.
DEVICE int first_packet() {
    return static_cast<int>(forget(static_cast<uint32_t>(thread_index())) % cfg::MATH_THREADS);
}

DEVICE constexpr int groups(int packets) { return (packets + cfg::MATH_THREADS - 1) / cfg::MATH_THREADS; }

// This rank's part of a row to all ranks.
template <class Point, class Part>
DEVICE void send(const Params& p, uint32_t epoch, int row, Part part) {
    epoch = forget(epoch);
    const int first = first_packet();
#pragma unroll
    for (int group = 0; group < groups(Point::PACKETS); ++group) {
        const int packet = group * cfg::MATH_THREADS + first;
        if (packet >= Point::PACKETS) continue;
        mailbox::send_to_all<Point>(p, epoch, row, packet, pack_bf16x4(part(group, packet * 4)));
    }
}

// body(column, sum of the ranks' four columns, bf16). One copy of the code for all turns, so the body's group is no
// constant: what it keeps, it keeps in memory.
template <class Point, class Body>
DEVICE void sum(const Params& p, uint32_t epoch, int row, Body body) {
    constexpr int GROUPS = groups(Point::PACKETS);
    constexpr int MOST = IN_FLIGHT / (cfg::RANKS < 4 ? 4 : cfg::RANKS);  // sums take registers, too
    constexpr int TURN = MOST < GROUPS ? MOST : GROUPS;
    constexpr bool FULL = Point::PACKETS % (TURN * cfg::MATH_THREADS) == 0;
    epoch = forget(epoch);
#pragma unroll 1
    for (int start = 0; start < GROUPS; start += TURN) {
        const int first = start * cfg::MATH_THREADS + first_packet();
        uint2 data[TURN * cfg::RANKS];
        mailbox::receive<Point>(p, epoch, row, first, data, [&](int i) {
            const int packet = i / cfg::RANKS * cfg::MATH_THREADS + first;
            return mailbox::Name{FULL || packet < Point::PACKETS, i % cfg::RANKS, packet};
        });
#pragma unroll
        for (int turn = 0; turn < TURN; ++turn) {
            const int packet = turn * cfg::MATH_THREADS + first;
            if (!FULL && packet >= Point::PACKETS) continue;
            float4 total = unpack_bf16x4(data[turn * cfg::RANKS]);
#pragma unroll
            for (int rank = 1; rank < cfg::RANKS; ++rank) {
                total = plus(total, unpack_bf16x4(data[turn * cfg::RANKS + rank]));
            }
            body(packet * 4, pack_bf16x4(total));
        }
    }
}

// body(group, column, four columns) of the row that the parts of SOURCES ranks from `source` on make up.
template <class Point, int SOURCES, class Body>
DEVICE void collect(const Params& p, uint32_t epoch, int row, int source, Body body) {
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

// body(group, column, four columns of the row that the ranks' parts make up); part(group, column) is this rank's.
template <class Point, class Body, class Part>
DEVICE void gather(const Params& p, uint32_t epoch, int row, Body body, Part part) {
    send<Point>(p, epoch, row, part);
    collect<Point, cfg::RANKS>(p, epoch, row, 0, body);
}

// One output of a product whose blocks have their whole K on one CTA, sent as soon as it is there. The lanes of a warp
// have 32 neighbouring columns of `row`: four of them share a packet's and deal the destinations among each other.
template <class Point>
DEVICE void send_column(const Params& p, uint32_t epoch, int row, int column, float sum) {
    const uint32_t launch = forget(epoch);
    const int lane = static_cast<int>(forget(static_cast<uint32_t>(lane_index())));
    const float neighbour = shuffle_xor(sum, 1);
    const uint32_t pair = lane % 2 == 0 ? pack_bf16x2(sum, neighbour) : pack_bf16x2(neighbour, sum);
    const uint32_t other = shuffle(pair, lane ^ 2);
    const uint2 data = lane % 4 < 2 ? uint2{pair, other} : uint2{other, pair};
#pragma unroll
    for (int first = 0; first < cfg::RANKS; first += 4) {
        const int rank = first + lane % 4;
        if (rank < cfg::RANKS) mailbox::send<Point>(p, launch, row, column / 4, data, rank);
    }
}

}  // namespace row_mail
