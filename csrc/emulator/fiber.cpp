#include "fiber.h"

#include <sys/mman.h>
#include <ucontext.h>
#include <unistd.h>

#include <new>

namespace emulator {

void switch_fiber(Fiber& from, Fiber& to, FiberEntry entry) {
    from.started = true;
    if (_setjmp(from.at) != 0) return;
    if (to.started) _longjmp(to.at, 1);
    static ucontext_t start;
    to.started = true;
    getcontext(&start);
    start.uc_stack.ss_sp = to.stack;
    start.uc_stack.ss_size = Stacks::BYTES;
    start.uc_link = nullptr;
    makecontext(&start, entry, 0);
    setcontext(&start);
}

uint8_t* Stacks::at(size_t index) {
    const size_t guard = static_cast<size_t>(sysconf(_SC_PAGESIZE)), stride = BYTES + guard;
    if (index >= CHUNKS * PER_CHUNK) throw std::bad_alloc();
    uint8_t*& chunk = chunks_[index / PER_CHUNK];
    if (chunk == nullptr) {
        void* memory = mmap(nullptr, stride * PER_CHUNK, PROT_READ | PROT_WRITE,
                            MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_STACK, -1, 0);
        if (memory == MAP_FAILED) throw std::bad_alloc();
        chunk = static_cast<uint8_t*>(memory);
        const bool guarded = index / PER_CHUNK < GUARDED_CHUNKS;
        for (size_t i = 0; guarded && i < PER_CHUNK; ++i) mprotect(chunk + i * stride, guard, PROT_NONE);
    }
    return chunk + index % PER_CHUNK * stride + guard;
}

}  // namespace emulator
