"""The hand-offs of a decode step over ranks, checked without a schedule, and faults that schedules must show."""

import shutil
from pathlib import Path

import pytest
import torch
from decode_rank_case import GREEDY, DecodeRankCase, Step
from race_faults import Change

from sgl_muse_mega.emulator.machine import EmulatorFault, EventKind, Schedule, machine, racing
from sgl_muse_mega.emulator.static_check import ACCEPT, DRAFT, Programs, Rules, check_ranks, programs_of
from sgl_muse_mega.megakernel.build import source_directory
from sgl_muse_mega.megakernel.scratch import Control
from sgl_muse_mega.speculative.sampling import SamplingParams

SAMPLED = SamplingParams(temperature=3.0, top_k=150, seed=4)
ROW_CAP, SEEDS = 8, 8


def test_every_launch_of_a_step_is_sound() -> None:
    """A draft of one layer: its block is then one epoch of its counters. Packets go where the table of
    docs/exchange.md says: each is sent once and read by somebody."""
    ranks = 4
    case = DecodeRankCase(ranks, draft_layers=1)
    case.run(Schedule(trace=True), SAMPLED, batches=(1,))
    events = machine().events()
    layers = len(case.loops[0].decode.step.weights.layers)
    launches = 2 + 1 + layers + 3  # block, head, embed, layers, verify head, accept, context
    where: dict[str, tuple[int, Rules]] = {
        "draft_block_kernel": (0, DRAFT), "draft_head_kernel": (1, DRAFT),
        "verify_head_kernel": (launches - 3, DRAFT), "accept_kernel": (launches - 2, ACCEPT),
        "draft_context_kernel": (launches - 1, DRAFT),
    }  # fmt: skip
    for kernel, (index, rules) in where.items():
        programs: list[Programs] = []
        for rank, loop in enumerate(case.loops):
            decode = loop.decode
            assert decode.draft is not None
            control: Control = decode.accept.control if rules is ACCEPT else decode.draft.control[kernel]
            programs.append(programs_of(events, rank * launches + index, control.counters, None, rules))
        sms = case.loops[0].decode.accept.instance.sms if rules is ACCEPT else 2
        assert check_ranks(programs, kernel, sms, ROW_CAP, rules) == []
        spoilt = [dict(rank) for rank in programs]
        actor = next(a for a, p in spoilt[1].items() if any(o.kind == EventKind.SEND for o in p))
        spoilt[1][actor] = [o for o in spoilt[1][actor] if o.kind != EventKind.SEND]
        assert check_ranks(spoilt, kernel, sms, ROW_CAP, rules), kernel


FAULTS = {
    "a late rank's list is taken from the launch before the last": (
        "draft.cu",
        Change(
            "layer/mailbox.cuh",
            "packet[i].differs_from(expected)",
            "(packet[i].is(expected - 4u) ? 0u : packet[i].differs_from(expected))",
        ),
        GREEDY,
    ),
    "rows are judged before all of them are there": (
        "accept.cu",
        Change("step/whole_rows.cuh", "team.sum(0u);", ""),
        SAMPLED,
    ),
}


def outcome(ranks: list[list[Step]]) -> list[list[object]]:
    return [[(s.report, s.block.candidates.tolist(), s.greedy_ids) for s in steps] for steps in ranks]


@pytest.fixture(scope="module")
def clean() -> DecodeRankCase:
    return DecodeRankCase(2)


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_found(name: str, clean: DecodeRankCase, tmp_path: Path) -> None:
    """Four steps, so that every place has been written before."""
    torch.set_num_threads(1)
    main, change, params = FAULTS[name]
    folder = tmp_path / "csrc"
    shutil.copytree(source_directory(), folder)
    change.apply(folder)
    expected = outcome(clean.run(params=params, batches=(2, 2)))
    case = DecodeRankCase(2, sources=folder, changed=main)
    for seed in range(1, SEEDS + 1):
        try:
            found = outcome(case.run(racing(seed), params, batches=(2, 2)))
        except EmulatorFault:
            return
        if found != expected:
            return
    pytest.fail(f"{SEEDS} schedules do not show it")
