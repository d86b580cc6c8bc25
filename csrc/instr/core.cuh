// Who am I, warp and named barriers, and the CTA's shared memory as an offset space.
// Everything a phase needs from the machine comes from the headers of this folder; csrc/emulator/instr holds the same
// names with bodies for the host compiler, so a phase never contains inline PTX.
#pragma once
#include <cstdint>

#define DEVICE __device__ __forceinline__
#define DEVICE_CALL __device__ __noinline__ inline  // one copy of the code for all callers
#define KERNEL(name, parameter_type, threads) \
    extern "C" __global__ void __launch_bounds__(threads, 1) name(const __grid_constant__ parameter_type p)

extern __shared__ __align__(1024) unsigned char shared_memory[];

constexpr int WARP = 32;

DEVICE int thread_index() { return static_cast<int>(threadIdx.x); }
DEVICE int lane_index() { return static_cast<int>(threadIdx.x) % WARP; }
DEVICE int warp_index() { return static_cast<int>(threadIdx.x) / WARP; }
DEVICE int cta_index() { return static_cast<int>(blockIdx.x); }

// The same value, of which the compiler knows nothing: what is derived from it is computed anew, and not ahead of a
// loop or in an earlier phase and then kept in registers.
template <typename T>
DEVICE T forget(T value) {
    static_assert(sizeof(T) == 4, "one register");
    asm volatile("" : "+r"(value));
    return value;
}

// Accesses to memory stay on their side of this.
DEVICE void keep_order() { asm volatile("" ::: "memory"); }

// On Blackwell only, whose compiler needs more registers for the same kernels; Hopper's machine code stays as measured.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000
constexpr bool BLACKWELL = true;
#else
constexpr bool BLACKWELL = false;
#endif
template <typename T>
DEVICE T forget_on_blackwell(T value) {
    if constexpr (BLACKWELL) return forget(value);
    return value;
}

DEVICE int population_count(uint32_t bits) { return __popc(bits); }
DEVICE int lowest_bit(uint32_t bits) { return __ffs(static_cast<int>(bits)) - 1; }

// True in one lane of the (converged) warp. The compiler knows that a single thread runs what hangs on it, and so
// issues bulk copies straight; on any other condition it wraps each of them in a loop over the lanes, at 50 cycles a
// copy.
DEVICE bool elect_one() {
    uint32_t elected;
    asm volatile("{\n.reg .pred p;\nelect.sync _|p, 0xffffffff;\nselp.u32 %0, 1, 0, p;\n}" : "=r"(elected));
    return elected != 0;
}

DEVICE void warp_sync() { __syncwarp(); }
// Not the aligned form (`bar.sync`): that one counts a warp when its first lane comes, and one that polled for the
// others may still be away.
DEVICE void barrier_sync(int id, int threads) {
    asm volatile("barrier.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// Offsets are bytes from the start of the CTA's dynamic shared memory; T must be aligned at the offset.
template <typename T>
DEVICE T shared_load(uint32_t offset) {
    return *reinterpret_cast<const T*>(shared_memory + offset);
}
template <typename T>
DEVICE void shared_store(uint32_t offset, T value) {
    *reinterpret_cast<T*>(shared_memory + offset) = value;
}
DEVICE uint32_t shared_address(uint32_t offset) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(shared_memory)) + offset;
}
