"""Rows that a step computes and nobody keeps: they cost no experts and change nothing of the others."""

import pytest
import torch
from race_case import RaceCase
from rank_case import RankCase
from torch import Tensor

from sgl_muse_mega.emulator.machine import PLAIN, Schedule, racing


def run(case: RaceCase, rows: int, live: int, schedule: Schedule) -> tuple[Tensor, list[Tensor], int]:
    """Logits of all rows, the live rows' keys and values, and the gate/up tasks of the last layer."""
    step, control = case.case.step, case.control("layer")
    control.flags.zero_()
    step.inputs.live.fill_(live)
    logits = case.run(schedule, rows, length=60)
    kept = [
        cache[slots[: min(rows, live)]].view(torch.uint8).clone()
        for index, pair in enumerate(case.case.caches)
        for cache in pair
        for slots in [step.inputs.full_slots if step.config.is_full(index) else step.inputs.sliding_slots]
    ]
    tag = 2 * (int(control.epoch) - 1) + 1
    return logits, kept, int((control.flags == tag).sum())


@pytest.mark.parametrize(("nvfp4", "kv_dtype"), [(True, "bf16"), (False, "fp8")])
def test_live_rows_are_those_of_a_narrower_step(nvfp4: bool, kv_dtype: str) -> None:
    torch.set_num_threads(1)
    case = RaceCase(nvfp4=nvfp4, kv_dtype=kv_dtype)
    _, _, most = run(case, 8, 8, PLAIN)
    for rows, live in ((8, 1), (8, 2), (5, 3)):
        expected, keys, tasks = run(case, live, 8, PLAIN)
        logits, kept, used = run(case, rows, live, racing(rows + live))
        assert torch.equal(logits[:live], expected)
        assert all(torch.equal(a, b) for a, b in zip(kept, keys, strict=True))
        assert used == tasks
        assert used < most or live > 2
        assert bool(logits.isfinite().all())
        assert bool((case.case.step.activations.route_ids[live:rows] == -1).all())


@pytest.mark.parametrize("ranks", [2, 4])
def test_live_rows_over_ranks(ranks: int) -> None:
    """All ranks agree on every row, and the live ones are a narrower step's."""
    ranked = RankCase(ranks)
    expected = ranked.run(rows=3)
    for step in ranked.steps:
        step.inputs.live.fill_(3)
    logits = ranked.run(racing(5), rows=8)
    assert torch.equal(logits[:3], expected)
    assert bool(logits.isfinite().all())
