"""Rows that a step computes and nobody keeps: they cost no experts and change nothing of the others."""

import functools

import pytest
import torch
from rank_case import RankCase
from torch import Tensor

from sgl_muse_mega.emulator.machine import PLAIN, Schedule, racing
from sgl_muse_mega.emulator.stepper import Emulator
from sgl_muse_mega.megakernel.random_step import RandomStep, random_weights, tiny_config


@functools.cache
def case(nvfp4: bool, kv_dtype: str) -> RandomStep:
    torch.set_num_threads(1)
    config = tiny_config(
        2, nvfp4=nvfp4, vocab_size=128, hidden_size=128, moe_hidden_size=64, moe_intermediate_size=64,
        num_local_experts=16, num_experts_per_tok=2, num_attention_heads=4, num_key_value_heads=2, sliding_window=32,
    )  # fmt: skip
    emulator = Emulator(sms=3)
    weights = random_weights(config, 1, emulator.device)
    return RandomStep.create(config, weights, emulator, row_cap=16, max_context=160, kv_dtype=kv_dtype)


def run(step_case: RandomStep, rows: int, live: int, schedule: Schedule) -> tuple[Tensor, list[Tensor], int]:
    """Logits of all rows, the live rows' keys and values, and the gate/up tasks of the last layer."""
    step, emulator = step_case.step, step_case.step.machine
    assert isinstance(emulator, Emulator)
    step_case.fill(60, 1)
    step.inputs.live.fill_(live)
    step.activations.poison()
    (variant,) = step.variants.values()
    variant.control["layer"].flags.zero_()
    emulator.schedule = schedule
    emulator.attach(step, step_case.caches)
    step.launch(rows)
    emulator.synchronize()
    kept = [
        cache[slots[: min(rows, live)]].view(torch.uint8).clone()
        for index, pair in enumerate(step_case.caches)
        for cache in pair
        for slots in [step.inputs.full_slots if step.config.is_full(index) else step.inputs.sliding_slots]
    ]
    control = variant.control["layer"]
    tag = 2 * (int(control.epoch) - 1) + 1
    return step.activations.logits[:rows].clone(), kept, int((control.flags == tag).sum())


@pytest.mark.parametrize(("nvfp4", "kv_dtype"), [(True, "bf16"), (False, "fp8")])
def test_live_rows_are_those_of_a_narrower_step(nvfp4: bool, kv_dtype: str) -> None:
    step_case = case(nvfp4, kv_dtype)
    _, _, most = run(step_case, 16, 16, PLAIN)
    for rows, live in ((16, 1), (16, 9), (5, 3)):
        expected, keys, tasks = run(step_case, live, 16, PLAIN)
        logits, kept, used = run(step_case, rows, live, racing(rows + live))
        assert torch.equal(logits[:live], expected)
        assert all(torch.equal(a, b) for a, b in zip(kept, keys, strict=True))
        assert used == tasks < most
        assert bool(logits.isfinite().all())
        assert bool((step_case.step.activations.route_ids[live:rows] == -1).all())


@pytest.mark.parametrize(("ranks", "row_cap", "nvfp4"), [(2, 8, True), (4, 16, False)])
def test_live_rows_over_ranks(ranks: int, row_cap: int, nvfp4: bool) -> None:
    """All ranks agree on every row, and the live ones are a narrower step's."""
    ranked = RankCase(ranks, nvfp4=nvfp4, row_cap=row_cap)
    expected = ranked.run(rows=3)
    for step in ranked.steps:
        step.inputs.live.fill_(3)
    logits = ranked.run(racing(5), rows=row_cap)
    assert torch.equal(logits[:3], expected)
    assert bool(logits.isfinite().all())
