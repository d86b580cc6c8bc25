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
                           static_cast<uint64_t>(current->cta->index) == m.options.injection_address;
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
    std::string text = "CTA " + std::to_string(cta % max_ctas);
    if (part < max_threads) {
        return text + " warp " + std::to_string(part / WARP_LANES) + " lane " + std::to_string(part % WARP_LANES);
    }
    return "a bulk copy of " + text;
}

void Machine::start_cta(Launch& launch, int index, int slot) {
    if (slots_[slot] == nullptr) slots_[slot] = std::make_unique<Cta>();
    Cta& cta = *slots_[slot];
    cta.launch = &launch;
    cta.index = index;
    cta.slot = slot;
    cta.first_component = static_cast<uint32_t>(slot) * components_per_cta;
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
            lane.view = lane.async_view = start_view_;
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

void Machine::start_ctas() {
    int resident = 0;
    for (const Launch& launch : launches_) resident += launch.started - launch.finished;
    for (size_t i = first_waiting_launch_; i < launches_.size(); ++i) {
        Launch& launch = launches_[i];
        if (i > 0 && launches_[i - 1].started < launches_[i - 1].ctas) return;
        const bool early = options.overlap != 0 && launch.overlaps;
        if (i > 0 && (early ? launches_[i - 1].allowed < launches_[i - 1].ctas : !launches_[i - 1].complete())) return;
        if (i > 1 && !launches_[i - 2].complete()) return;
        if (i > 0 && !early) start_view_ = launches_[i - 1].final_view;
        while (launch.started < launch.ctas && resident < static_cast<int>(max_ctas)) {
            const int half = options.overlap != 0 ? static_cast<int>(i % 2 * max_ctas) : 0;
            start_cta(launch, launch.started, half + launch.started);
            ++resident;
        }
        if (launch.started < launch.ctas) return;
        first_waiting_launch_ = static_cast<uint32_t>(i) + 1;
    }
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
        fail("copy",
             "the CTA ends while " + std::to_string(cta.copies) + " bulk copies to its shared memory are in flight",
             Site::current());
    }
    if (options.ordered != 0) {
        for (const auto& [offset, barrier] : cta.mbarriers) {
            component_epochs_[barrier.component] = barrier.first_phase + barrier.phase + 1;
        }
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
    preemptions_ = live_ = first_waiting_launch_ = late_pauses_ = 0;
    countdown_ =
        options.preempt_interval != 0 ? 1 + static_cast<uint32_t>(random() % (2 * options.preempt_interval)) : ~0u;
    preempting_ = timed_out_ = false;
    queue_.clear();
    queue_head_ = 0;
    copies_.clear();
    events.clear();
    atomics.clear();
    lines.clear();
    regions.forget_accesses();
    slots_.clear();
    start_view_ = join_left_ = join_right_ = join_result_ = {};
    max_ctas = max_threads = 0;
    for (Launch& launch : launches_) {
        max_ctas = std::max(max_ctas, static_cast<uint32_t>(launch.ctas));
        max_threads = std::max(max_threads, static_cast<uint32_t>(launch.kernel->threads));
        launch.allows_next.assign(launch.ctas, false);
        launch.final_view = {};
    }
    components_per_cta = max_threads + MAX_MBARRIERS;
    const size_t slots = max_ctas * (options.overlap != 0 ? 2u : 1u);
    slots_.resize(slots);
    if (options.ordered != 0) {
        View::set_components(static_cast<uint32_t>(slots * components_per_cta));
        component_epochs_.assign(slots * components_per_cta, 0);
        start_view_ = View::nothing();
    }

    start_ctas();
    while (fault.kind.empty()) {
        if (first_waiting_launch_ < launches_.size()) start_ctas();
        if (live_ == 0 && first_waiting_launch_ == launches_.size()) break;
        ++steps_;
        if (!copies_.empty() && chance(4)) land(random() % copies_.size());
        Warp* warp = pick_warp();
        if (warp == nullptr) {
            if (!copies_.empty()) {
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
    return fault.kind.empty();
}

}  // namespace emulator
