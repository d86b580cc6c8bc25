"""One rank that exchanges with itself: every stage against the reference, and rows without company."""

import functools

import pytest
import torch

from sgl_muse_mega.emulator.machine import Schedule, racing
from sgl_muse_mega.emulator.stepper import Emulator
from sgl_muse_mega.megakernel import stage_check
from sgl_muse_mega.megakernel.mailbox import LoopBack
from sgl_muse_mega.megakernel.random_step import RandomStep, random_weights, tiny_config

LAYERS, MAX_CONTEXT = 2, 120


@functools.cache
def loop_back(ranks: int, row_cap: int = 8, nvfp4: bool = True) -> RandomStep:
    """Rank 1 of `ranks`; its widths are no multiples of what a CTA's threads hold at once."""
    torch.set_num_threads(1)
    config = tiny_config(
        LAYERS, nvfp4=nvfp4, vocab_size=128, hidden_size=192, moe_hidden_size=128, moe_intermediate_size=64,
        num_local_experts=16, num_experts_per_tok=4, num_attention_heads=8, num_key_value_heads=2,
    )  # fmt: skip
    emulator = Emulator(sms=3)
    weights = random_weights(config, 5, emulator.device, rank=1, ranks=ranks)
    return RandomStep.create(
        config, weights, emulator, row_cap=row_cap, max_context=MAX_CONTEXT, kv_dtype="bf16", mail=LoopBack(ranks, 1)
    )


def begin(case: RandomStep, length: int, seed: int, schedule: Schedule) -> None:
    case.fill(length, seed)
    case.step.activations.poison()
    emulator = case.step.machine
    assert isinstance(emulator, Emulator)
    emulator.schedule = schedule
    emulator.attach(case.step, case.caches)


@pytest.mark.parametrize(
    ("ranks", "rows", "nvfp4"), [(2, 1, True), (2, 8, False), (4, 3, True), (4, 16, True), (8, 5, False)]
)
def test_every_stage_agrees_with_the_reference(ranks: int, rows: int, nvfp4: bool) -> None:
    """Sums are `ranks` times this rank's part, and gathered rows this rank's columns side by side."""
    case = loop_back(ranks, 8 if rows <= 8 else 16, nvfp4)
    step = case.step
    for length in (0, 70):
        begin(case, length, rows + length, racing(rows + length + 1))
        step.launch_embed(rows)
        step.machine.synchronize()
        results = []
        for index in range(LAYERS):
            check = stage_check.LayerCheck(step, index, rows, case.caches)
            step.launch_layer(index, rows)
            step.machine.synchronize()
            results += check.run()
        assert {"PRE_PROJ sent", "POST_PROJ sent", "F11-F12 combine, one rank's"} <= {r.name for r in results}
        assert not [r for r in results if not r.passed]


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_row_is_the_same_bits_in_any_company(ranks: int) -> None:
    case = loop_back(ranks, 16)
    step = case.step

    def stream(rows: int) -> torch.Tensor:
        begin(case, 60, 1, Schedule())
        step.launch(rows)
        step.machine.synchronize()
        return step.activations.stream[:rows].clone()

    whole = stream(16)
    for rows in (1, 2, 7, 9):
        assert torch.equal(stream(rows), whole[:rows]), rows
