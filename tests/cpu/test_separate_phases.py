"""The control of the layer kernel: its phases as separate kernels give the same bits, under any schedule."""

import dataclasses
from typing import Any

import pytest
import torch

from sgl_muse_mega.emulator.machine import Schedule
from sgl_muse_mega.emulator.stepper import Emulator
from sgl_muse_mega.megakernel.build import build
from sgl_muse_mega.megakernel.inspection import resource_faults
from sgl_muse_mega.megakernel.instance import HOPPER_SHARED_BYTES, Instance
from sgl_muse_mega.megakernel.mailbox import LoopBack
from sgl_muse_mega.megakernel.random_step import RandomStep, random_weights, spark_config, tiny_config
from sgl_muse_mega.megakernel.separate import PHASES, PhaseKernels
from sgl_muse_mega.toolchain import find_nvcc

ROWS = 3


def step(separate: bool, nvfp4: bool, ranks: int = 1) -> RandomStep:
    """With several ranks, one of them in loop-back."""
    config = tiny_config(
        2, nvfp4=nvfp4, vocab_size=128, hidden_size=128, moe_hidden_size=64, moe_intermediate_size=64,
        num_local_experts=8, num_experts_per_tok=2, num_attention_heads=4, num_key_value_heads=2, sliding_window=32,
    )  # fmt: skip
    emulator = Emulator(sms=3)
    share: dict[str, Any] = {"ranks": ranks, "rank": 1} if ranks > 1 else {}
    weights = random_weights(config, 1, emulator.device, **share)
    mail: dict[str, Any] = {"mail": LoopBack(ranks, 1)} if ranks > 1 else {}
    tuning = {"separate_phases": True} if separate else {}
    return RandomStep.create(
        config, weights, emulator, row_cap=8, max_context=60, kv_dtype="fp8", tuning=tuning, **mail
    )


def outputs(case: RandomStep, schedule: Schedule) -> list[torch.Tensor]:
    case.fill(50, 7)
    case.step.activations.poison()
    emulator = case.step.machine
    assert isinstance(emulator, Emulator)
    emulator.attach(case.step, case.caches)
    emulator.schedule = schedule
    case.step.launch(ROWS)
    emulator.synchronize()
    act = case.step.activations
    slots = case.step.inputs.full_slots[:ROWS]
    cached = [pair[0].view(torch.uint8)[slots] for pair in case.caches[1:]]
    return [t.clone() for t in (act.logits[:ROWS], act.stream[:ROWS], case.step.taps[:ROWS], *cached)]


@pytest.mark.parametrize(("nvfp4", "ranks"), [(True, 1), (False, 1), (True, 2)])
def test_separate_phases_give_the_bits_of_the_layer_kernel(nvfp4: bool, ranks: int) -> None:
    expected = outputs(step(False, nvfp4, ranks), Schedule(seed=1))
    control = step(True, nvfp4, ranks)
    for seed in range(4):
        found = outputs(control, Schedule(seed=seed))
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("nvfp4", [True, False])
@pytest.mark.parametrize("row_cap", [8, 16])
def test_a_phase_without_weights_fits_beside_one_with_weights(nvfp4: bool, row_cap: int) -> None:
    whole = Instance.for_config(spark_config(), nvfp4=nvfp4, fp8_cache=True, row_cap=row_cap, sms=132, local_experts=64)
    instance = dataclasses.replace(whole, separate_phases=True)
    instance.check()
    small, large = (PhaseKernels(instance, weights).shared_offsets["SHARED_BYTES"] for weights in (False, True))
    assert small + large + 1024 <= HOPPER_SHARED_BYTES
    assert (instance.gate_up_tiles, instance.down_tiles) == (whole.gate_up_tiles, whole.down_tiles)


def test_every_phase_is_in_one_of_the_two_sets_of_kernels() -> None:
    instance = Instance.for_config(spark_config(), nvfp4=True, fp8_cache=True, row_cap=8, sms=132, local_experts=64)
    found = [name for weights in (False, True) for name in PhaseKernels(instance, weights).kernels]
    assert sorted(found) == sorted(name for name, _ in PHASES)


@pytest.mark.skipif(find_nvcc().path is None, reason="needs nvcc")
@pytest.mark.parametrize("row_cap", [8, 16])
def test_control_of_one_rank_of_four_compiles_without_spills(row_cap: int) -> None:
    config = spark_config(2, heads=128)
    whole = Instance.for_config(config, nvfp4=True, fp8_cache=True, row_cap=row_cap, sms=132, ranks=4)
    control = PhaseKernels(dataclasses.replace(whole, separate_phases=True), with_weights=True)
    assert resource_faults(control, build(control).resources()) == []
