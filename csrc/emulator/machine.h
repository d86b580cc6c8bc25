// A small GPU on the host. Every thread is a fiber; fibers change where a thread waits, where the lanes of a warp meet,
// and where the schedule preempts. The kernels of any number of instances, each in its own shared library, run on the
// one machine of the process.
#pragma once
#include <cstdint>
#include <deque>
#include <list>
#include <memory>
#include <source_location>
#include <string>
#include <unordered_map>
#include <vector>

#include "fiber.h"
#include "memory.h"
#include "options.h"
#include "view.h"

namespace emulator {

constexpr int WARP_LANES = 32;
constexpr uint32_t ALL_LANES = 0xffffffffu;
constexpr int NAMED_BARRIERS = 16;
constexpr uint32_t MAX_MBARRIERS = 64;

struct Lane;
struct Launch;

// Something a spinning thread polls; `version` grows whenever a poll might find something new.
struct Watch {
    uint64_t version = 0;
    std::vector<Lane*> sleepers;
};

// What a stopped thread waits for, for reports.
enum class WaitKind : uint8_t { none, lanes, named_barrier, poll, previous_launch, own_copies };
struct Wait {
    WaitKind kind = WaitKind::none;
    uint64_t detail = 0;  // named barrier: id; poll: address or mbarrier offset
    bool shared = false;  // poll: an mbarrier
    Site site;
};

enum class Meeting : uint8_t { sync, elect, shuffle, ballot, mma, transpose, transposed_load };

struct Warp {
    uint32_t ready = 0, arrived = 0, exited = 0;  // sets of lanes
    Meeting meeting = Meeting::sync;
    bool queued = false;
    uint32_t priority = 0;
    Lane* lanes = nullptr;  // the first of 32
    uint32_t in[WARP_LANES][6];
    uint32_t out[WARP_LANES][4];
};

struct NamedBarrier {
    int expected = 0;
    std::vector<Lane*> arrived;
};

struct MBarrier {
    uint32_t offset = 0, component = 0;
    uint32_t first_phase = 0;  // count of the component at the beginning of this launch
    uint32_t arrivals = 0, phase = 0;
    int64_t pending = 0, bytes = 0;
    bool fenced = false;                              // initialisation is visible to the copy engine
    uint32_t initialiser = 0, initialiser_epoch = 0;  // who must be known to have initialised it
    View arriving, completed;
    Watch watch;
};

struct Cta {
    Launch* launch = nullptr;
    int index = 0, live = 0, copies = 0;
    std::vector<uint8_t> shared;
    Shadow shadow;
    std::unordered_map<uint32_t, MBarrier> mbarriers;
    NamedBarrier named[NAMED_BARRIERS];
    std::vector<Warp> warps;
    std::vector<Lane> lanes;
    uint32_t first_component = 0;
    // Copies that a thread has not waited for: a component that nobody knows of.
    uint32_t own_copies_component() const { return first_component + own_copies_at; }
    uint32_t own_copies_at = 0, own_copies_epoch = 0;
};

// Copies that the thread itself waits for. Until it does, what they read and wrote is noted as the CTA's
// own_copies_component at `epoch`; then, as the thread's.
struct CopyGroup {
    uint32_t epoch = 0, pending = 0;
    std::vector<Block*> touched;
};

struct Lane {
    Fiber fiber;
    Warp* warp = nullptr;
    Cta* cta = nullptr;
    int thread = 0, index = 0;
    bool done = false;
    Wait wait;
    // What this thread knows, in an ordered run: `view` of all others, `epoch` is its own count.
    uint32_t component = 0, epoch = 1, first_epoch = 1;
    View view, async_view;  // async_view: what its bulk copies may rely on
    // Polls since the last pause of a spin loop.
    struct Poll {
        Watch* watch;
        uint64_t version;
    };
    static constexpr size_t MAX_POLLS = 64;  // a thread that polls more at once does not sleep
    std::vector<Poll> polls;
    std::list<CopyGroup> groups;  // not waited for, oldest first; the last is not committed
};

struct Launch {
    const KernelEntry* kernel = nullptr;
    std::vector<uint8_t> parameters;
    uint32_t rank = 0;
    Launch* previous = nullptr;  // of the same rank
    int ctas = 0, started = 0, allowed = 0, finished = 0;
    uint32_t shared_bytes = 0;
    bool overlaps = false;  // launched with programmatic serialisation after its predecessor
    std::vector<bool> allows_next;
    View final_view;
    std::vector<Lane*> waiting;
    bool complete() const { return finished == ctas; }
};

// A copy that has been issued and has not landed: a bulk copy has a barrier, another a group.
struct Copy {
    Cta* cta;
    uint32_t destination, bytes;
    const uint8_t* source;
    MBarrier* barrier;
    View issued, async_view;  // what the issuing thread knew, and what its copies may rely on
    Lane* issuer;
    uint32_t issuer_epoch;
    Site site;
    CopyGroup* group = nullptr;
};

// Halves of packets (packet.cpp) that were sent to one address and have not arrived, and who waits there.
struct Wire {
    std::deque<uint64_t> halves;
    Watch watch;
};

// The launches of one rank, in stream order. With overlap, they alternate between two halves of the rank's slots.
struct Stream {
    std::vector<Launch*> launches;
    size_t waiting = 0;  // the first that has not started all its CTAs
    size_t first_slot = 0;
    View start_view;
};

// A word that is accessed with ordering: its values in the order in which they were written.
struct Atomic {
    struct Value {
        uint32_t value, component, epoch;
        View published;  // empty: nothing
    };
    std::deque<Value> values;
    Watch watch;
    uint64_t polled = 0, added = 0;
};

extern Lane* current;

class Machine {
  public:
    // Runs the launches, those of a rank in order as one stream. False: `fault` says why.
    bool run(std::vector<Launch> launches, const Options& options);

