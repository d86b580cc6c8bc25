"""Paged K/V cache with window eviction.

Positions map to pages of `page_size` slots; page 0 is never handed out, so that an evicted or unused entry of the page
table (0) can only lead to rows that no position owns. Readers bound every access by the window, never by the table.
"""

import torch
from torch import Tensor

from sgl_muse_mega.errors import UserError

FP8_MAX = 448.0


class PageTable:
    """Pages of one sequence in one pool; what leaves the window is given back with `evict_before`."""

    def __init__(self, pages: int, page_size: int) -> None:
        self.page_size = page_size
        self._free = list(range(pages - 1, 0, -1))
        self._pages: list[int] = []

    def reserve(self, length: int) -> None:
        """Makes positions below `length` addressable; raises UserError when the pool has no page left."""
        while len(self._pages) * self.page_size < length:
            if not self._free:
                raise UserError(
                    f"The K/V cache is full: position {length - 1} needs another page of {self.page_size} slots."
                )
            self._pages.append(self._free.pop())

    def evict_before(self, position: int) -> None:
        """Frees every page that lies wholly below `position`."""
        for index in range(min(position // self.page_size, len(self._pages))):
            if self._pages[index]:
                self._free.append(self._pages[index])
                self._pages[index] = 0

    def reset(self) -> None:
        """Forgets the sequence and frees all its pages."""
        self._free.extend(page for page in reversed(self._pages) if page)
        self._pages.clear()

    @property
    def free_pages(self) -> int:
        """Pages that can still be handed out."""
        return len(self._free)

    def slots(self, positions: Tensor) -> Tensor:
        """Slot of each position, int64; 0 .. page_size - 1 for evicted ones."""
        table = torch.tensor(self._pages, dtype=torch.int64, device=positions.device)
        return table[positions // self.page_size] * self.page_size + positions % self.page_size


class KVCache:
    """K and V of one layer, [slots, kv_heads, head_dim], in the cache's storage type."""

    def __init__(self, slots: int, kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device) -> None:
        # NaN bytes, so that a read of a slot nobody wrote cannot go unnoticed.
        fill = torch.full((2, slots, kv_heads, head_dim), float("nan"), device=device)
        self._keys, self._values = fill.to(dtype)

    def write(self, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """A5: stores rows [T, kv_heads, head_dim]; fp8 is e4m3 with unit scale, clamped to +-448 (D-9)."""
        for buffer, rows in ((self._keys, keys), (self._values, values)):
            stored = rows.clamp(-FP8_MAX, FP8_MAX) if buffer.dtype == torch.float8_e4m3fn else rows
            buffer.view(_BITS[buffer.element_size()])[slots] = stored.to(buffer.dtype).view(
                _BITS[buffer.element_size()]
            )

    def move(self, source: Tensor, destination: Tensor) -> None:
        """Copies the rows of the slots `source` [n] to `destination` [n], all of them read before any is written."""
        for buffer in (self._keys, self._values):
            bits = buffer.view(_BITS[buffer.element_size()])
            bits[destination] = bits[source]

    def read(self, slots: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """K and V of `slots` [n, kv_heads, head_dim] in `dtype`."""
        bits = _BITS[self._keys.element_size()]
        keys, values = (b.view(bits)[slots].view(b.dtype).to(dtype) for b in (self._keys, self._values))
        return keys, values


# Index operations are not implemented for float8; they move bytes, so an integer view of the same size does.
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
