// Programmatic dependent launch: start while the previous kernel of the stream still runs.
#pragma once
#include "core.cuh"

// Returns when the previous launch has completed and its writes are visible to this thread.
DEVICE void wait_for_previous_launch() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
DEVICE void allow_next_launch() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
