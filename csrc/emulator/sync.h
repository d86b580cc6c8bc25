// What a thread does to wait for others: barriers, mbarriers and the copies they count, the order of launches.
#pragma once
#include <cstdint>

#include "options.h"

namespace emulator {

void meet_at_barrier(int id, int threads, const Site& site);

void init_mbarrier(uint32_t offset, uint32_t arrivals, const Site& site);
void fence_mbarrier_init();
void arrive_mbarrier(uint32_t offset, uint32_t expected_bytes, const Site& site);
bool test_mbarrier(uint32_t offset, uint32_t parity, const Site& site);

void start_copy(uint32_t destination, const void* source, uint32_t bytes, uint32_t barrier, const Site& site);
void fence_proxy();

// cp.async: copies that the thread waits for itself, in groups.
void start_own_copy(uint32_t destination, const void* source, uint32_t bytes, const Site& site);
void commit_own_copies();
void wait_own_copies(uint32_t pending, const Site& site);

void wait_previous_launch(const Site& site);
void allow_following_launch();

}  // namespace emulator
