"""NVFP4 experts whose tasks take several boxes a stage: every stage, both word orders, and rows without company."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from sgl_muse_mega.config import TargetConfig
from sgl_muse_mega.emulator.machine import Schedule, racing
from sgl_muse_mega.emulator.stepper import Emulator
from sgl_muse_mega.megakernel import stage_check
from sgl_muse_mega.megakernel.random_step import RandomStep, random_weights, tiny_config
from sgl_muse_mega.megakernel.weights import KernelWeights

LENGTH = 20
# Gate/up: 4 boxes of 8 k16 steps, of which a stage takes 4 up to 4 rows and 2 up to 8. Down: 4 boxes of 16.
CONFIG = tiny_config(
    1, moe_hidden_size=512, moe_intermediate_size=1024, num_local_experts=8, num_experts_per_tok=2, hidden_size=128,
    num_attention_heads=2, num_key_value_heads=1, vocab_size=64,
)  # fmt: skip


def crowded(config: TargetConfig, field_order: bool = False) -> KernelWeights:
    """Every row goes to expert 3, and to one other."""
    weights = random_weights(config, 3, torch.device("cpu"), field_order=field_order)
    layers = []
    for layer in weights.layers:
        bias = layer.router_bias.clone()
        bias[3] += 10
        layers.append(replace(layer, router_bias=bias))
    return replace(weights, layers=tuple(layers))


@pytest.fixture(scope="module")
def weights() -> KernelWeights:
    return crowded(CONFIG)


class Bench:
    def __init__(
        self, weights: KernelWeights, row_cap: int = 8, schedule: Schedule | None = None, sms: int = 3
    ) -> None:
        self.emulator = Emulator(sms=sms, schedule=schedule or Schedule())
        self.case = RandomStep.create(
            CONFIG, weights, self.emulator, row_cap=row_cap, max_context=LENGTH, kv_dtype="bf16"
        )

    def run(self, rows: int) -> Tensor:
        """The stream [rows, H] after the layer."""
        step = self.case.step
        self.case.fill(LENGTH, 7)
        step.activations.poison()
        self.emulator.attach(step, self.case.caches)
        step.launch_embed(rows)
        step.launch_layer(0, rows)
        self.emulator.synchronize()
        return step.activations.stream[:rows].clone()


def test_stages_take_fewer_boxes_where_an_expert_has_many_rows(weights: KernelWeights) -> None:
    instance = Bench(weights).case.step.instance
    assert (instance.gate_up_tiles.boxes, instance.down_tiles.boxes) == (4, 4)
    row_bytes = instance.gate_up_tiles.steps * 32
    fits = [n for n in range(1, 9) if -(-n // 2) * (2 * 4 * row_bytes + 64) <= instance.stage_token_bytes]
    assert fits == [1, 2, 3, 4]


@pytest.mark.parametrize("rows", [1, 4, 8, 16])
@pytest.mark.parametrize("field_order", [False, True])
def test_every_stage_agrees_with_the_reference(rows: int, field_order: bool) -> None:
    bench = Bench(crowded(CONFIG, field_order), 8 if rows <= 8 else 16)
    step = bench.case.step
    bench.case.fill(LENGTH, rows)
    step.activations.poison()
    bench.emulator.attach(step, bench.case.caches)
    step.launch_embed(rows)
    bench.emulator.synchronize()
    check = stage_check.LayerCheck(step, 0, rows, bench.case.caches)
    step.launch_layer(0, rows)
    bench.emulator.synchronize()
    results = check.run()
    assert any(r.name == "F10 down" for r in results)
    assert not [r for r in results if not r.passed]


def test_a_row_has_the_same_bits_in_any_company_and_word_order(weights: KernelWeights) -> None:
    """One row takes all boxes at once, eight take half as many a stage, sixteen as many as eight in wider stages."""
    whole = Bench(weights, 16).run(16)
    eight = Bench(weights)
    for rows in (1, 2, 3, 5, 8):
        assert torch.equal(eight.run(rows), whole[:rows]), rows
    assert torch.equal(Bench(crowded(CONFIG, field_order=True)).run(5), whole[:5])


@pytest.mark.parametrize("sms", [1, 2, 5, 7])
def test_any_number_of_ctas_does_all_tasks(weights: KernelWeights, sms: int) -> None:
    """Where the number of gate/up tasks is no multiple, the first down tasks go to the CTAs that had fewer."""
    bench = Bench(weights, sms=sms)
    bench.run(6)
    step = bench.case.step
    lines = 12  # two experts a row
    for activations in (step.activations.activated, step.activations.expert_output):
        assert bool(torch.isfinite(activations[:lines].float()).all())
        assert bool(torch.isnan(activations[lines:].float()).all())


@pytest.mark.parametrize("seed", [1, 2, 3, 7])
def test_hand_offs_between_math_and_finishing_warps_under_any_schedule(weights: KernelWeights, seed: int) -> None:
    assert torch.equal(Bench(weights, schedule=racing(seed)).run(5), Bench(weights).run(5))
