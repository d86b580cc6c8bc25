// The accept launch: SHARES CTAs judge each row, then CTA 0 commits the rows and writes the next step's inputs.
#pragma once
#include "compact.cuh"
#include "path.cuh"

namespace accept {

using protocol::Output;
using protocol::Reason;
using protocol::Request;

// What a lane knows of its row after the verdicts.
struct Run {
    int drafts;     // kept
    int count;      // tokens of the step, cut behind the one that ends the text
    int64_t token;  // of this lane's row, if the row is below `count`
    Reason reason;
    int kept;  // lane i: the row that is the i-th of those that the target kept, the anchor first; -1 behind them
};

DEVICE bool is_stop(const Params& p, int64_t token) {
    const int64_t count = request::word(p, Request::STOP_COUNT);
    const int64_t* stops = p.request + static_cast<int>(Request::STOPS);
    bool found = false;
    for (int i = 0; i < count; ++i) found = found || global_load(stops + i) == token;
    return found;
}

DEVICE verdict::Verdict verdict_of(const Params& p, int row, int rows) {
    if (!request::greedy(p)) {
        return {global_load(p.verdicts + 2 * row), global_load(p.verdicts + 2 * row + 1)};
    }
    const int64_t best = global_load(p.greedy_ids + row);
    if (best < 0 || best >= cfg::VOCAB) return {verdict::BROKEN, 0};
    const float top = whole_rows::top(p, row, best);
    if (!(top < infinity() && top > -infinity())) return {verdict::BROKEN, 0};
    const bool kept = p.nodes == 0 && row + 1 < rows && global_load(p.token_ids + row + 1) == best;
    return {kept ? verdict::ACCEPTED : verdict::REJECTED, best};
}

// One warp, lane = row.
DEVICE Run settle(const Params& p, int length) {
    const int row = lane_index(), rows = verdict::counted(p);
    verdict::Verdict mine{verdict::REJECTED, 0};
    if (row < rows) mine = verdict_of(p, row, rows);
    int last = mass::first_lane(mine.kind != verdict::ACCEPTED), kept = row <= last ? row : -1;
    if (p.nodes > 0) {  // from here on the i-th kept row stands in lane i
        kept = path::follow(p, rows, mine);
        last = mass::first_lane(kept < 0) - 1;
        const int from = kept < 0 ? 0 : kept;
        mine = {static_cast<int64_t>(mass::shuffle_wide(static_cast<uint64_t>(mine.kind), from)),
                static_cast<int64_t>(mass::shuffle_wide(static_cast<uint64_t>(mine.token), from))};
    }
    if (mass::shuffle_wide(static_cast<uint64_t>(mine.kind), last) == static_cast<uint64_t>(verdict::BROKEN)) {
        return {0, 0, 0, Reason::BROKEN_LOGITS, -1};
    }
    const int64_t emitted = global_load(p.state + protocol::EMITTED);
    const int64_t room = request::word(p, Request::MAX_CONTEXT) - length - 1;
    const int64_t limit = request::word(p, Request::MAX_NEW_TOKENS) - emitted;
    Reason reason = Reason::NONE;
    if (row + 1 == room) reason = Reason::CONTEXT;
    if (row + 1 == limit) reason = Reason::LENGTH;
    if (row <= last && is_stop(p, mine.token)) reason = Reason::STOP;
    const int end = mass::first_lane(row <= last && reason != Reason::NONE);
    const int final_row = end < WARP ? end : last;
    const auto ended = static_cast<Reason>(mass::shuffle_wide(static_cast<uint64_t>(reason), final_row));
    return {last, final_row + 1, mine.token, ended, kept};
}

// Anchor, positions and slots of the step after this one.
DEVICE void write_inputs(const Params& p, const Run& run, int length) {
    const int lane = lane_index(), next = length + run.count;
    if (lane == run.count - 1) global_store(p.token_ids, run.token);
    if (lane == 0) global_store(p.length, next);
    if (lane < cfg::ROW_CAP) {
        global_store(p.positions + lane, static_cast<int64_t>(next + lane));
        global_store(p.full_slots + lane, static_cast<int64_t>(global_load(p.full_pages + next + lane)));
        global_store(p.sliding_slots + lane, static_cast<int64_t>(global_load(p.sliding_pages + next + lane)));
    }
}

DEVICE void report(const Params& p, const Run& run, int64_t step, int length) {
    uint64_t* slot = p.outputs + step % protocol::OUTPUT_SLOTS * protocol::OUTPUT_WORDS;
    const auto write = [&](Output word, int64_t value) {
        store_system(slot + static_cast<int>(word), static_cast<uint64_t>(value));
    };
    if (lane_index() < run.count) {
        store_system(slot + static_cast<int>(Output::TOKENS) + lane_index(), static_cast<uint64_t>(run.token));
    }
    warp_sync();
    if (lane_index() != 0) return;
    write(Output::COUNT, run.count);
    write(Output::ACCEPTED, run.drafts);
    write(Output::ROWS, verdict::counted(p));
    write(Output::REASON, static_cast<int64_t>(run.reason));
    write(Output::LENGTH, length + run.count);
    write(Output::STEP, step);  // the host reads the others once it sees this one
}

// One warp. A sequence that has ended stays as it is: steps that were launched before the host knew change nothing.
DEVICE void commit(const Params& p) {
    const int length = global_load(p.length);
    const int64_t step = global_load(p.state + protocol::STEPS) + 1;
    const auto before = static_cast<Reason>(global_load(p.state + protocol::REASON));
    Run run{0, 0, 0, before, -1};
    if (before == Reason::NONE) run = settle(p, length);
    const int64_t emitted = global_load(p.state + protocol::EMITTED) + run.count;
    warp_sync();
    write_inputs(p, run, length);
    if (lane_index() == 0) {
        global_store(p.state + protocol::STEPS, step);
        global_store(p.state + protocol::EMITTED, emitted);
        global_store(p.state + protocol::REASON, static_cast<int64_t>(run.reason));
        global_store(p.state + protocol::CONTEXT_START, static_cast<int64_t>(length));
        global_store(p.state + protocol::COMMITTED, static_cast<int64_t>(run.count));
    }
    report(p, run, step, length);
    if (p.nodes > 0 && lane_index() < run.count) global_store(p.path + lane_index(), run.kept);
    if ((p.nodes > 0 || p.costs != nullptr) && run.count > 0) path::learn(p, verdict::counted(p), run.kept);
}

DEVICE void run(const Params& p) {
    launch::open();
    const uint32_t epoch = launch::begin_epoch(p, cfg::THREADS);
    mass::Team team(p, epoch);
    if (team.row < verdict::counted(p) && !request::greedy(p)) {
        whole_rows::gather(p, team, epoch);
        const verdict::Verdict mine = verdict::judge(p, team);
        if (team.leads() && thread_index() == 0) {
            global_store(p.verdicts + 2 * team.row, static_cast<int64_t>(mine.kind));
            global_store(p.verdicts + 2 * team.row + 1, mine.token);
        }
    }
    mass::cta_barrier();  // every warp has read the inputs that CTA 0 is about to replace
    if (thread_index() == 0) {
        team.finish();
        add_release(counter_address(p, protocol::Counter::VERDICTS), 1u);
    }
    if (cta_index() != 0 || warp_index() != 0) return;
    // Greedy needs nobody's verdict, and nobody else reads what it replaces.
    const bool alone = request::greedy(p);
    if (!alone) wait_counter_warp(p, protocol::Counter::VERDICTS, epoch);
    commit(p);
    if (alone) wait_counter_warp(p, protocol::Counter::VERDICTS, epoch);
    launch::end_epoch(p, epoch);
}

}  // namespace accept
