// Mailboxes: the memory of a rank in which all ranks leave packets for it. No fence and no counter belongs to them: a
// packet says itself which launch it is of, and the reader polls the very packets it needs. Launches alternate between
// two halves. Before a rank sends the packets of launch e + 2, it has read those of e + 1 of all ranks, and they
// follow from what their senders read in launch e; so what is overwritten has been read.
//
// A mailbox is [half][source rank][exchange point][row][packet]; an exchange point is a struct with the number of its
// first packet (AT), the packets of a row that one rank sends (PACKETS), and what a fault record calls it (SITE).
// p.mailboxes[r] is where this rank reaches the mailbox
// of rank r. In loop-back all of them are this rank's own, moved by r minus rank sources: what is meant for rank r
// arrives as if it came from r.
#pragma once
#include "instr/packet.cuh"
#include "wait.cuh"

namespace mailbox {

// Never 0, which a mailbox starts with: the session number is odd.
DEVICE uint32_t tag(const Params& p, uint32_t epoch) { return static_cast<uint32_t>(p.session) + 2u * epoch; }

// Bytes from the beginning of a mailbox to packet `packet` of a row that `source` sends in launch `epoch`.
template <class Point>
DEVICE int64_t place(uint32_t epoch, int source, int row, int packet) {
    const int part = static_cast<int>(epoch & 1u) * cfg::RANKS + source;
    return (static_cast<int64_t>(part * cfg::MAIL_PACKETS) + (Point::AT + row * Point::PACKETS + packet)) * PACKET_BYTES;
}

// Where this rank's part of a mailbox is. For measuring what one exchange point of a layer costs, PEERS_ONLY names it;
// at the others a rank plays all peers itself, as in loop-back.
template <class Point>
DEVICE char* mailbox_of(const Params& p, int destination) {
#ifdef PEERS_ONLY
    constexpr bool OF_LAYER = Point::AT == cfg::O_PROJ_MAIL_AT || Point::AT == cfg::PRE_PROJ_MAIL_AT ||
                              Point::AT == cfg::EXPERT_MAIL_AT || Point::AT == cfg::POST_PROJ_MAIL_AT;
    if constexpr (OF_LAYER && Point::AT != cfg::PEERS_ONLY) {
        return p.mailboxes[p.rank] + static_cast<int64_t>(destination - p.rank) * cfg::MAIL_PACKETS * PACKET_BYTES;
    }
#endif
    return p.mailboxes[destination];
}

template <class Point>
DEVICE void send(const Params& p, uint32_t epoch, int row, int packet, const uint2& data, int destination) {
    send_packet(mailbox_of<Point>(p, destination) + place<Point>(epoch, p.rank, row, packet), data, tag(p, epoch));
}

// To every rank, this one too: one way to read, and one order of sums.
template <class Point>
DEVICE void send_to_all(const Params& p, uint32_t epoch, int row, int packet, const uint2& data) {
#pragma unroll
    for (int rank = 0; rank < cfg::RANKS; ++rank) send<Point>(p, epoch, row, packet, data, rank);
}

// One packet of a row, as its reader names it.
struct Name {
    bool wanted;
    int source, packet;
};
constexpr int MIDDLE = cfg::RANKS / 2;
// In packets, from packet `first` of the middle source.
DEVICE int offset_of(const Name& name, int first) {
    return (name.source - MIDDLE) * cfg::MAIL_PACKETS + (name.packet - first);
}

// Packets name(0) .. name(N - 1) of a row are not there in time: tells which source's is missing.
template <class Point, int N, class Naming>
DEVICE void give_up_on(const Params& p, const char* base, int first, uint32_t expected, Naming name) {
    uint32_t seen = expected;
    int late = -1;
#pragma unroll 1
    for (int i = 0; i < N; ++i) {
        if (!name(i).wanted) continue;
        const Packet packet = receive_packet(base + offset_of(name(i), first) * PACKET_BYTES);
        if (packet.is(expected)) continue;
        late = name(i).source;
        seen = packet.low_tag != expected ? packet.low_tag : packet.high_tag;
    }
    if (late < 0) return;  // they have come meanwhile
    give_up(p, static_cast<uint32_t>(Point::SITE) + (static_cast<uint32_t>(late + 1) << 16), expected, seen);
}

// Polls packets name(0) .. name(N - 1) of a row at once until all are of this launch. `first`: what the names' numbers
// have in common, so that addresses differ by constants; counted from the middle source, they fit an instruction.
template <class Point, int N, class Naming>
DEVICE void receive(const Params& p, uint32_t epoch, int row, int first, uint2 (&data)[N], Naming name) {
    const char* const base = p.mailboxes[p.rank] + place<Point>(epoch, MIDDLE, row, first);
    const uint32_t expected = tag(p, epoch);
    uint64_t start = 0;
    // One copy of the polls: the first is no code of its own.
#pragma unroll 1
    for (int tries = 0;; ++tries) {
        Packet packet[N];
#pragma unroll
        for (int i = 0; i < N; ++i) {
            if (name(i).wanted) packet[i] = receive_packet(base + offset_of(name(i), first) * PACKET_BYTES);
        }
        uint32_t wrong = 0u;  // bits in which some tag differs
#pragma unroll
        for (int i = 0; i < N; ++i) {
            if (!name(i).wanted) continue;
            data[i] = uint2{packet[i].low, packet[i].high};
            wrong |= packet[i].differs_from(expected);
        }
        if (wrong == 0u) return;
        spin_pause();
        if (tries < 64) continue;  // the common case needs no clock
        const uint64_t now = global_nanoseconds();
        if (start == 0) start = now;
        if (now - start > p.deadline_ns / 2) {  // before those of this rank that wait for the reader give up
            give_up_on<Point, N>(p, base, first, expected, name);
        }
    }
}

}  // namespace mailbox
