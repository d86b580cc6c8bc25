"""What the kernels of csrc/server must leave, as formulas of PyTorch that change a step's inputs in place."""

from typing import Any

import torch
from torch import Tensor

from sgl_muse_mega.megakernel.draft_protocol import STATE
from sgl_muse_mega.megakernel.draft_scratch import DecodeState
from sgl_muse_mega.megakernel.scratch import StepInputs, chain_ancestors


def begin_step(
    inputs: StepInputs, state: DecodeState, row: Tensor, length: Tensor, anchor: Tensor, *, window: int,
    req_to_token: Tensor, full_to_sliding: Tensor | None,
) -> None:  # fmt: skip
    inputs.length.copy_(length)
    inputs.token_ids[:1].copy_(anchor)
    pages = inputs.full_pages
    count = min(len(pages), req_to_token.shape[1])
    pages[:count].copy_(req_to_token.index_select(0, row)[0, :count])
    pages[count:].zero_()
    if full_to_sliding is not None:
        steps = torch.arange(min(window + 2 * len(inputs.full_slots), len(pages)))
        start = (inputs.length - window).clamp_(min=0)
        positions = (steps + start).clamp_(max=len(pages) - 1)
        sliding = full_to_sliding[pages[positions].long()]
        inputs.sliding_pages.index_copy_(0, positions, sliding.to(torch.int32))
    positions = torch.arange(len(inputs.full_slots)) + length
    inputs.positions.copy_(positions)
    inputs.full_slots.copy_(inputs.full_pages[positions])
    inputs.sliding_slots.copy_(inputs.sliding_pages[positions])
    state.state.zero_()


def end_step(inputs: StepInputs, state: DecodeState, result: Tensor, *, tree: bool, restore: bool) -> None:
    """result int64 [width + 3]."""
    width = len(result) - 3
    committed = state.state[STATE.index("COMMITTED")].reshape(1)
    rows = state.path[1:width].long() if tree else torch.arange(1, width)
    result[: width - 1].copy_(inputs.token_ids[rows])
    if restore:
        inputs.ancestors.copy_(chain_ancestors(len(inputs.ancestors)))
        inputs.live.fill_(len(inputs.ancestors))
    result.index_copy_(0, (committed - 1).clamp_(min=0), inputs.token_ids[:1])
    result[width : width + 1].copy_(committed)
    result[-2:-1].copy_(inputs.token_ids[:1])
    result[-1:].copy_(inputs.length)


def begin_forward(
    inputs: StepInputs, ids: Tensor, positions: Tensor, slots: Tensor, metadata: Any, *, window: int, page_size: int
) -> None:
    rows = len(ids)
    inputs.token_ids[:rows].copy_(ids)
    inputs.positions[:rows].copy_(positions)
    inputs.length.copy_(positions[:1])
    inputs.full_slots[:rows].copy_(slots)
    if metadata.swa_out_cache_loc is not None:
        inputs.sliding_slots[:rows].copy_(metadata.swa_out_cache_loc[:rows])
    if getattr(metadata, "page_table", None) is not None:
        _paged(inputs.full_pages, metadata.page_table, page_size)
        if metadata.swa_page_table is not None:
            _paged(inputs.sliding_pages, metadata.swa_page_table, page_size)
        return
    _slots(inputs.full_pages, metadata.kv_indices)
    if metadata.window_kv_indices is None:
        return
    pages, packed = inputs.sliding_pages, metadata.window_kv_indices
    count = min(window, len(packed), len(pages))
    total = metadata.kv_indptr[1] - metadata.kv_indptr[0]
    first = total - (metadata.window_kv_indptr[1] - metadata.window_kv_indptr[0])
    places = (torch.arange(count) + first).clamp_(max=len(pages) - 1)
    pages.index_copy_(0, places, packed[:count].to(torch.int32))


def _paged(pages: Tensor, table: Tensor, page_size: int) -> None:
    needed = min(-(-len(pages) // page_size), table.shape[1])
    slots = table[0, :needed, None] * page_size + torch.arange(page_size, dtype=torch.int32)
    _slots(pages, slots.flatten())


def _slots(pages: Tensor, slots: Tensor) -> None:
    count = min(len(pages), len(slots))
    pages[:count].copy_(slots[:count])
