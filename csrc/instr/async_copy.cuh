// Copies of 16 bytes from global to shared memory that the copying thread itself waits for, in groups. They belong to
// the thread's own accesses (no other proxy); after a wait, others see them through any meeting with it.
#pragma once
#include "core.cuh"

// Both addresses are multiples of 16.
DEVICE void copy_async(uint32_t destination, const void* source) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(destination)), "l"(source)
                 : "memory");
}
// The copies since the last call are a group, which may be empty.
DEVICE void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Until at most PENDING of the newest groups are under way.
template <int PENDING>
DEVICE void wait_copies() {
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}
