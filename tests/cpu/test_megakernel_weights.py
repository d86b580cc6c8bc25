"""Weights in kernel order, and the check of everything a launch points at."""

import dataclasses

import pytest
import torch

from sgl_muse_mega.checkpoint.random_weights import random_layer
from sgl_muse_mega.errors import UserError
from sgl_muse_mega.megakernel import tensors
from sgl_muse_mega.megakernel.instance import Instance
from sgl_muse_mega.megakernel.random_step import tiny_config
from sgl_muse_mega.megakernel.weights import (
    KernelLayer,
    adjacent_pairs,
    prepare_layer,
    residual_gate,
    rope_table,
)
from sgl_muse_mega.reference import attention
from sgl_muse_mega.reference.numerics import Numerics
from sgl_muse_mega.reference.rope import rope_tables, rotate_half

CPU = torch.device("cpu")


def test_adjacent_pairs_rotate_to_the_same_scores() -> None:
    """Rotating halves of the stored order and pairs of the kernel order gives the same dot products (self-check 4)."""
    generator = torch.Generator().manual_seed(3)
    weight = torch.randn(2 * 64, 32, generator=generator)
    x = torch.randn(5, 32, generator=generator)
    positions = torch.tensor([0, 1, 7, 100, 1000])
    cos, sin = rope_tables(positions, 64, 500000.0, torch.float32)
    halves = rotate_half((x @ weight.T).unflatten(1, (2, 64)), cos, sin)
    table = rope_table(500000.0, 1001, 64, CPU)[positions]
    assert torch.equal(table, torch.cat((cos, sin), dim=1))
    pairs = (x @ adjacent_pairs(weight, 64).T).unflatten(1, (2, 64))
    even, odd = pairs[..., 0::2], pairs[..., 1::2]
    c, s = table[:, None, :32], table[:, None, 32:]
    rotated = torch.stack((even * c - odd * s, odd * c + even * s), dim=-1).flatten(-2)
    scores = torch.einsum("thd,uhd->htu", rotated, rotated)
    torch.testing.assert_close(scores, torch.einsum("thd,uhd->htu", halves, halves), rtol=1e-4, atol=1e-4)


def test_residual_gate_is_the_references() -> None:
    gate = torch.randn(64, generator=torch.Generator().manual_seed(1)) * 2
    ours = residual_gate(gate, 0.3)
    for a, b in zip(ours, attention.residual_gate(gate, 0.3, Numerics()), strict=True):
        torch.testing.assert_close(a, b)
    unclamped = ours[1] ** 2 <= 0.999
    torch.testing.assert_close((ours[0] ** 2 + ours[1] ** 2)[unclamped], torch.ones(int(unclamped.sum())))


def layer(nvfp4: bool) -> tuple[Instance, KernelLayer]:
    config = tiny_config(nvfp4=nvfp4)
    instance = Instance.for_config(config, nvfp4=nvfp4, fp8_cache=False, row_cap=8, sms=4)
    return instance, prepare_layer(config, random_layer(config, 0, 5))


@pytest.mark.parametrize("nvfp4", [True, False])
def test_prepared_layers_pass_the_check(nvfp4: bool) -> None:
    instance, prepared = layer(nvfp4)
    assert prepared.nvfp4 == nvfp4
    tensors.check_layer(instance, 0, prepared, CPU)


def misaligned(x: torch.Tensor) -> torch.Tensor:
    padded = torch.empty(x.numel() + 1, dtype=x.dtype)
    return padded[1:].view(x.shape).copy_(x)


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("o_proj", lambda x: x[:-1], "has shape"),
        ("router", lambda x: x.bfloat16(), "instead of torch.float32"),
        ("qkv", lambda x: x.T.contiguous().T, "is not contiguous"),
        ("pre_expert_norm", misaligned, "multiple of 16 bytes"),
        ("down", lambda x: x.to("meta"), "is on meta"),
        ("gate_scale", lambda x: None, "is missing"),
    ],
)
def test_wrong_tensors_are_refused_by_name(name: str, change: object, words: str) -> None:
    instance, prepared = layer(True)
    broken = dataclasses.replace(prepared, **{name: change(getattr(prepared, name))})  # type: ignore[operator]
    with pytest.raises(UserError, match=words) as caught:
        tensors.check_layer(instance, 3, broken, CPU)
    assert f"layers.3.{name}" in str(caught.value)


def test_all_wrong_tensors_are_listed_together() -> None:
    instance, prepared = layer(True)
    broken = dataclasses.replace(prepared, o_proj=prepared.o_proj[:-1], router_bias=prepared.router_bias.double())
    with pytest.raises(UserError) as caught:
        tensors.check_layer(instance, 0, broken, CPU)
    assert "o_proj" in str(caught.value)
    assert "router_bias" in str(caught.value)
