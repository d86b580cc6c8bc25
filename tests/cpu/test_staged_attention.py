"""Attention over long splits, whose keys and values pass through shared memory: the bits of the direct path, for every
size of a team of warps and in any company."""

import functools

import pytest
import torch
from race_case import STAGED, RaceCase, Tuning

from sgl_muse_mega.emulator.machine import racing
from sgl_muse_mega.emulator.stepper import Emulator
from sgl_muse_mega.errors import UserError
from sgl_muse_mega.megakernel.instance import Instance
from sgl_muse_mega.megakernel.random_step import RandomStep, random_weights, spark_config, tiny_config


@functools.cache
def case(kv_heads: int, kv_dtype: str, tuning: Tuning) -> RandomStep:
    """16 query heads, 16 rows: up to 8 tiles of queries with two KV heads, 16 with one."""
    torch.set_num_threads(1)
    config = tiny_config(
        2, vocab_size=128, hidden_size=128, moe_hidden_size=64, moe_intermediate_size=64, num_local_experts=8,
        num_experts_per_tok=2, num_attention_heads=16, num_key_value_heads=kv_heads, sliding_window=96,
    )  # fmt: skip
    emulator = Emulator(sms=3)
    weights = random_weights(config, 1, emulator.device)
    return RandomStep.create(
        config, weights, emulator, row_cap=16, max_context=700, kv_dtype=kv_dtype, tuning=dict(tuning)
    )


def run(case: RandomStep, rows: int, length: int) -> torch.Tensor:
    """Logits [rows, V] over poisoned buffers."""
    machine = case.step.machine
    assert isinstance(machine, Emulator)
    case.fill(length, seed=length)
    case.step.activations.poison()
    machine.attach(case.step, case.caches)
    case.step.launch(rows)
    machine.synchronize()
    return case.step.activations.logits[:rows].clone()


@pytest.mark.parametrize(
    ("kv_heads", "kv_dtype", "staged_split", "splits_cap"), [(2, "fp8", 32, 1), (1, "bf16", 128, 4)]
)
def test_the_bits_are_those_of_the_direct_path(
    kv_heads: int, kv_dtype: str, staged_split: int, splits_cap: int
) -> None:
    """Teams of 2, 4 and 8 warps, some with helpers only; several units and several passes of a team; rows with splits
    of two sizes (510); contexts on both sides of where shared memory comes in (with 128: at 512)."""
    direct, staged = (
        case(kv_heads, kv_dtype, (("splits_cap", splits_cap), ("staged_split", split))) for split in (0, staged_split)
    )
    for rows, length in ((1, 690), (4, 510), (7, 300), (16, 600), (10, 100), (3, 0)):
        expected = run(direct, rows, length)
        assert torch.equal(run(staged, rows, length), expected), (rows, length)
        assert torch.equal(run(staged, 1, length)[0], expected[0]), (rows, length)


def test_every_schedule_gives_the_same_bits() -> None:
    torch.set_num_threads(1)
    staged = RaceCase(tuning=STAGED)
    expected = staged.run(rows=3, length=100)
    for seed in range(1, 25):
        assert torch.equal(staged.run(racing(seed), rows=3, length=100), expected), seed


def test_stages_are_lent_where_there_is_room() -> None:
    config = spark_config(2)

    def instance(**tuning: int | bool) -> Instance:
        return Instance.for_config(config, nvfp4=True, fp8_cache=True, row_cap=8, sms=132, **tuning)

    assert instance(staged_split=0).lent_stages == 0
    assert instance(separate_phases=True).lent_stages == 0
    assert instance(math_warps=4).staged_split == 0
    staged = instance()
    assert staged.staged_split == 128
    assert staged.lent_stages * staged.stage_bytes >= 72 * 1024
    assert staged.stages == instance(staged_split=0).stages
    assert (
        staged.shared_offsets["LENT_AT"] + staged.lent_stages * staged.stage_bytes
        == staged.shared_offsets["SHARED_BYTES"]
    )
    with pytest.raises(UserError, match="staged_split is 48, it can be 0 or a power of two from 32 on"):
        instance(staged_split=48)
    with pytest.raises(UserError, match="there are 4 math warps, it needs 8"):
        instance(staged_split=64, math_warps=4)
