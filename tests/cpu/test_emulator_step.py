"""The verify step through the emulator: every stage against the reference, whole steps, and rows without company."""

from dataclasses import fields

import pytest
import torch
from small_models import small_target
from torch import Tensor

from sgl_muse_mega.checkpoint.random_weights import random_target
from sgl_muse_mega.checkpoint.weights import TargetWeights
from sgl_muse_mega.config import TargetConfig
from sgl_muse_mega.emulator.machine import PLAIN, Schedule, machine
from sgl_muse_mega.emulator.stepper import Emulator
from sgl_muse_mega.megakernel import stage_check
from sgl_muse_mega.megakernel.random_step import RandomStep
from sgl_muse_mega.megakernel.step import Step
from sgl_muse_mega.megakernel.weights import prepare
from sgl_muse_mega.reference.cache import KVCache
from sgl_muse_mega.reference.numerics import Numerics
from sgl_muse_mega.reference.target import ReferenceTarget, Rows

MAX_CONTEXT = 200


def tiny(**changes: object) -> TargetConfig:
    """Three layers, the last with full attention; the first and the last have BF16 experts, the middle one NVFP4."""
    sizes: dict[str, object] = {
        "hidden_size": 192, "num_hidden_layers": 3, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 64,
        "vocab_size": 320, "sliding_window": 40, "moe_hidden_size": 128, "moe_intermediate_size": 64,
        "num_local_experts": 12, "num_experts_per_tok": 3,
    }  # fmt: skip
    return small_target(**(sizes | changes))


CONFIG = tiny()


@pytest.fixture(scope="module")
def weights() -> TargetWeights:
    return random_target(CONFIG, 7)


class Bench:
    """A random step on the emulator; row_cap 8 or 16 columns."""

    def __init__(
        self, weights: TargetWeights, row_cap: int, kv_dtype: str, schedule: Schedule = PLAIN, **tuning: int
    ) -> None:
        self.emulator = Emulator(sms=4, schedule=schedule)
        self.case = RandomStep.create(
            CONFIG, prepare(CONFIG, weights), self.emulator, row_cap=row_cap, max_context=MAX_CONTEXT,
            kv_dtype=kv_dtype, tuning=tuning,
        )  # fmt: skip
        self.step, self.caches = self.case.step, self.case.caches

    def begin(self, length: int, seed: int) -> None:
        self.case.fill(length, seed)
        self.step.activations.poison()
        self.emulator.attach(self.step, self.caches)

    def run(self, rows: int) -> Tensor:
        self.step.launch(rows)
        self.emulator.synchronize()
        return self.step.activations.logits[:rows].clone()

    def stages(self, rows: int) -> list[tuple[str, stage_check.StageResult]]:
        step = self.step
        step.launch_embed(rows)
        self.emulator.synchronize()
        results = [("embed", r) for r in stage_check.embed_results(step, rows, self.caches)]
        for index in range(CONFIG.num_hidden_layers):
            check = stage_check.LayerCheck(step, index, rows, self.caches)
            step.launch_layer(index, rows)
            self.emulator.synchronize()
            results += [(f"layer {index}", r) for r in check.run()]
        step.launch_head(rows)
        self.emulator.synchronize()
        return results + [("head", r) for r in stage_check.head_results(step, rows)]


@pytest.mark.parametrize("kv_dtype", ["bf16", "fp8"])
@pytest.mark.parametrize(("rows", "lengths"), [(1, (0, 40)), (3, (1, 150)), (8, (64, 129)), (16, (5, 199))])
def test_every_stage_agrees_with_the_reference(
    weights: TargetWeights, rows: int, lengths: tuple[int, int], kv_dtype: str
) -> None:
    bench = Bench(weights, 8 if rows <= 8 else 16, kv_dtype)
    for length in lengths:
        bench.begin(length, seed=rows + length)
        results = bench.stages(rows)
        assert len(results) > 50
        assert not [(where, r) for where, r in results if not r.passed]
        written = [bench.step.activations.logits[:rows], bench.step.activations.greedy_ids[:rows]]
        assert [machine().unwritten_bytes(t) for t in written] == [0, 0]


@pytest.mark.parametrize("kv_dtype", ["bf16", "fp8"])
def test_long_splits_agree_with_the_reference(weights: TargetWeights, kv_dtype: str) -> None:
    """Splits that doubled, once and more; rows 0 and 1 of the first case have other splits than the rest."""
    bench = Bench(weights, 8, kv_dtype, splits_cap=2)
    for rows, length in ((4, 62), (8, 126), (1, 199)):
        bench.begin(length, seed=rows + length)
        assert not [(where, r) for where, r in bench.stages(rows) if not r.passed]


