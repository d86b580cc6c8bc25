// Stackful fibers: one per thread of the emulated GPU, and one for the scheduler.
// ucontext starts a fiber; _setjmp and _longjmp, which make no system call, switch between running ones.
#pragma once
#include <setjmp.h>

#include <cstddef>
#include <cstdint>

namespace emulator {

struct Fiber {
    jmp_buf at;
    uint8_t* stack = nullptr;  // null: the fiber that called the machine
    bool started = false;
};

// The function every fiber runs; it never returns.
using FiberEntry = void (*)();

// Saves `from` and continues `to`, from its beginning when it has not started.
void switch_fiber(Fiber& from, Fiber& to, FiberEntry entry);

// Stacks, made when first used and then kept. Below each of the first few thousand lies a guard page; a guard page for
// every thread of a large machine would exceed the number of mappings Linux allows.
class Stacks {
  public:
    uint8_t* at(size_t index);
    static constexpr size_t BYTES = 128 * 1024;

  private:
    static constexpr size_t PER_CHUNK = 256, GUARDED_CHUNKS = 64, CHUNKS = 1024;
    uint8_t* chunks_[CHUNKS] = {};
};

}  // namespace emulator
