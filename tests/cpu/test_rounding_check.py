"""Stock SGLang's roundings in attention, as rounding_check.py has them, against the reference's own attention."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmark"))

import rounding_check

from sgl_muse_mega.reference import attention
from sgl_muse_mega.reference.numerics import Numerics

ROWS, BEFORE = 8, 150  # three tiles of keys before the step


@pytest.fixture
def stock() -> Iterator[None]:
    rounding_check.stocks_roundings = True
    yield
    rounding_check.stocks_roundings = False


@pytest.mark.parametrize("window", [None, 64])
def test_attention_differs_by_its_roundings(window: int | None) -> None:
    chance = torch.Generator().manual_seed(3)
    q, keys, values = (torch.randn(n, h, 64, generator=chance) for n, h in ((ROWS, 8), (BEFORE + ROWS, 2), (158, 2)))
    keys, values = (x.to(torch.float8_e4m3fn).float() for x in (keys, values))
    mask = attention.visible(torch.arange(BEFORE, BEFORE + ROWS), torch.arange(BEFORE + ROWS), window)
    exact = attention.a6_attention(q, keys, values, mask, 0.125, Numerics(exact=True))
    error = {}
    for kind in (torch.bfloat16, torch.float8_e4m3fn):
        found = rounding_check.stock_attention(kind, q, keys, values, mask, 0.125, Numerics(exact=True))
        error[kind] = float((found - exact).norm() / exact.norm())
    assert 0 < error[torch.bfloat16] < 0.005
    assert 0.01 < error[torch.float8_e4m3fn] < 0.1


def test_own_rows_are_read_as_they_were_written(stock: None) -> None:
    cache = rounding_check.OwnRows(16, 2, 64, torch.float8_e4m3fn, torch.device("cpu"))
    first, second = torch.randn(2, 3, 2, 64)
    for start, rows in ((0, first), (3, second)):
        cache.write(torch.arange(start, start + 3), rows, -rows)
    keys, values = cache.read(torch.arange(6), torch.float32)
    assert torch.equal(keys[3:], second)
    assert torch.equal(values[3:], -second)
    assert torch.equal(keys[:3], first.to(torch.float8_e4m3fn).float())
    rounding_check.stocks_roundings = False
    assert torch.equal(cache.read(torch.arange(6), torch.float32)[0][3:], second.to(torch.float8_e4m3fn).float())
