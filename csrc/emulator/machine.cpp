// The life of launches, CTAs and threads.
#include "machine.h"

#include <algorithm>
#include <cstring>

#include "warp.h"

namespace emulator {

Machine& machine() {
    static Machine* const the = new Machine;  // outlives the fibers' and the libraries' last words
    return *the;
}

Lane* current = nullptr;

void run_lane() {
    try {
        Machine& m = machine();
        const Launch& launch = *current->cta->launch;
        const bool exits = m.options.injection == Injection::early_exit &&
                           launch.rank == m.options.injection_address >> 32 &&
                           static_cast<uint64_t>(current->cta->index) == (m.options.injection_address & 0xffffffffu);
        if (!exits) launch.kernel->body(launch.parameters.data());
        m.finish_lane(*current);
    } catch (const Stop&) {
    }
    current->done = true;
    machine().leave(false);
    __builtin_unreachable();
}

std::string Machine::who(uint32_t component) const {
    const uint32_t cta = component / components_per_cta, part = component % components_per_cta;
    std::string text = several_ranks() ? "rank " + std::to_string(cta / slots_per_rank_) + " " : "";
    text += "CTA " + std::to_string(cta % max_ctas);
    if (part < max_threads) {
        return text + " warp " + std::to_string(part / WARP_LANES) + " lane " + std::to_string(part % WARP_LANES);
    }
    return "a copy of " + text;
}

void Machine::start_cta(Launch& launch, int index, int slot) {
    if (slots_[slot] == nullptr) slots_[slot] = std::make_unique<Cta>();
    Cta& cta = *slots_[slot];
    cta.launch = &launch;
    cta.index = index;
    cta.first_component = static_cast<uint32_t>(slot) * components_per_cta;
    cta.own_copies_at = components_per_cta - 1;
    if (options.ordered != 0) cta.own_copies_epoch = component_epochs_[cta.own_copies_component()];
    cta.live = launch.kernel->threads;
    cta.shared.assign(launch.shared_bytes, 0xff);  // NaNs: what nobody wrote cannot go unnoticed in a sum
    cta.mbarriers.clear();
    for (NamedBarrier& barrier : cta.named) barrier = {};
    cta.warps.assign(launch.kernel->threads / WARP_LANES, Warp{});
    cta.lanes.assign(launch.kernel->threads, Lane{});
    if (options.ordered != 0) cta.shadow.resize(launch.shared_bytes);
    for (int thread = 0; thread < launch.kernel->threads; ++thread) {
        Lane& lane = cta.lanes[thread];
        lane.cta = &cta;
        lane.thread = thread;
        lane.index = thread % WARP_LANES;
        lane.warp = &cta.warps[thread / WARP_LANES];
        lane.fiber.stack = stacks_.at(static_cast<size_t>(slot) * max_threads + thread);
        if (lane.index == 0) lane.warp->lanes = &lane;
        if (options.ordered != 0) {
            lane.component = cta.first_component + thread;
            lane.first_epoch = lane.epoch = component_epochs_[lane.component] + 1;
            lane.view = lane.async_view = streams_[launch.rank].start_view;
        }
    }
    for (Warp& warp : cta.warps) {
        warp.ready = ALL_LANES;
        warp.priority = static_cast<uint32_t>(random());
        enqueue(warp);
    }
    live_ += launch.kernel->threads;
    ++launch.started;
}

void Machine::start_ctas(Stream& stream) {
    int resident = 0;
    for (const Launch* launch : stream.launches) resident += launch->started - launch->finished;
    for (; stream.waiting < stream.launches.size(); ++stream.waiting) {
        Launch& launch = *stream.launches[stream.waiting];
        const Launch* const previous = launch.previous;
        const bool early = options.overlap != 0 && launch.overlaps;
        if (previous != nullptr) {
            if (previous->started < previous->ctas) return;
            if (early ? previous->allowed < previous->ctas : !previous->complete()) return;
            if (previous->previous != nullptr && !previous->previous->complete()) return;
            if (!early) stream.start_view = previous->final_view;
        }
        const size_t half = options.overlap != 0 ? stream.waiting % 2 * max_ctas : 0;
        while (launch.started < launch.ctas && resident < static_cast<int>(max_ctas)) {
            start_cta(launch, launch.started, static_cast<int>(stream.first_slot + half) + launch.started);
            ++resident;
        }
        if (launch.started < launch.ctas) return;
    }
}

bool Machine::all_started() const {
    return std::all_of(streams_.begin(), streams_.end(),
                       [](const Stream& stream) { return stream.waiting == stream.launches.size(); });
}

void Machine::finish_lane(Lane& lane) {
    Cta& cta = *lane.cta;
    Launch& launch = *cta.launch;
    lane.warp->exited |= 1u << lane.index;
    if (options.ordered != 0) {
        component_epochs_[lane.component] = lane.epoch;
        if (launch.final_view.empty()) launch.final_view = View::nothing();
        launch.final_view.raise(lane.view);
        launch.final_view.raise(lane.component, lane.epoch);
    }
    --live_;
    if (--cta.live == 0) finish_cta(cta);
}

void Machine::finish_cta(Cta& cta) {
    Launch& launch = *cta.launch;
    if (cta.copies != 0) {
        fail("copy", "the CTA ends while " + std::to_string(cta.copies) + " copies to its shared memory are in flight",
             Site::current());
    }
    if (options.ordered != 0) {
        for (const auto& [offset, barrier] : cta.mbarriers) {
            component_epochs_[barrier.component] = barrier.first_phase + barrier.phase + 1;
        }
        component_epochs_[cta.own_copies_component()] = cta.own_copies_epoch;
        launch.final_view.raise(cta.own_copies_component(), cta.own_copies_epoch);
    }
    if (!launch.allows_next[cta.index]) {
        launch.allows_next[cta.index] = true;
        ++launch.allowed;
    }
    if (++launch.finished < launch.ctas) return;
    for (Lane* waiting : launch.waiting) wake(*waiting);
    launch.waiting.clear();
}

bool Machine::run(std::vector<Launch> launches, const Options& chosen) {
    options = chosen;
    fault = {};
    launches_ = std::move(launches);
    steps_ = jumped_ = switches = races = 0;
    random_ = options.seed * 0x9e3779b97f4a7c15ull + 1;
    preemptions_ = live_ = late_pauses_ = 0;
    countdown_ =
        options.preempt_interval != 0 ? 1 + static_cast<uint32_t>(random() % (2 * options.preempt_interval)) : ~0u;
    preempting_ = timed_out_ = false;
    queue_.clear();
    queue_head_ = 0;
    copies_.clear();
    wires_.clear();
    sent_.clear();
    streams_.clear();
    events.clear();
    atomics.clear();
    lines.clear();
    regions.forget_accesses();
    slots_.clear();
    join_left_ = join_right_ = join_result_ = {};
    max_ctas = max_threads = 0;
    for (Launch& launch : launches_) {
        max_ctas = std::max(max_ctas, static_cast<uint32_t>(launch.ctas));
        max_threads = std::max(max_threads, static_cast<uint32_t>(launch.kernel->threads));
        launch.allows_next.assign(launch.ctas, false);
        launch.final_view = {};
        if (streams_.size() <= launch.rank) streams_.resize(launch.rank + 1);
        std::vector<Launch*>& before = streams_[launch.rank].launches;
        launch.previous = before.empty() ? nullptr : before.back();
        before.push_back(&launch);
    }
    components_per_cta = max_threads + MAX_MBARRIERS + 1;  // the last: copies that threads have not waited for
    slots_per_rank_ = max_ctas * (options.overlap != 0 ? 2u : 1u);
    const size_t slots = slots_per_rank_ * streams_.size();
    slots_.resize(slots);
    if (options.ordered != 0) {
        View::set_components(static_cast<uint32_t>(slots * components_per_cta));
        component_epochs_.assign(slots * components_per_cta, 0);
    }
    for (size_t rank = 0; rank < streams_.size(); ++rank) {
        streams_[rank].first_slot = rank * slots_per_rank_;
        if (options.ordered != 0) streams_[rank].start_view = View::nothing();
    }

    while (fault.kind.empty()) {
        for (Stream& stream : streams_) start_ctas(stream);
        if (live_ == 0 && all_started()) break;
        ++steps_;
        if (!copies_.empty() && chance(4)) land(random() % copies_.size());
        if (!sent_.empty() && chance(2)) arrive(random() % sent_.size());
        Warp* warp = pick_warp();
        if (warp == nullptr) {
            if (!sent_.empty()) {
                arrive(random() % sent_.size());
            } else if (!copies_.empty()) {
                land(random() % copies_.size());
            } else if (!resolve_standstill()) {
                break;
            }
            continue;
        }
        running_ = warp;
        current = pick_lane(*warp, WARP_LANES - 1);
        ++switches;
        switch_fiber(scheduler_, current->fiber, run_lane);
        running_ = nullptr;
        if (warp->ready != 0 && !warp->queued) enqueue(*warp);
    }
    current = nullptr;
    while (!sent_.empty()) arrive(sent_.size() - 1);
    return fault.kind.empty();
}

}  // namespace emulator
