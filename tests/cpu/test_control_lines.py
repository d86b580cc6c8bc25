"""Counters, epochs and flags of kernels lie in 128-byte lines of their own, wherever the allocator puts them."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from sgl_muse_mega.megakernel.scratch import on_own_lines

LINE = 128


@given(st.lists(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=70), min_size=1, max_size=12))
def test_lines_are_not_shared(arrays: list[list[int]]) -> None:
    kept = [on_own_lines(torch.tensor(values), torch.device("cpu")) for values in arrays]
    lines: set[int] = set()
    for words, values in zip(kept, arrays, strict=True):
        assert words.dtype == torch.int32
        assert [value % 2**32 for value in words.tolist()] == values
        start, end = words.data_ptr(), words.data_ptr() + 4 * len(values)
        storage = words.untyped_storage()
        own = set(range(start // LINE, (end - 1) // LINE + 1))
        assert start % LINE == 0
        assert (max(own) + 1) * LINE <= storage.data_ptr() + storage.nbytes()
        assert not own & lines
        lines |= own