def reference_logits(weights: TargetWeights, bench: Bench, rows: int, length: int, *, exact: bool = False) -> Tensor:
    """The reference's step over copies of the bench's caches, before the kernels touch them; exact: in float64."""
    inputs = bench.step.inputs
    caches = []
    for keys, values in bench.caches:
        dtype = torch.float64 if exact else keys.dtype
        cache = KVCache(keys.shape[0], *keys.shape[1:], dtype, torch.device("cpu"))
        # The kernels keep q and k in adjacent-pair order; dimension j of the reference is their dimension 2j.
        cache._keys = torch.cat((keys[..., 0::2], keys[..., 1::2]), dim=-1).to(dtype)
        cache._values = values.clone().to(dtype)
        caches.append(cache)
    start = max(0, length + 1 - CONFIG.sliding_window)
    step_rows = Rows(
        positions=inputs.positions[:rows].clone(),
        full_slots=inputs.full_slots[:rows].clone(),
        sliding_slots=inputs.sliding_slots[:rows].clone(),
        full_context=inputs.full_pages[:length].long(),
        sliding_context=inputs.sliding_pages[start:length].long(),
        sliding_start=start,
        ancestors=(inputs.ancestors[:rows, None] >> torch.arange(rows)[None] & 1).bool(),
    )
    return (
        ReferenceTarget(CONFIG, weights, Numerics(exact=exact))
        .forward(inputs.token_ids[:rows], step_rows, caches)
        .logits
    )


def distance(a: Tensor, b: Tensor) -> float:
    """Relative root mean square."""
    return float((a.double() - b.double()).norm() / b.double().norm())


@pytest.mark.parametrize(("rows", "length"), [(1, 0), (3, 100), (8, 45), (16, 170)])
def test_a_whole_step_is_as_exact_as_the_reference(weights: TargetWeights, rows: int, length: int) -> None:
    """Roundings differ in their last bit and grow over the layers, in the reference's steps as in the kernels'."""
    bench = Bench(weights, 8 if rows <= 8 else 16, "bf16")
    bench.begin(length, seed=length)
    exact = reference_logits(weights, bench, rows, length, exact=True)
    theirs = distance(reference_logits(weights, bench, rows, length), exact)
    ours = distance(bench.run(rows), exact)
    assert ours <= 2 * theirs


def test_a_tree_of_rows_sees_its_ancestors_only(weights: TargetWeights) -> None:
    """Rows 1 and 2 both follow row 0, row 3 follows row 1, row 4 row 2; siblings share a position."""
    bench = Bench(weights, 8, "bf16")

    def begin(chain: bool) -> None:
        bench.begin(30, seed=3)
        if not chain:
            bench.step.inputs.positions[:5] = torch.tensor([30, 31, 31, 32, 32])
            bench.step.inputs.ancestors[:5] = torch.tensor([0b1, 0b11, 0b101, 0b1011, 0b10101], dtype=torch.int32)

    begin(chain=False)
    exact = reference_logits(weights, bench, 5, 30, exact=True)
    theirs = distance(reference_logits(weights, bench, 5, 30), exact)
    assert distance(bench.run(5), exact) <= 2 * theirs
    bench.step.inputs.ancestors.copy_(torch.tensor([(2 << row) - 1 for row in range(8)], dtype=torch.int32))
    begin(chain=True)  # another step altogether
    assert distance(bench.run(5), exact) > 10 * theirs


@pytest.mark.parametrize("kv_dtype", ["bf16", "fp8"])
def test_a_row_is_the_same_bits_in_any_company(weights: TargetWeights, kv_dtype: str) -> None:
    """Row i of a step of T rows, for every T of the same instance, and after the rows before it were committed."""
    bench = Bench(weights, 16, kv_dtype)
    length = 120
    bench.begin(length, seed=1)
    whole = bench.run(16)
    for rows in (1, 2, 5, 8, 9, 15):
        bench.begin(length, seed=1)
        assert torch.equal(bench.run(rows), whole[:rows]), rows

    # One row at a time: the committed part grows by the row before.
    bench.begin(length, seed=1)
    inputs = bench.step.inputs
    ids, full, sliding = (t.clone() for t in (inputs.token_ids, inputs.full_slots, inputs.sliding_slots))
    for row in range(4):
        inputs.token_ids[0], inputs.positions[0], inputs.length[0] = ids[row], length + row, length + row
        inputs.full_slots[0], inputs.sliding_slots[0] = full[row], sliding[row]
        if row:
            inputs.full_pages[length + row - 1], inputs.sliding_pages[length + row - 1] = (
                full[row - 1],
                sliding[row - 1],
            )
        assert torch.equal(bench.run(1)[0], whole[row]), row


def test_a_replayed_step_gives_the_same_bits(weights: TargetWeights) -> None:
    """Counters, epochs and flags go on from where the last step left them."""
    bench = Bench(weights, 8, "bf16")
    bench.begin(70, seed=2)
    first = bench.run(3)
    for _ in range(3):
        bench.begin(70, seed=2)
        assert torch.equal(bench.run(3), first)


@pytest.mark.parametrize("epoch", [1, 2**28 - 1, 2**32 - 2])
def test_epochs_wrap(weights: TargetWeights, epoch: int) -> None:
    """Three steps during which the sign of a counter (8 times the epoch), or the epoch itself, wraps."""
    bench = Bench(weights, 8, "bf16")
    bench.begin(70, seed=2)
    expected = bench.run(3)
    step = Step(
        CONFIG,
        prepare(CONFIG, weights),
        bench.emulator,
        row_cap=8,
        max_context=bench.step.max_context,
        kv_dtype="bf16",
        first_epoch=epoch,
    )
    step.use_caches(bench.caches)
    for _ in range(3):
        bench.case.fill(70, seed=2)
        for field in fields(step.inputs):
            getattr(step.inputs, field.name).copy_(getattr(bench.step.inputs, field.name))
        bench.emulator.attach(step, bench.caches)
        step.launch(3)
        bench.emulator.synchronize()
        assert torch.equal(step.activations.logits[:3], expected)