    // Called by threads.
    void leave(bool stays_ready);
    void wait_here(WaitKind kind, uint64_t detail, const Site& site);
    void wake(Lane& lane);
    void notify(Watch& watch);
    void poll(Watch& watch, uint64_t detail, bool shared, const Site& site);
    void pause();
    void point(uint32_t weight) {
        if (countdown_ > weight) {
            countdown_ -= weight;
        } else if (options.preempt_interval != 0) {
            preempt();
        }
    }
    void order_group(Lane* const* lanes, size_t count);
    View release(Lane& lane);
    void acquire(Lane& lane, const View& published);
    uint64_t random();
    bool chance(uint32_t one_in) { return options.seed != 0 && random() % one_in == 0; }
    uint64_t now() const { return steps_ * 10 + jumped_; }
    void start_copy(Copy copy);
    void start_half(uint32_t* address, uint64_t half);
    Watch& watch_of(const uint32_t* address) { return wires_[reinterpret_cast<uintptr_t>(address)].watch; }
    bool several_ranks() const { return streams_.size() > 1; }
    bool injected(Injection what, const void* address = nullptr) const {
        return options.injection == what &&
               (options.injection_address == 0 || options.injection_address == reinterpret_cast<uintptr_t>(address));
    }

    Options options;
    Regions regions;
    std::unordered_map<uintptr_t, Atomic> atomics;
    std::unordered_map<uintptr_t, std::pair<uintptr_t, uintptr_t>> lines;  // line: a polled word, an added-to word
    FaultReport fault;
    uint64_t switches = 0, races = 0;
    std::vector<Event> events;
    void note(EventKind kind, uint64_t place, uint64_t phase = 0) {
        if (options.trace == 0) return;
        const auto launch = static_cast<uint32_t>(current->cta->launch - launches_.data());
        events.push_back({launch, static_cast<uint32_t>(current->cta->index), static_cast<uint32_t>(current->thread),
                          kind, place, phase});
    }
    uint32_t components_per_cta = 0, max_ctas = 0, max_threads = 0;
    bool by_copy_engine(uint32_t component) const { return component % components_per_cta >= max_threads; }
    std::string who(uint32_t component) const;
    uint32_t first_phase(uint32_t component) const { return component_epochs_[component]; }

  private:
    friend void run_lane();
    void preempt();
    Lane* pick_lane(Warp& warp, int after);
    Warp* pick_warp();
    void enqueue(Warp& warp);
    void start_ctas(Stream& stream);
    bool all_started() const;
    void start_cta(Launch& launch, int index, int slot);
    void finish_lane(Lane& lane);
    void finish_cta(Cta& cta);
    void land(size_t index);
    void arrive(size_t index);
    bool resolve_standstill();
    std::string waits() const;

    std::vector<Launch> launches_;
    std::vector<Stream> streams_;
    std::vector<std::unique_ptr<Cta>> slots_;  // resident CTAs
    std::vector<Warp*> queue_;
    size_t queue_head_ = 0;
    std::vector<Copy> copies_;
    std::unordered_map<uintptr_t, Wire> wires_;
    std::vector<uintptr_t> sent_;  // addresses of the halves under way
    Fiber scheduler_;
    Stacks stacks_;
    uint64_t steps_ = 0, jumped_ = 0, random_ = 0;
    uint32_t countdown_ = 0, preemptions_ = 0, live_ = 0, slots_per_rank_ = 0, late_pauses_ = 0;
    std::vector<uint32_t> component_epochs_;
    View join_left_, join_right_, join_result_;
    Warp* running_ = nullptr;
    bool preempting_ = false, timed_out_ = false;
};

Machine& machine();

}  // namespace emulator
