// Bulk copies from global to shared memory; addresses and sizes are multiples of 16 bytes.
#pragma once
#include "core.cuh"

enum class Keep { first_out, last_out };  // L2 eviction priority: streamed weights go first, activations stay

DEVICE uint64_t eviction_policy(Keep keep) {
    uint64_t policy;
    if (keep == Keep::first_out) {
        asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    } else {
        asm volatile("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
    }
    return policy;
}
DEVICE void bulk_load(uint32_t destination, const void* source, uint32_t bytes, uint32_t barrier, uint64_t policy) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::
            "r"(shared_address(destination)),
        "l"(source), "r"(bytes), "r"(shared_address(barrier)), "l"(policy)
        : "memory");
}
// Asks for bytes to be brought into L2; nothing waits for them.
DEVICE void bulk_prefetch(const void* source, uint32_t bytes) {
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(source), "r"(bytes) : "memory");
}

// A box of a 3D array through its description (megakernel/boxes.py): one instruction for many rows. x, y, z: the box's
// first element in each dimension, innermost first; it lands densely at `destination`, a multiple of 128.
DEVICE void bulk_load_box(uint32_t destination, const void* boxes, int x, int y, int z, uint32_t barrier,
                          uint64_t policy) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint "
        "[%0], [%1, {%2, %3, %4}], [%5], %6;" ::"r"(shared_address(destination)),
        "l"(boxes), "r"(x), "r"(y), "r"(z), "r"(shared_address(barrier)), "l"(policy)
        : "memory");
}
// Before the first use of a description that lies in global memory.
DEVICE void acquire_boxes(const void* boxes) {
    asm volatile("fence.proxy.tensormap::generic.acquire.gpu [%0], 128;" ::"l"(boxes) : "memory");
}
