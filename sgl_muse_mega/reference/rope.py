"""Rotary position embedding (model specification, section 2.3; section 7.2 for the draft)."""

import torch
from torch import Tensor


def rope_tables(positions: Tensor, head_dim: int, theta: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin of p * theta^(-2j / head_dim), j = 0 .. head_dim/2 - 1.

    positions int64 [T]; returns two [T, head_dim / 2] tensors of `dtype`. Frequencies and angles are float32, as in the
    servers' tables, unless dtype is float64.
    """
    j = torch.arange(0, head_dim, 2, device=positions.device, dtype=dtype)
    frequency = 1.0 / theta ** (j / head_dim)
    angle = positions.to(dtype)[:, None] * frequency[None, :]
    return angle.cos(), angle.sin()


def rotate_half(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates the pairs (j, j + head_dim / 2) of x [T, heads, head_dim], the order of the checkpoint's q and k rows."""
    first, second = x.chunk(2, dim=-1)
    cos, sin = cos[:, None, :], sin[:, None, :]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
