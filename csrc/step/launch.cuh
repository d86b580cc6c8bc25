// What every kernel of the draft and of the accept rule begins and ends with.
#pragma once
#include "instr/pdl.cuh"
#include "layer/wait.cuh"

namespace launch {

// Called by one thread of the CTA before the first barrier: the next launch's CTAs may take free SMs from here on.
DEVICE void open() {
    if (thread_index() == 0) allow_next_launch();
}

// `threads` of the CTA: from here on, what the previous launch wrote may be read. Returns how many launches of this
// kernel were completed before this one; the word changes only after every CTA has arrived somewhere.
DEVICE uint32_t begin_epoch(const Params& p, int threads) {
    wait_for_previous_launch();
    if (thread_index() == 0) shared_store(cfg::EPOCH_AT, load_acquire(p.epoch));
    barrier_sync(2, threads);
    return shared_load<uint32_t>(cfg::EPOCH_AT);
}

// CTA 0, once it has seen every CTA's arrivals at the last counter of the launch.
DEVICE void end_epoch(const Params& p, uint32_t epoch) {
    if (cta_index() == 0 && thread_index() == 0) store_release(p.epoch, epoch + 1u);
}

}  // namespace launch
