// Mailboxes: the memory of a rank in which all ranks leave packets for it. No fence and no counter belongs to them: a
// packet says itself which launch it is of, and the reader polls the very packets it needs. Launches alternate between
// two halves. Before a rank sends the packets of launch e + 2, it has read those of e + 1 of all ranks, and they
// follow from what their senders read in launch e; so what is overwritten has been read.
//
// A mailbox is [source rank][half][exchange point][row][packet]. p.mailboxes[r] is where this rank reaches the mailbox
// of rank r. In loop-back all of them are this rank's own, moved by r minus rank sources: what is meant for rank r
// arrives as if it came from r.
#pragma once
#include "instr/packet.cuh"
#include "products.cuh"
#include "row.cuh"

namespace mailbox {

// An exchange point: four neighbouring columns of a row to a packet. WIDTH: columns that one rank sends.
struct OProjSum {
    static constexpr int AT = cfg::O_PROJ_MAIL_AT, WIDTH = cfg::HIDDEN;
    static constexpr protocol::Site SITE = protocol::Site::O_PROJ_MAIL;
};
struct PreProjRow {
    static constexpr int AT = cfg::PRE_PROJ_MAIL_AT, WIDTH = PreProj::N;
    static constexpr protocol::Site SITE = protocol::Site::PRE_PROJ_MAIL;
};
struct ExpertSum {
    static constexpr int AT = cfg::EXPERT_MAIL_AT, WIDTH = cfg::MOE_HIDDEN;
    static constexpr protocol::Site SITE = protocol::Site::EXPERT_MAIL;
};
struct PostProjRow {
    static constexpr int AT = cfg::POST_PROJ_MAIL_AT, WIDTH = PostProj::N;
    static constexpr protocol::Site SITE = protocol::Site::POST_PROJ_MAIL;
};

// Never 0, which a mailbox starts with: the session number is odd.
DEVICE uint32_t tag(const Params& p, uint32_t epoch) { return static_cast<uint32_t>(p.session) + 2u * epoch; }

// Byte offset of the packet that holds `column` of a row that `source` sends.
template <class Point>
DEVICE int64_t place(uint32_t epoch, int source, int row, int column) {
    const int half = source * 2 + static_cast<int>(epoch & 1u);
    const int packet = Point::AT + (row * Point::WIDTH + column) / 4;
    return (static_cast<int64_t>(half) * cfg::MAIL_PACKETS + packet) * PACKET_BYTES;
}

template <class Point>
DEVICE void send(const Params& p, uint32_t epoch, int row, int column, const uint2& data, int destination) {
    send_packet(p.mailboxes[destination] + place<Point>(epoch, p.rank, row, column), data, tag(p, epoch));
}

// To every rank, this one too: one way to read, and one order of sums.
template <class Point>
DEVICE void send_to_all(const Params& p, uint32_t epoch, int row, int column, const uint2& data) {
#pragma unroll
    for (int rank = 0; rank < cfg::RANKS; ++rank) send<Point>(p, epoch, row, column, data, rank);
}

// Polls N packets at once until all are of this launch: packet i, where wanted(i), has column `column(i)` of what
// `source(i)` sent.
template <class Point, int N, class Wanted, class Source, class Column>
DEVICE void receive(const Params& p, uint32_t epoch, int row, uint2 (&data)[N], Wanted wanted, Source source,
                    Column column) {
    const uint32_t expected = tag(p, epoch);
    uint32_t seen = expected;
    int late = 0;
    const auto complete = [&] {
        bool all = true;
#pragma unroll
        for (int i = 0; i < N; ++i) {
            if (!wanted(i)) continue;
            const Packet packet =
                receive_packet(p.mailboxes[p.rank] + place<Point>(epoch, source(i), row, column(i)));
            data[i] = uint2{packet.low, packet.high};
            if (packet.is(expected)) continue;
            all = false;
            late = source(i);
            seen = packet.low_tag != expected ? packet.low_tag : packet.high_tag;
        }
        return all;
    };
    uint64_t start = 0;
#pragma unroll 1
    for (int tries = 0; !complete(); ++tries) {
        spin_pause();
        if (tries < 64) continue;  // the common case needs no clock
        const uint64_t now = global_nanoseconds();
        if (start == 0) start = now;
        if (now - start > p.deadline_ns) {
            give_up(p, static_cast<uint32_t>(Point::SITE) + (static_cast<uint32_t>(late + 1) << 16), expected, seen);
        }
    }
}

}  // namespace mailbox
