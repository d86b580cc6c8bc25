"""Ragged batches: the real tokens of all sequences in one flat list, padded only for attention."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Layout:
    """Where the N real tokens of B sequences lie in a padded [B, T] grid."""

    row: Tensor  # int64 [N], sequence of each token
    column: Tensor  # int64 [N], its position in the sequence
    index: Tensor  # int64 [N], row * T + column
    lengths: Tensor  # int64 [B]
    width: int  # T, a multiple of 8

    @classmethod
    def of(cls, lengths: Tensor, width: int) -> "Layout":
        grid = torch.arange(width, device=lengths.device)[None] < lengths[:, None]
        row, column = grid.nonzero(as_tuple=True)
        return cls(row, column, row * width + column, lengths, width)

    def pad(self, flat: Tensor) -> Tensor:
        """[N, ...] -> [B, T, ...] with zeros in the padding."""
        batch = self.lengths.shape[0]
        padded = flat.new_zeros((batch * self.width, *flat.shape[1:])).index_copy(0, self.index, flat)
        return padded.unflatten(0, (batch, self.width))

    def flatten(self, padded: Tensor) -> Tensor:
        """[B, T, ...] -> [N, ...]; raises ValueError when T is not this layout's width."""
        if padded.shape[1] != self.width:
            raise ValueError(f"a grid of width {padded.shape[1]} does not fit a layout of width {self.width}")
        return padded.flatten(0, 1).index_select(0, self.index)


def pad_width(length: int) -> int:
    """The padded width used for sequences of at most `length` tokens."""
    return -(-length // 8) * 8


def to_grid(sequences: Sequence[Sequence[int]], fill: int, width: int) -> Tensor:
    """Token ids as an int16 grid [B, width], filled up with `fill`."""
    grid = torch.full((len(sequences), width), fill, dtype=torch.int16)
    for i, ids in enumerate(sequences):
        grid[i, : len(ids)] = torch.tensor(ids, dtype=torch.int16)
    return grid
