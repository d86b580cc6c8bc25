// Small kernels, each with one property of the emulated machine to show; used by test_emulator_machine.py.
#include "instr/async_copy.cuh"
#include "instr/atomic.cuh"
#include "instr/bulk.cuh"
#include "instr/clock.cuh"
#include "instr/mbarrier.cuh"
#include "instr/memory.cuh"
#include "instr/mma.cuh"
#include "instr/pdl.cuh"
#include "instr/warp.cuh"

struct Params {
    uint32_t* data;
    uint32_t* flag;
    uint32_t* out;
    uint32_t value;
    uint32_t unused;
};

constexpr int THREADS = 64;
constexpr uint32_t BARRIER = 0, BUFFER = 128;

DEVICE void spin(const uint32_t* flag, uint32_t value) {
    while (load_acquire(flag) != value) spin_pause();
}

// CTA 0 writes data and raises the flag; CTA 1 waits for the flag and copies the data.
KERNEL(pass_message, Params, THREADS) {
    if (thread_index() != 0) return;
    if (cta_index() == 0) {
        global_store(p.data, p.value);
        store_release(p.flag, 1u);
    } else {
        spin(p.flag, 1u);
        global_store(p.out, global_load(p.data));
    }
}

// As above, but the data is written by another thread, which a barrier orders before the flag.
KERNEL(pass_message_of_cta, Params, THREADS) {
    if (cta_index() == 0) {
        if (thread_index() == 40) global_store(p.data, p.value);
        barrier_sync(1, THREADS);
        if (thread_index() == 0) add_release(p.flag, 1u);
    } else if (thread_index() == 0) {
        spin(p.flag, 1u);
        global_store(p.out, global_load(p.data));
    }
}

// The flag is raised with nothing that orders the data before it.
KERNEL(forget_barrier, Params, THREADS) {
    if (cta_index() == 0) {
        if (thread_index() == 40) global_store(p.data, p.value);
        if (thread_index() == 0) add_release(p.flag, 1u);
    } else if (thread_index() == 0) {
        spin(p.flag, 1u);
        global_store(p.out, global_load(p.data));
    }
}

// Another lane of the warp reads what lane 0 acquired; `value` 0 leaves out the warp_sync between.
KERNEL(acquire_for_warp, Params, THREADS) {
    if (thread_index() >= WARP) return;
    if (cta_index() == 0) {
        if (thread_index() == 0) {
            global_store(p.data, 7u);
            store_release(p.flag, 1u);
        }
        return;
    }
    if (lane_index() == 0) spin(p.flag, 1u);
    const bool sync = p.value != 0u;
    if (sync) warp_sync();
    if (!sync) shuffle(0u, 0);  // meets, but orders no memory
    if (lane_index() == 5) global_store(p.out, global_load(p.data));
}

// A bulk copy of 128 bytes to shared memory. value: bit 0 waits for it, bit 1 writes the source first, bit 2 fences
// between, bit 3 fences the initialisation of the mbarrier, bit 4 uses the buffer again without knowing that it is
// free.
KERNEL(copy_bulk, Params, THREADS) {
    const uint32_t options = p.value;
    if (cta_index() != 0 || thread_index() >= WARP) return;
    if (lane_index() == 0) {
        mbarrier_init(BARRIER, 1);
        if (options & 8u) mbarrier_init_fence();
    }
    warp_sync();
    if (options & 2u) {
        global_store(p.data + lane_index(), 100u + lane_index());
        warp_sync();
        if (options & 4u) fence_generic_to_async();
    }
    if (lane_index() == 0) {
        mbarrier_arrive_expect(BARRIER, 128);
        bulk_load(BUFFER, p.data, 128, BARRIER, eviction_policy(Keep::last_out));
    }
    if (options & 1u) {
        while (!mbarrier_try_wait(BARRIER, 0)) spin_pause();
        warp_sync();
        global_store(p.out + lane_index(), shared_load<uint32_t>(BUFFER + lane_index() * 4));
    }
    if ((options & 16u) && lane_index() == 0) {
        mbarrier_arrive_expect(BARRIER, 128);
        bulk_load(BUFFER, p.data, 128, BARRIER, eviction_policy(Keep::last_out));
        while (!mbarrier_try_wait(BARRIER, 1)) spin_pause();
    }
}

