// Barriers of a CTA, mbarriers, bulk copies and the order of launches.
#include "sync.h"

#include "machine.h"

namespace emulator {
namespace {

MBarrier& find(uint32_t offset, const Site& site) {
    Cta& cta = *current->cta;
    const auto found = cta.mbarriers.find(offset);
    if (found == cta.mbarriers.end())
        fail("mbarrier", "uses the mbarrier at " + std::to_string(offset) + " before it is initialised", site);
    MBarrier& barrier = found->second;
    if (machine().options.ordered != 0) {
        const Actor me{current->component, current->epoch, current->first_epoch, &current->view};
        if (!me.knows(barrier.initialiser, barrier.initialiser_epoch)) {
            fail("race",
                 "uses the mbarrier at " + std::to_string(offset) + ", whose initialisation by " +
                     machine().who(barrier.initialiser) + " is not ordered before",
                 site);
        }
    }
    return barrier;
}

void turn(MBarrier& barrier) {
    if (barrier.pending != 0 || barrier.bytes != 0) return;
    ++barrier.phase;
    barrier.pending = barrier.arrivals;
    if (machine().options.ordered != 0) {
        barrier.completed = barrier.arriving.copy();
        barrier.completed.raise(barrier.component, barrier.first_phase + barrier.phase);
        barrier.arriving = View::nothing();
    }
    machine().notify(barrier.watch);
}

}  // namespace

void init_mbarrier(uint32_t offset, uint32_t arrivals, const Site& site) {
    Machine& m = machine();
    Cta& cta = *current->cta;
    if (offset % 8 != 0 || offset + 8 > cta.shared.size())
        fail("bounds", "an mbarrier at " + std::to_string(offset), site);
    if (cta.mbarriers.contains(offset))
        fail("mbarrier", "initialises the mbarrier at " + std::to_string(offset) + " again", site);
    if (cta.mbarriers.size() == MAX_MBARRIERS) fail("mbarrier", "has more than 64 mbarriers", site);
    MBarrier& barrier = cta.mbarriers[offset];
    barrier.offset = offset;
    barrier.arrivals = arrivals;
    barrier.pending = arrivals;
    barrier.component = cta.first_component + m.max_threads + static_cast<uint32_t>(cta.mbarriers.size()) - 1;
    m.note(EventKind::mbarrier_init, offset, arrivals);
    if (m.options.ordered == 0) return;
    barrier.first_phase = m.first_phase(barrier.component);
    barrier.initialiser = current->component;
    barrier.initialiser_epoch = current->epoch;
    barrier.arriving = View::nothing();
}

void fence_mbarrier_init() {
    if (machine().injected(Injection::missing_init_fence)) return;
    for (auto& [offset, barrier] : current->cta->mbarriers) {
        if (machine().options.ordered == 0 || barrier.initialiser == current->component) barrier.fenced = true;
    }
}

void arrive_mbarrier(uint32_t offset, uint32_t expected_bytes, const Site& site) {
    Machine& m = machine();
    m.point(16);
    MBarrier& barrier = find(offset, site);
    if (barrier.pending == 0) {
        fail("mbarrier",
             "arrives at the mbarrier at " + std::to_string(offset) + ", whose " + std::to_string(barrier.arrivals) +
                 " arrivals of this phase are already there",
             site);
    }
    m.note(EventKind::mbarrier_arrive, offset, barrier.phase);
    barrier.bytes += expected_bytes;
    --barrier.pending;
    if (m.options.ordered != 0) {
        barrier.arriving.raise(current->view);
        barrier.arriving.raise(current->component, current->epoch++);
    }
    turn(barrier);
}

bool test_mbarrier(uint32_t offset, uint32_t parity, const Site& site) {
    Machine& m = machine();
    m.point(16);
    MBarrier& barrier = find(offset, site);
    m.poll(barrier.watch, offset, true, site);
    if ((barrier.phase & 1u) == parity) return false;
    if (m.chance(16)) {  // try_wait may time out
        current->polls.back().version = ~0ull;
        return false;
    }
    current->polls.clear();
    if (barrier.phase != 0) m.note(EventKind::mbarrier_wait, offset, barrier.phase - 1);
    if (m.options.ordered != 0) m.acquire(*current, barrier.completed);
    return true;
}

void meet_at_barrier(int id, int threads, const Site& site) {
    Machine& m = machine();
    m.point(16);
    if (id < 0 || id >= NAMED_BARRIERS || threads % WARP_LANES != 0)
        fail("barrier", "an impossible barrier " + std::to_string(id), site);
    m.note(EventKind::barrier, static_cast<uint64_t>(id), static_cast<uint64_t>(threads));
    NamedBarrier& barrier = current->cta->named[id];
    if (barrier.arrived.empty()) barrier.expected = threads;
    if (barrier.expected != threads) {
        fail("barrier",
             "brings " + std::to_string(threads) + " threads to barrier " + std::to_string(id) +
                 ", where others expect " + std::to_string(barrier.expected),
             site);
    }
    barrier.arrived.push_back(current);
    if (static_cast<int>(barrier.arrived.size()) < threads) {
        m.wait_here(WaitKind::named_barrier, static_cast<uint64_t>(id), site);
        return;
    }
    if (m.options.ordered != 0) m.order_group(barrier.arrived.data(), barrier.arrived.size());
    for (Lane* lane : barrier.arrived) {
        if (lane != current) m.wake(*lane);
    }
    barrier.arrived.clear();
}

namespace {

void check_copy(uint32_t destination, const void* source, uint32_t bytes, const Site& site) {
    Machine& m = machine();
    if (destination % 16 != 0 || bytes % 16 != 0 || bytes == 0 || reinterpret_cast<uintptr_t>(source) % 16 != 0) {
        fail("alignment",
             "a copy of " + std::to_string(bytes) + " bytes from " + m.regions.describe(source) +
                 " to shared memory at " + std::to_string(destination),
             site);
    }
    if (static_cast<size_t>(destination) + bytes > current->cta->shared.size())
        fail("bounds", "a copy leaves shared memory", site);
    m.regions.find(source, bytes, site);
}

}  // namespace

void start_copy(uint32_t destination, const void* source, uint32_t bytes, uint32_t barrier, const Site& site) {
    Machine& m = machine();
    Cta& cta = *current->cta;
    check_copy(destination, source, bytes, site);
    MBarrier& found = find(barrier, site);
    if (!found.fenced)
        fail(
            "race",
            "a bulk copy uses the mbarrier at " + std::to_string(barrier) + " without a fence after its initialisation",
            site);
    m.start_copy({&cta, destination, bytes, static_cast<const uint8_t*>(source), &found, current->view,
                  current->async_view, current, current->epoch, site});
    m.point(16);
}

void fence_proxy() {
    Machine& m = machine();
    if (m.options.ordered != 0 && !m.injected(Injection::missing_proxy_fence))
        current->async_view = m.release(*current);
}

void start_own_copy(uint32_t destination, const void* source, uint32_t bytes, const Site& site) {
    Machine& m = machine();
    check_copy(destination, source, bytes, site);
    if (current->groups.empty()) commit_own_copies();
    CopyGroup& group = current->groups.back();
    ++group.pending;
    m.start_copy({current->cta, destination, bytes, static_cast<const uint8_t*>(source), nullptr, current->view,
                  current->view, current, current->epoch, site, &group});
    m.point(16);
}

// Closes the group that copies went to, and opens another.
void commit_own_copies() {
    CopyGroup& group = current->groups.emplace_back();
    if (machine().options.ordered != 0) group.epoch = ++current->cta->own_copies_epoch;
}

// Until at most `pending` of the newest committed groups have copies under way; the older ones become the thread's own
// accesses, as of now.
void wait_own_copies(uint32_t pending, const Site& site) {
    Machine& m = machine();
    m.point(16);
    Lane& me = *current;
    if (m.injected(Injection::missing_copy_wait)) return;
    while (me.groups.size() > pending + 1) {
        CopyGroup& oldest = me.groups.front();
        if (oldest.pending != 0) {
            m.wait_here(WaitKind::own_copies, oldest.pending, site);
            continue;
        }
        for (Block* block : oldest.touched) {
            for (Access& read : block->reads) {
                if (read.component == me.cta->own_copies_component() && read.epoch == oldest.epoch) {
                    read.component = me.component;
                    read.epoch = me.epoch;
                }
            }
            for (Write& write : block->writes) {
                if (write.component == me.cta->own_copies_component() && write.epoch == oldest.epoch) {
                    write.component = me.component;
                    write.epoch = me.epoch;
                }
            }
        }
        me.groups.pop_front();
    }
}

void wait_previous_launch(const Site& site) {
    Machine& m = machine();
    Launch* previous = current->cta->launch->previous;
    if (previous == nullptr) return;
    if (!previous->complete()) {
        previous->waiting.push_back(current);
        m.wait_here(WaitKind::previous_launch, 0, site);
    }
    if (m.options.ordered == 0) return;
    m.acquire(*current, previous->final_view);
    current->async_view = current->view;
}

void allow_following_launch() {
    Launch& launch = *current->cta->launch;
    if (launch.allows_next[current->cta->index]) return;
    launch.allows_next[current->cta->index] = true;
    ++launch.allowed;
}

void Machine::start_copy(Copy copy) {
    ++copy.cta->copies;
    copies_.push_back(std::move(copy));
    if (options.seed == 0) land(copies_.size() - 1);
}

void Machine::land(size_t index) {
    const Copy copy = std::move(copies_[index]);
    copies_[index] = std::move(copies_.back());
    copies_.pop_back();
    --copy.cta->copies;
    Lane* const before = current;
    current = copy.issuer;  // whom a report names
    try {
        copy_bytes(copy);
        if (copy.barrier != nullptr) {
            copy.barrier->bytes -= copy.bytes;
            turn(*copy.barrier);
        } else if (--copy.group->pending == 0 && copy.issuer->wait.kind == WaitKind::own_copies) {
            wake(*copy.issuer);
        }
    } catch (const Stop&) {
    }
    current = before;
}

}  // namespace emulator
