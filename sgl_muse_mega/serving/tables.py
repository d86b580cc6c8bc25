"""Where a step finds its keys and values: SGLang's tables of slots as the kernels' inputs.

A full layer's slot of position p is `inputs.full_pages[p]`, a sliding layer's is `inputs.sliding_pages[p]`; only
committed positions that a row sees are read. Everything here is device work of fixed shapes without a host
synchronisation, so it can be captured into SGLang's graph; whatever of a table is stale is copied and not read.
"""

from typing import Any

import torch
from torch import Tensor

from sgl_muse_mega.megakernel.scratch import StepInputs

PAGED = ("fa3", "trtllm_mha")
PACKED = ("triton",)
BACKENDS = (*PAGED, *PACKED)


class AttentionTables:
    """Copies one request's slots out of the attention backend's metadata of the running forward."""

    def __init__(self, inputs: StepInputs, *, window: int, page_size: int) -> None:
        """window: keys that a row of a sliding layer sees, itself included."""
        self._inputs = inputs
        self._window = window
        self._page_size = page_size
        device = inputs.length.device
        self._offsets = torch.arange(page_size, dtype=torch.int32, device=device)
        self._steps = torch.arange(window, dtype=torch.int64, device=device)

    def copy(self, metadata: Any) -> None:
        """Fills both tables from the metadata of FlashAttention 3, TRT-LLM MHA or Triton."""
        if getattr(metadata, "page_table", None) is not None:
            self._copy_paged(self._inputs.full_pages, metadata.page_table)
            if metadata.swa_page_table is not None:
                self._copy_paged(self._inputs.sliding_pages, metadata.swa_page_table)
            return
        self._copy_slots(self._inputs.full_pages, metadata.kv_indices)
        if metadata.window_kv_indices is not None:
            self._copy_window(metadata)

    def _copy_paged(self, pages: Tensor, table: Tensor) -> None:
        """table int32 [1, n]: page numbers."""
        if self._page_size == 1:
            self._copy_slots(pages, table[0])
            return
        needed = min(-(-len(pages) // self._page_size), table.shape[1])
        slots = table[0, :needed, None] * self._page_size + self._offsets
        self._copy_slots(pages, slots.flatten())

    def _copy_slots(self, pages: Tensor, slots: Tensor) -> None:
        count = min(len(pages), len(slots))
        pages[:count].copy_(slots[:count])

    def _copy_window(self, metadata: Any) -> None:
        """Triton packs the slots of the window alone; its first one belongs to position total - packed."""
        pages, packed = self._inputs.sliding_pages, metadata.window_kv_indices
        count = min(self._window, len(packed), len(pages))
        total = metadata.kv_indptr[1] - metadata.kv_indptr[0]
        first = total - (metadata.window_kv_indptr[1] - metadata.window_kv_indptr[0])
        # What lies behind the packed part goes behind the committed positions, or onto the table's last entry.
        positions = (self._steps[:count] + first).clamp_(max=len(pages) - 1)
        pages.index_copy_(0, positions, packed[:count].to(torch.int32))


class LiveTables:
    """Copies one request's slots out of the server's own tables, which the scheduler may change afterwards."""

    def __init__(self, inputs: StepInputs, *, window: int) -> None:
        self._inputs = inputs
        device = inputs.length.device
        behind = len(inputs.full_slots) * 2  # rows of this step, and where the next one may begin
        self._steps = torch.arange(min(window + behind, len(inputs.full_pages)), device=device)
        self._window = window

    def copy(self, req_to_token: Tensor, row: Tensor, full_to_sliding: Tensor | None) -> None:
        """req_to_token int32 [requests, positions] of full slots; row int64 [1], the request's;
        full_to_sliding int64: slot of the sliding pool by full slot."""
        pages = self._inputs.full_pages
        count = min(len(pages), req_to_token.shape[1])
        pages[:count].copy_(req_to_token.index_select(0, row)[0, :count])
        pages[count:].zero_()  # rows beyond the server's table go to the slot of nobody
        if full_to_sliding is None:
            return
        start = (self._inputs.length - self._window).clamp_(min=0)
        positions = (self._steps + start).clamp_(max=len(pages) - 1)
        sliding = full_to_sliding[pages[positions].long()]
        self._inputs.sliding_pages.index_copy_(0, positions, sliding.to(torch.int32))