// Every lane of a warp copies 16 bytes to shared memory, half of them 16 more as a second group, and reads what its
// neighbour copied. value: bit 0 waits for the first group, bit 1 for both, bit 2 meets the other lanes, bit 3 copies
// again while the others may still read, bit 4 waits at the end.
KERNEL(copy_own, Params, THREADS) {
    const uint32_t options = p.value;
    if (cta_index() != 0 || thread_index() >= WARP) return;
    const int lane = lane_index();
    copy_async(BUFFER + lane * 16, p.data + lane % 8 * 4);
    commit_copies();
    if (lane < 16) copy_async(BUFFER + 512 + lane * 16, p.data + lane % 8 * 4);
    commit_copies();
    if (options & 1u) wait_copies<1>();
    if (options & 2u) wait_copies<0>();
    if (options & 4u) warp_sync();
    const int other = (lane + 1) % WARP;
    const uint32_t first = shared_load<uint32_t>(BUFFER + other * 16);
    const uint32_t second = (options & 2u) != 0u ? shared_load<uint32_t>(BUFFER + 512 + other % 16 * 16) : 0u;
    global_store(p.out + lane, first + second);
    if (options & 8u) {
        copy_async(BUFFER + lane * 16, p.data);
        commit_copies();
        wait_copies<0>();
    }
    if (options & 16u) wait_copies<0>();
}

// value 0: half of the warp comes to a shuffle, the other to a ballot. 1: half of it ends before. 2: nobody raises the
// flag. 3: threads disagree about a barrier. 4: a barrier that too few reach. 5: a read past the end. 6: an unaligned
// read. 7: a write to an input. 8: a read of what nobody wrote. 9: a second initialisation of an mbarrier.
KERNEL(misbehave, Params, THREADS) {
    switch (p.value) {
        case 0:
            if (lane_index() < 16) {
                shuffle(1u, 0);
            } else {
                warp_ballot(true);
            }
            break;
        case 1:
            if (lane_index() < 16) return;
            shuffle(1u, 0);
            break;
        case 2:
            spin(p.flag, 1u);
            break;
        case 3:
            barrier_sync(2, thread_index() == 0 ? WARP : THREADS);
            break;
        case 4:
            if (thread_index() != 3) barrier_sync(3, THREADS);
            break;
        case 5:
            global_load(p.data + 32);
            break;
        case 6:
            global_load(reinterpret_cast<const uint2*>(p.data + 1));
            break;
        case 7:
            global_store(const_cast<uint32_t*>(p.data), 1u);
            break;
        case 8:
            global_load(p.out);
            break;
        default:
            if (thread_index() == 0) {
                mbarrier_init(BARRIER, 1);
                mbarrier_init(BARRIER, 1);
            }
    }
}

// Every thread adds to one counter; threads of different CTAs race for nothing else.
KERNEL(count, Params, THREADS) { add_release(p.flag, p.value); }

// Two counters on one line, one of them polled.
KERNEL(crowd_line, Params, THREADS) {
    if (thread_index() != 0) return;
    add_release(p.flag + 1, 1u);
    if (cta_index() == 0) store_release(p.flag, 1u);
    spin(p.flag, 1u);
}

// The second of two launches: reads the first one's data with (value 1) or without waiting for it.
KERNEL(follow_launch, Params, THREADS) {
    if (cta_index() != 0 || thread_index() != 0) return;
    if (p.value != 0u) wait_for_previous_launch();
    global_store(p.out, global_load(p.data));
}
KERNEL(lead_launch, Params, THREADS) {
    if (thread_index() != 0) return;
    allow_next_launch();
    if (cta_index() == 0) global_store(p.data, p.value);
}

// out[lane, 0..3] = the accumulators of one mma over fragments at data[lane, 0..5].
KERNEL(multiply, Params, THREADS) {
    if (cta_index() != 0 || thread_index() >= WARP) return;
    const uint32_t* in = p.data + lane_index() * 8;
    float c[4] = {0.f, 0.f, 0.f, 0.f};
    mma_bf16(c, global_load(in), global_load(in + 1), global_load(in + 2), global_load(in + 3), global_load(in + 4),
             global_load(in + 5));
    for (int i = 0; i < 4; ++i) global_store(p.out + lane_index() * 4 + i, float_bits(c[i]));
}

// out[i] = the conversions of data[i]: bf16 rounding, e4m3 rounding, the product as bf16 pairs, the 8 x 8 transpose.
KERNEL(convert, Params, THREADS) {
    if (cta_index() != 0 || thread_index() >= WARP) return;
    const uint32_t word = global_load(p.data + lane_index());
    const float value = bits_float(word);
    uint32_t* out = p.out + lane_index() * 4;
    global_store(out, static_cast<uint32_t>(float_to_bf16(value)));
    const uint32_t byte = float_to_e4m3(value);
    global_store(out + 1, byte);
    global_store(out + 2, e4m3x2_to_bf16x2(byte | byte << 8));
    global_store(out + 3, transpose_8x8(word));
}
