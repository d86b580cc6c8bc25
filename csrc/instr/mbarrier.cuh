// Shared-memory barriers that also count the bytes of bulk copies.
#pragma once
#include "core.cuh"

DEVICE void mbarrier_init(uint32_t offset, uint32_t arrivals) {
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(shared_address(offset)), "r"(arrivals) : "memory");
}
// Makes the initialisation visible to the copy engine; a CTA barrier must follow for the other threads.
DEVICE void mbarrier_init_fence() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
DEVICE void mbarrier_arrive(uint32_t offset) {
    asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(shared_address(offset)) : "memory");
}
DEVICE void mbarrier_arrive_expect(uint32_t offset, uint32_t bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(shared_address(offset)), "r"(bytes)
                 : "memory");
}
// True once the phase of this parity is complete; may suspend the thread for a bounded time.
DEVICE bool mbarrier_try_wait(uint32_t offset, uint32_t parity) {
    uint32_t done;
    asm volatile("{\n.reg .pred p;\nmbarrier.try_wait.parity.shared.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}"
                 : "=r"(done)
                 : "r"(shared_address(offset)), "r"(parity)
                 : "memory");
    return done != 0;
}
// The same without suspending.
DEVICE bool mbarrier_test_wait(uint32_t offset, uint32_t parity) {
    uint32_t done;
    asm volatile("{\n.reg .pred p;\nmbarrier.test_wait.parity.shared.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}"
                 : "=r"(done)
                 : "r"(shared_address(offset)), "r"(parity)
                 : "memory");
    return done != 0;
}
