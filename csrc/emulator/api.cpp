// The C functions that Python calls; mirrored in sgl_muse_mega/emulator/machine.py.
#include <cstdio>
#include <cstring>
#include <new>

#include "machine.h"

using namespace emulator;

extern "C" {

struct EmulatorLaunch {
    const KernelEntry* kernel;
    const void* parameters;
    uint32_t parameter_bytes;
    int32_t ctas;
    uint32_t shared_bytes;
    uint32_t overlaps;
    uint32_t rank;
};

struct EmulatorOptions {
    uint64_t seed;
    uint32_t order, preempt_interval, preempt_limit, ordered, stale_values, overlap, injection, trace;
    uint64_t injection_address;
};

struct EmulatorResult {
    uint64_t switches, races, nanoseconds;
    char kind[32];
    char text[8192];
};

void emulator_clear_regions() { machine().regions.clear(); }

void emulator_add_region(const char* name, void* base, uint64_t bytes, uint32_t constant, uint32_t written) {
    machine().regions.add(name, base, bytes, constant != 0, written != 0);
}

// 1 when byte `offset` of the region that begins at `base` was never written.
int emulator_count_unwritten(const void* base, uint64_t bytes) {
    for (const auto& region : machine().regions.all()) {
        if (region->base != base || region->constant) continue;
        int unwritten = 0;
        for (uint64_t at = 0; at < bytes && at < region->bytes; ++at) {
            unwritten += (region->written[at / 16] >> at % 16 & 1) == 0;
        }
        return unwritten;
    }
    return -1;
}

// The events of the last run, when its options asked for them; returns their number.
uint64_t emulator_events(const Event** events) {
    *events = machine().events.data();
    return machine().events.size();
}

// Returns 0, or 1 when the run ended with the fault described in `result`.
int emulator_run(const EmulatorLaunch* launches, uint32_t count, const EmulatorOptions* options,
                 EmulatorResult* result) {
    Machine& m = machine();
    *result = {};
    std::vector<Launch> list;
    for (uint32_t i = 0; i < count; ++i) {
        const EmulatorLaunch& given = launches[i];
        if (given.kernel->parameter_bytes != given.parameter_bytes) {
            std::snprintf(result->kind, sizeof result->kind, "launch");
            std::snprintf(result->text, sizeof result->text, "%s takes %u bytes of parameters, not %u",
                          given.kernel->name, given.kernel->parameter_bytes, given.parameter_bytes);
            return 1;
        }
        Launch launch;
        launch.kernel = given.kernel;
        const auto* bytes = static_cast<const uint8_t*>(given.parameters);
        launch.parameters.assign(bytes, bytes + given.parameter_bytes);
        launch.ctas = given.ctas;
        launch.shared_bytes = given.shared_bytes;
        launch.overlaps = given.overlaps != 0;
        launch.rank = given.rank;
        list.push_back(std::move(launch));
    }
    Options chosen;
    chosen.seed = options->seed;
    chosen.order = static_cast<Order>(options->order);
    chosen.preempt_interval = options->preempt_interval;
    chosen.preempt_limit = options->preempt_limit;
    chosen.ordered = options->ordered;
    chosen.stale_values = options->stale_values;
    chosen.overlap = options->overlap;
    chosen.injection = static_cast<Injection>(options->injection);
    chosen.injection_address = options->injection_address;
    chosen.trace = options->trace;
    bool good = false;
    try {
        good = m.run(std::move(list), chosen);
    } catch (const std::bad_alloc&) {
        m.fault = {"memory", "there is not enough memory for so many threads"};
    }
    result->switches = m.switches;
    result->races = m.races;
    result->nanoseconds = m.now();
    std::snprintf(result->kind, sizeof result->kind, "%s", m.fault.kind.c_str());
    std::snprintf(result->text, sizeof result->text, "%s", good ? "" : m.fault.text.c_str());
    return good ? 0 : 1;
}

}  // extern "C"
