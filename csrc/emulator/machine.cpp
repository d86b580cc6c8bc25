#include "machine.h"

#include <setjmp.h>
#include <ucontext.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <string>

namespace emulator {
namespace {

constexpr size_t STACK_BYTES = 64 * 1024;

struct Context {
    ucontext_t start;
    jmp_buf at;
    bool started = false;
    std::unique_ptr<uint8_t[]> stack;
};

struct Copy {
    Cta* cta;
    uint32_t destination, bytes, barrier;
    const void* source;
};

struct Machine {
    std::vector<Cta> ctas;
    std::vector<Fiber> fibers;
    std::vector<Fiber*> ready;
    std::vector<Copy> copies;
    std::function<void()> body;
    std::mt19937_64 random;
    uint64_t turn = 0;
    Fiber* current = nullptr;
    jmp_buf scheduler;
    std::string why;
};

Machine* machine = nullptr;

Context& context_of(Fiber& fiber) { return *static_cast<Context*>(fiber.context); }

// Leaves the current fiber for the scheduler; comes back when the scheduler picks it again.
void leave() {
    if (_setjmp(context_of(*machine->current).at) == 0) _longjmp(machine->scheduler, 1);
}

void enter_fiber() {
    machine->body();
    machine->current->done = true;
    _longjmp(machine->scheduler, 1);
}

void land_one_copy() {
    const size_t pick = machine->random() % machine->copies.size();
    const Copy copy = machine->copies[pick];
    machine->copies[pick] = machine->copies.back();
    machine->copies.pop_back();
    std::memcpy(copy.cta->shared.data() + copy.destination, copy.source, copy.bytes);
    copy.cta->barriers.at(copy.barrier).complete(copy.bytes);
}

void resume(Fiber& fiber) {
    machine->current = &fiber;
    Context& context = context_of(fiber);
    if (_setjmp(machine->scheduler) != 0) return;
    if (context.started) _longjmp(context.at, 1);
    context.started = true;
    setcontext(&context.start);
}

void describe_deadlock() {
    machine->why = "deadlock: nobody can run; first waiting threads:";
    int listed = 0;
    for (Fiber& fiber : machine->fibers) {
        if (fiber.done || listed == 8) continue;
        ++listed;
        machine->why += " (CTA " + std::to_string(fiber.cta->index) + ", thread " + std::to_string(fiber.thread) + ")";
    }
}

}  // namespace

void MBarrier::init(uint32_t count) {
    arrivals = pending = count;
    phase = 0;
    bytes = 0;
}
void MBarrier::turn() {
    if (pending == 0 && bytes == 0) {
        pending = arrivals;
        ++phase;
    }
}
void MBarrier::arrive(uint32_t expected_bytes) {
    if (pending == 0) fault("more arrivals at an mbarrier than its count");
    bytes += expected_bytes;
    --pending;
    turn();
}
void MBarrier::complete(uint32_t copied_bytes) {
    bytes -= copied_bytes;
    turn();
}

Fiber& self() { return *machine->current; }
uint64_t turns() { return machine->turn; }

void yield() {
    machine->ready.push_back(machine->current);
    leave();
}

void fault(const char* why) {
    if (machine->why.empty()) {
        machine->why = std::string(why) + " (CTA " + std::to_string(self().cta->index) + ", thread " +
                       std::to_string(self().thread) + ")";
    }
    _longjmp(machine->scheduler, 1);
}

const uint32_t* warp_collective(std::initializer_list<uint32_t> words, void (*meet)(Warp&)) {
    Warp& warp = self().cta->warps[self().thread / 32];
    const int lane = self().thread % 32;
    std::copy(words.begin(), words.end(), warp.in[lane].begin());
    if (++warp.arrived == 32) {
        meet(warp);
        warp.arrived = 0;
        machine->ready.insert(machine->ready.end(), warp.waiting.begin(), warp.waiting.end());
        warp.waiting.clear();
    } else {
        warp.waiting.push_back(machine->current);
        leave();
    }
    return warp.out[lane].data();
}

void named_barrier(int id, int threads) {
    std::vector<Fiber*>& waiting = self().cta->named[id];
    if (static_cast<int>(waiting.size()) + 1 == threads) {
        machine->ready.insert(machine->ready.end(), waiting.begin(), waiting.end());
        waiting.clear();
    } else {
        waiting.push_back(machine->current);
        leave();
    }
}

uint8_t* shared_at(uint32_t offset, uint32_t bytes, uint32_t alignment) {
    if (offset % alignment != 0) fault("shared access is not aligned");
    if (offset + bytes > self().cta->shared.size()) fault("shared access is out of bounds");
    return self().cta->shared.data() + offset;
}

MBarrier& mbarrier_at(uint32_t offset) {
    auto found = self().cta->barriers.find(offset);
    if (found == self().cta->barriers.end()) fault("use of an mbarrier that was never initialised");
    return found->second;
}

void start_copy(uint32_t destination, const void* source, uint32_t bytes, uint32_t barrier) {
    if (destination % 16 != 0 || bytes % 16 != 0 || reinterpret_cast<uintptr_t>(source) % 16 != 0) {
        fault("bulk copy is not 16-byte aligned");
    }
    if (destination + bytes > self().cta->shared.size()) fault("bulk copy leaves shared memory");
    mbarrier_at(barrier);
    machine->copies.push_back({self().cta, destination, bytes, barrier, source});
}

int run(int ctas, int threads, uint32_t shared_bytes, uint64_t seed, std::function<void()> body, char* report,
        int report_size) {
    Machine here;
    machine = &here;
    here.body = std::move(body);
    here.random.seed(seed);
    here.ctas.resize(ctas);
    here.fibers.resize(static_cast<size_t>(ctas) * threads);
    std::vector<Context> contexts(here.fibers.size());
    for (int index = 0; index < ctas; ++index) {
        Cta& cta = here.ctas[index];
        cta.index = index;
        cta.shared.assign(shared_bytes, 0xff);  // reads of unwritten shared memory give NaNs
        cta.warps.resize(threads / 32);
        for (int thread = 0; thread < threads; ++thread) {
            const size_t at = static_cast<size_t>(index) * threads + thread;
            Fiber& fiber = here.fibers[at];
            Context& context = contexts[at];
            fiber = {thread, &cta, false, &context};
            context.stack.reset(new uint8_t[STACK_BYTES]);
            getcontext(&context.start);
            context.start.uc_stack.ss_sp = context.stack.get();
            context.start.uc_stack.ss_size = STACK_BYTES;
            context.start.uc_link = nullptr;
            makecontext(&context.start, enter_fiber, 0);
            here.ready.push_back(&fiber);
        }
    }
    while (here.why.empty()) {
        ++here.turn;
        if (!here.copies.empty() && (here.ready.empty() || here.random() % 4 == 0)) land_one_copy();
        if (here.ready.empty()) {
            if (!here.copies.empty()) continue;
            break;
        }
        const size_t pick = here.random() % here.ready.size();
        Fiber* next = here.ready[pick];
        here.ready[pick] = here.ready.back();
        here.ready.pop_back();
        resume(*next);
    }
    if (here.why.empty()) {
        for (const Fiber& fiber : here.fibers) {
            if (!fiber.done) {
                describe_deadlock();
                break;
            }
        }
    }
    machine = nullptr;
    if (here.why.empty()) return 0;
    std::snprintf(report, report_size, "%s", here.why.c_str());
    return 1;
}

}  // namespace emulator
