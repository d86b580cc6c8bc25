// Who runs next, who waits for what, and what to do when nobody can run.
#include <algorithm>
#include <bit>
#include <map>
#include <utility>

#include "machine.h"

namespace emulator {

// Nanoseconds that a pause takes once nobody can run any more; longer than any deadline.
constexpr uint64_t TIMEOUT_STEP = 1ull << 41;
constexpr uint32_t LATE_PAUSES = 1u << 18;  // all threads of a machine worth emulating have given up by then

uint64_t Machine::random() {  // splitmix64
    uint64_t z = random_ += 0x9e3779b97f4a7c15ull;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    return z ^ (z >> 31);
}

void run_lane();

Lane* Machine::pick_lane(Warp& warp, int after) {
    if (warp.ready == 0) return nullptr;
    const int start = options.seed != 0 ? static_cast<int>(random() % WARP_LANES) : (after + 1) % WARP_LANES;
    return warp.lanes + (start + std::countr_zero(std::rotr(warp.ready, start))) % WARP_LANES;
}

void Machine::enqueue(Warp& warp) {
    warp.queued = true;
    queue_.push_back(&warp);
}

Warp* Machine::pick_warp() {
    if (queue_head_ == queue_.size()) return nullptr;
    Warp* picked = nullptr;
    if (options.order == Order::round_robin) {
        picked = queue_[queue_head_++];
        if (queue_head_ > 4096) {
            queue_.erase(queue_.begin(), queue_.begin() + static_cast<ptrdiff_t>(queue_head_));
            queue_head_ = 0;
        }
    } else {
        auto at = queue_.begin() + static_cast<ptrdiff_t>(queue_head_ + random() % (queue_.size() - queue_head_));
        if (options.order == Order::priority) {
            at = std::max_element(queue_.begin() + static_cast<ptrdiff_t>(queue_head_), queue_.end(),
                                  [](const Warp* a, const Warp* b) { return a->priority < b->priority; });
        }
        picked = *at;
        *at = queue_.back();
        queue_.pop_back();
    }
    picked->queued = false;
    return picked;
}

// The current thread stops; another lane of its warp goes on if one can and the warp is not being preempted.
void Machine::leave(bool stays_ready) {
    Lane& me = *current;
    Warp& warp = *me.warp;
    if (!stays_ready) warp.ready &= ~(1u << me.index);
    Lane* next = preempting_ || !fault.kind.empty() ? nullptr : pick_lane(warp, me.index);
    preempting_ = false;
    if (next == &me) return;
    ++switches;
    if (next == nullptr) {
        switch_fiber(me.fiber, scheduler_, run_lane);
    } else {
        current = next;
        switch_fiber(me.fiber, next->fiber, run_lane);
    }
}

void Machine::preempt() {
    countdown_ = 1 + static_cast<uint32_t>(random() % (2 * options.preempt_interval));
    if (options.preempt_limit != 0 && preemptions_ >= options.preempt_limit) return;
    ++preemptions_;
    if (options.order == Order::priority) current->warp->priority = static_cast<uint32_t>(random() >> 33);
    preempting_ = true;
    leave(true);
}

void Machine::wake(Lane& lane) {
    lane.wait = {};
    Warp& warp = *lane.warp;
    warp.ready |= 1u << lane.index;
    if (!warp.queued && &warp != running_) enqueue(warp);
}

void Machine::wait_here(WaitKind kind, uint64_t detail, const Site& site) {
    current->wait = {kind, detail, current->wait.shared, site};
    leave(false);
    current->wait = {};
}

void Machine::notify(Watch& watch) {
    ++watch.version;
    for (Lane* lane : watch.sleepers) {
        if (lane->wait.kind == WaitKind::poll) wake(*lane);
    }
    watch.sleepers.clear();
}

// A poll that found `watch` as it is now; a following pause sleeps until it changes.
void Machine::poll(Watch& watch, uint64_t detail, bool shared, const Site& site) {
    Lane& lane = *current;
    lane.wait = {WaitKind::none, detail, shared, site};
    if (lane.polls.size() <= Lane::MAX_POLLS) lane.polls.push_back({&watch, watch.version});
}

void Machine::pause() {
    Lane& lane = *current;
    const std::vector<Lane::Poll> polls = std::exchange(lane.polls, {});
    bool sleep = !polls.empty() && polls.size() <= Lane::MAX_POLLS && !timed_out_;
    for (size_t i = 0; sleep && i < polls.size(); ++i) sleep = polls[i].watch->version == polls[i].version;
    if (timed_out_) {
        jumped_ += TIMEOUT_STEP;
        if (++late_pauses_ > LATE_PAUSES) fail("deadlock", "spins without a deadline", lane.wait.site);
    }
    if (!sleep) {
        steps_ += polls.empty() ? 1000 : 1;  // a loop that polls nothing known ends at its deadline
        preempting_ = true;
        leave(true);
        return;
    }
    for (const Lane::Poll& poll : polls) poll.watch->sleepers.push_back(&lane);
    const Wait wait = lane.wait;
    wait_here(WaitKind::poll, wait.detail, wait.site);
    // One change woke it. The others' words must forget it: its place may be another thread's when they change.
    for (const Lane::Poll& poll : polls) std::erase(poll.watch->sleepers, &lane);
}

// Nobody can run. Spinning threads are let past their deadline once, so that the kernel's own record is made.
bool Machine::resolve_standstill() {
    if (live_ == 0) return true;
    if (fault.text.empty()) fault.text = waits();
    bool spinning = false;
    for (const auto& slot : slots_) {
        if (slot == nullptr) continue;
        for (Lane& lane : slot->lanes) {
            if (lane.wait.kind != WaitKind::poll || timed_out_) continue;
            spinning = true;
            wake(lane);
        }
    }
    timed_out_ = true;
    if (spinning) return true;
    fault.kind = "deadlock";
    return false;
}

std::string Machine::waits() const {
    std::map<std::string, std::map<std::string, std::string>> lines;  // what: CTA: threads
    for (const auto& slot : slots_) {
        if (slot == nullptr || slot->live == 0) continue;
        for (const Lane& lane : slot->lanes) {
            if (lane.done) continue;
            std::string what;
            const std::string place =
                std::string(lane.wait.site.file_name()).substr(std::string(lane.wait.site.file_name()).rfind('/') + 1) +
                ":" + std::to_string(lane.wait.site.line());
            switch (lane.wait.kind) {
                case WaitKind::none:
                    what = "can run";
                    break;
                case WaitKind::lanes:
                    what = "the other lanes of its warp";
                    break;
                case WaitKind::named_barrier: {
                    const NamedBarrier& barrier = slot->named[lane.wait.detail];
                    what = "barrier " + std::to_string(lane.wait.detail) + ", where " +
                           std::to_string(barrier.arrived.size()) + " of " + std::to_string(barrier.expected) +
                           " threads are";
                    break;
                }
                case WaitKind::poll:
                    if (lane.wait.shared) {
                        const MBarrier& barrier = slot->mbarriers.at(static_cast<uint32_t>(lane.wait.detail));
                        what = "the mbarrier at " + std::to_string(barrier.offset) + " (phase " +
                               std::to_string(barrier.phase) + ", " + std::to_string(barrier.pending) + " of " +
                               std::to_string(barrier.arrivals) + " arrivals and " + std::to_string(barrier.bytes) +
                               " bytes missing)";
                    } else {
                        const void* address = reinterpret_cast<const void*>(lane.wait.detail);
                        what = regions.describe(address) + " (now " +
                               std::to_string(*static_cast<const uint32_t*>(address)) + ")";
                    }
                    break;
                case WaitKind::own_copies:
                    what = std::to_string(lane.wait.detail) + " copies of its own";
                    break;
                case WaitKind::previous_launch:
                    what = "the previous launch";
                    break;
            }
            what += " at " + place;
            const std::string rank = several_ranks() ? "rank " + std::to_string(slot->launch->rank) + " " : "";
            std::string& threads = lines[what][rank + "CTA " + std::to_string(slot->index)];
            const std::string warp = " " + std::to_string(lane.thread / WARP_LANES);
            if (threads.size() < warp.size() || threads.compare(threads.size() - warp.size(), warp.size(), warp) != 0) {
                threads += warp;
            }
        }
    }
    std::string text = "nobody can run:";
    for (const auto& [what, ctas] : lines) {
        text += "\n  waiting for " + what + ":";
        for (const auto& [cta, warps] : ctas) text += " " + cta + " warps" + warps + ";";
    }
    return text;
}

void fail(const char* kind, const std::string& text, const Site& site) {
    Machine& m = machine();
    if (m.fault.kind.empty()) {
        const std::string file = site.file_name();
        std::string where;
        if (current != nullptr) {
            where = m.several_ranks() ? "rank " + std::to_string(current->cta->launch->rank) + " " : "";
            where += "CTA " + std::to_string(current->cta->index) + " warp " +
                    std::to_string(current->thread / WARP_LANES) + " lane " + std::to_string(current->index) + " of " +
                    current->cta->launch->kernel->name + ", " + file.substr(file.rfind('/') + 1) + ":" +
                    std::to_string(site.line()) + ": ";
        }
        const std::string before = m.fault.text.empty() ? "" : "\n" + m.fault.text;
        m.fault = {kind, where + text + before};
    }
    throw Stop();
}

}  // namespace emulator
