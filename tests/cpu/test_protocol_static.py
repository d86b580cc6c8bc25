"""The hand-offs of the kernels, taken from the kernels themselves and checked without a schedule."""

import copy
import functools
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from race_case import RaceCase

from sgl_muse_mega.emulator.machine import EventKind, Schedule, machine
from sgl_muse_mega.emulator.static_check import (
    Operation,
    Programs,
    check_expected,
    check_launch,
    check_protocol,
    programs_of,
)
from sgl_muse_mega.megakernel import protocol
from sgl_muse_mega.megakernel.protocol import Arrivals, HandOff

LAUNCHES = ("embed", "layer", "layer", "head")
ROW_CAP = 8


@functools.cache
def launches(sms: int, rows: int, nvfp4: bool = True) -> tuple[tuple[str, Programs], ...]:
    """Kernel and programs of every launch of a step."""
    torch.set_num_threads(1)
    case = RaceCase(sms=sms, nvfp4=nvfp4)
    case.run(Schedule(trace=True), rows=rows)
    events = machine().events()
    found = []
    for launch, kernel in enumerate(LAUNCHES):
        control = case.control(kernel)
        found.append((kernel, programs_of(events, launch, control.counters, control.flags)))
    return tuple(found)


@pytest.mark.parametrize(
    ("sms", "rows", "nvfp4"),
    [
        (1, 8, True),
        (2, 1, True),
        (3, 5, True),
        (3, 3, False),
        (8, 8, True),
        (9, 2, False),
        (17, 1, True),
        (33, 8, True),
    ],
)
def test_every_launch_is_sound(sms: int, rows: int, nvfp4: bool) -> None:
    for kernel, programs in launches(sms, rows, nvfp4):
        assert len({cta for cta, _ in programs}) == sms
        assert check_launch(programs, kernel, sms, ROW_CAP) == []


def test_a_whole_gpu_is_sound() -> None:
    for kernel, programs in launches(132, 8):
        assert check_launch(programs, kernel, 132, ROW_CAP) == []


def test_the_counters_are_sound_for_every_machine() -> None:
    assert check_protocol() == []
    for sms in range(1, 161):
        for row_cap in (8, 16):
            assert check_expected(protocol.COUNTERS, sms, row_cap) == []


def test_unsound_counters_are_refused() -> None:
    counters = protocol.COUNTERS
    extra = HandOff("EXTRA", Arrivals.EVERY_CTA, "nothing")
    assert check_protocol([*counters, counters[0]])
    assert check_protocol([*counters, extra])
    assert check_protocol(counters[1:])
    assert check_protocol(counters, {**protocol.KERNELS, "head": ("LOGITS", "LOGITS")})
    assert check_protocol(stride=1)
    assert check_protocol(stride=16)
    assert check_protocol(stride=48)
    assert check_expected(counters, 2**31, 8)


def refuses(kernel: str, programs: Programs, sms: int) -> bool:
    return bool(check_launch(programs, kernel, sms, ROW_CAP))


def places(programs: Programs, *kinds: EventKind) -> list[tuple[tuple[int, int], int]]:
    """(actor, index) of every operation of some kind."""
    return [(a, i) for a, program in sorted(programs.items()) for i, o in enumerate(program) if o.kind in kinds]


MUTATIONS = (
    "lost arrival", "second arrival", "wrong counter", "lost flag", "second flag", "lost mbarrier arrival",
    "wait before the own arrival", "wait for nothing", "lost barrier", "early exit", "wrong phase",
)  # fmt: skip


def mutate(programs: Programs, mutation: str, choose: st.DataObject) -> Programs:
    """A copy of the programs with one thing wrong."""
    changed = copy.deepcopy(programs)

    def pick(*kinds: EventKind) -> tuple[tuple[int, int], int]:
        return choose.draw(st.sampled_from(places(programs, *kinds)))

    match mutation:
        case "lost arrival":
            actor, index = pick(EventKind.ADD)
            del changed[actor][index]
        case "second arrival":
            actor, index = pick(EventKind.ADD)
            changed[actor].insert(index, changed[actor][index])
        case "wrong counter":
            actor, index = pick(EventKind.ADD)
            others = [c.name for c in protocol.COUNTERS if c.name != changed[actor][index].place]
            changed[actor][index] = replace(changed[actor][index], place=choose.draw(st.sampled_from(others)))
        case "lost flag":
            waited = {o.place for program in programs.values() for o in program if o.kind == EventKind.ACQUIRE}
            flags = [(a, i) for a, i in places(programs, EventKind.PUBLISH) if programs[a][i].place in waited]
            actor, index = choose.draw(st.sampled_from(flags))
            del changed[actor][index]
        case "second flag":
            actor, index = pick(EventKind.PUBLISH)
            changed[actor].append(changed[actor][index])
        case "lost mbarrier arrival" | "wrong phase":
            waited = {
                (a[0], o.place, o.phase) for a, p in programs.items() for o in p if o.kind == EventKind.MBARRIER_WAIT
            }
            arrivals = [
                (a, i) for a, i in places(programs, EventKind.MBARRIER_ARRIVE)
                if (a[0], programs[a][i].place, programs[a][i].phase) in waited
            ]  # fmt: skip
            actor, index = choose.draw(st.sampled_from(arrivals))
            if mutation == "wrong phase":
                changed[actor].insert(index, replace(changed[actor][index], phase=changed[actor][index].phase + 1))
            del changed[actor][index + (mutation == "wrong phase")]
        case "wait before the own arrival":
            actor, index = pick(EventKind.ADD)
            place = changed[actor][index].place
            changed[actor].insert(index, Operation(EventKind.ACQUIRE, place))
        case "wait for nothing":
            actor = choose.draw(st.sampled_from(sorted(changed)))
            changed[actor].append(Operation(EventKind.ACQUIRE, "flag 999999"))
        case "lost barrier":
            actor, index = pick(EventKind.BARRIER)
            del changed[actor][index]
        case "early exit":
            cta = choose.draw(st.sampled_from(sorted({a[0] for a in changed})))
            changed = {a: p for a, p in changed.items() if a[0] != cta}
    return changed


@pytest.mark.parametrize("mutation", MUTATIONS)
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_a_spoilt_launch_is_refused(mutation: str, data: st.DataObject) -> None:
    """A wait that is merely missing leaves every wait satisfiable; the race hunt finds those (test_race_faults.py)."""
    kernel, programs = launches(4, 3)[1]
    assert not refuses(kernel, programs, 4)
    assert refuses(kernel, mutate(programs, mutation, data), 4)
