"""The hand-offs between ranks, taken from the kernels themselves and checked without a schedule."""

import copy
import functools

import pytest
import torch
from rank_case import RankCase

from sgl_muse_mega.emulator.machine import EventKind, Schedule, machine
from sgl_muse_mega.emulator.static_check import Operation, Programs, check_ranks, programs_of
from sgl_muse_mega.megakernel import protocol

LAUNCHES = ("embed", "layer", "layer", "head")
ROW_CAP = 8


@functools.cache
def launches(ranks: int, sms: int, rows: int, nvfp4: bool = True) -> tuple[tuple[str, list[Programs]], ...]:
    """Kernel, and programs of every rank, of every launch of a step."""
    torch.set_num_threads(1)
    case = RankCase(ranks, nvfp4=nvfp4, sms=sms)
    case.run(Schedule(trace=True), rows=rows)
    events = machine().events()
    found = []
    for index, kernel in enumerate(LAUNCHES):
        programs = []
        for rank, step in enumerate(case.steps):
            (variant,) = step.variants.values()
            control = variant.control[kernel]
            launch = rank * len(LAUNCHES) + index
            programs.append(programs_of(events, launch, control.counters, control.flags))
        found.append((kernel, programs))
    return tuple(found)


@pytest.mark.parametrize(
    ("ranks", "sms", "rows", "nvfp4"),
    [(1, 2, 3, True), (2, 1, 8, True), (2, 3, 1, False), (2, 9, 5, True), (4, 2, 3, True), (8, 2, 2, True)],
)
def test_every_launch_of_all_ranks_is_sound(ranks: int, sms: int, rows: int, nvfp4: bool) -> None:
    for kernel, programs in launches(ranks, sms, rows, nvfp4):
        assert len(programs) == ranks
        packets = sum(o.kind == EventKind.SEND for rank in programs for program in rank.values() for o in program)
        assert (packets > 0) == (ranks > 1)
        assert check_ranks(programs, kernel, sms, ROW_CAP) == []


def test_counters_that_packets_replace_are_not_advanced() -> None:
    assert set(protocol.kernel_counters("layer")) - set(protocol.kernel_counters("layer", 2)) == {"O_PROJ"}
    _, programs = launches(2, 3, 1, False)[1]
    advanced = {o.place for rank in programs for program in rank.values() for o in program if o.kind == EventKind.ADD}
    assert advanced == set(protocol.kernel_counters("layer", 2))


@pytest.mark.parametrize("fault", ["lost packet", "second packet", "packet of nobody", "lost arrival", "rank is gone"])
def test_a_spoilt_exchange_is_refused(fault: str) -> None:
    kernel, good = launches(2, 3, 1, False)[1]
    programs = copy.deepcopy(good)
    kind = EventKind.ADD if fault == "lost arrival" else EventKind.SEND
    places = [(a, i) for a, program in programs[1].items() for i, o in enumerate(program) if o.kind == kind]
    for actor, index in places[:: max(1, len(places) // 8)]:
        spoilt = copy.deepcopy(programs)
        program = spoilt[1][actor]
        match fault:
            case "lost packet" | "lost arrival":
                del program[index]
            case "second packet":
                program.insert(index, program[index])
            case "packet of nobody":
                program.append(Operation(EventKind.RECEIVE, "packet 0"))
            case "rank is gone":
                spoilt[1].clear()
        assert check_ranks(spoilt, kernel, 3, ROW_CAP), (fault, actor, index)
