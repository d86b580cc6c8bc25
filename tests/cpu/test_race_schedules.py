"""Hundreds of seeded schedules of whole steps: no race, no deadlock, and the same bits whatever the schedule."""

import functools

import pytest
import torch
from race_case import RaceCase

from sgl_muse_mega.emulator.machine import EmulatorFault, Injection, Order, Schedule, racing

SEEDS, CHUNK = 500, 25
ROWS, LENGTHS = (1, 3, 8, 5), (0, 31, 100, 150, 64)


@functools.cache
def case(nvfp4: bool, kv_dtype: str) -> RaceCase:
    torch.set_num_threads(1)
    return RaceCase(nvfp4=nvfp4, kv_dtype=kv_dtype)


@pytest.mark.parametrize("chunk", range(SEEDS // CHUNK))
def test_every_schedule_gives_the_same_bits(chunk: int) -> None:
    """Seed s runs the case s stands for; a failing one is replayed by its number alone."""
    kernels = case(chunk % 2 == 0, "fp8" if chunk % 4 >= 2 else "bf16")
    rows, length = ROWS[chunk % len(ROWS)], LENGTHS[chunk % len(LENGTHS)]
    expected = kernels.run(rows=rows, length=length, content=chunk)
    for seed in range(chunk * CHUNK + 1, (chunk + 1) * CHUNK + 1):
        schedule = racing(seed)
        assert torch.equal(kernels.run(schedule, rows, length, chunk), expected), schedule


def test_steps_that_follow_each_other_overlap_without_harm() -> None:
    """The first launch of a step beside the last one of the step before, as in replays of a graph."""
    kernels = case(True, "bf16")
    expected = kernels.run(rows=4)
    for seed in range(501, 521):
        assert torch.equal(kernels.run(racing(seed), rows=4, steps=3), expected), seed


def test_the_plain_schedule_is_ordered_too() -> None:
    for nvfp4 in (True, False):
        kernels = case(nvfp4, "bf16")
        assert torch.equal(kernels.run(Schedule(ordered=True)), kernels.run())


def test_a_failing_seed_replays_exactly() -> None:
    kernels = case(True, "bf16")
    address = kernels.counter_address("POST_PROJ")
    schedule = racing(11, order=Order.RANDOM, injection=Injection.MISSING_ACQUIRE, injection_address=address)
    texts = []
    for _ in range(2):
        kernels.reset()
        with pytest.raises(EmulatorFault) as fault:
            kernels.run(schedule)
        texts.append(fault.value.text)
    assert texts[0] == texts[1]
    assert "nothing orders the two" in texts[0]
    assert "seed=11" in str(fault.value)


def test_races_left_alone_spoil_the_result() -> None:
    """The same fault without the check of order: readers get old values, and the logits of some schedule are wrong."""
    kernels = case(True, "bf16")
    expected = kernels.run()
    spoilt = 0
    for seed in range(1, 13):
        schedule = racing(seed, stale_values=True, injection=Injection.MISSING_ACQUIRE)
        try:
            spoilt += not torch.equal(kernels.run(schedule), expected)
        except EmulatorFault as fault:
            spoilt += fault.kind in {"unwritten", "trap", "bounds"}
    assert spoilt > 0


def test_a_deadlock_says_who_waits_for_what() -> None:
    kernels = case(True, "bf16")
    with pytest.raises(EmulatorFault) as fault:
        kernels.run(racing(1, injection=Injection.EARLY_EXIT, injection_address=2))
    assert "waited past the deadline for" in fault.value.text  # the kernel's own record
    assert "nobody can run" in fault.value.text
    assert "waiting for embed" in fault.value.text
    assert ".counters+" in fault.value.text
