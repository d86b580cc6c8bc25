"""Where a step finds its keys and values: SGLang's tables of slots as the kernels' inputs, by kernels of our own.

A full layer's slot of position p is `inputs.full_pages[p]`, a sliding layer's is `inputs.sliding_pages[p]`; only
committed positions that a row sees are read, and hardly more is copied. Everything here is one launch without a host
synchronisation, so it can be captured into SGLang's graph (csrc/server).
"""

from typing import Any

import torch
from torch import Tensor

from sgl_muse_mega.megakernel.build import Progress, quiet
from sgl_muse_mega.megakernel.draft_scratch import DecodeState
from sgl_muse_mega.megakernel.machine import Machine
from sgl_muse_mega.megakernel.scratch import StepInputs
from sgl_muse_mega.megakernel.server_instance import (
    INPUTS,
    ForwardBegin,
    Indices,
    ServerInstance,
    StepBegin,
    StepEnd,
)

PAGED = ("fa3", "trtllm_mha")
PACKED = ("triton",)
BACKENDS = (*PAGED, *PACKED)


def _bind(params: StepBegin | ForwardBegin, inputs: StepInputs) -> list[tuple[str, Tensor, bool]]:
    """Returns what the machine is lent of them."""
    for name in INPUTS:
        setattr(params, name, getattr(inputs, name).data_ptr())
    params.positions_held = len(inputs.full_pages)
    return [(f"inputs.{name}", getattr(inputs, name), False) for name in INPUTS]


class AttentionTables:
    """Copies one request's rows and slots out of the attention backend's metadata of the running forward."""

    def __init__(self, machine: Machine, inputs: StepInputs, *, window: int, page_size: int) -> None:
        """window: keys that a row of a sliding layer sees, itself included. Raises UserError when the kernels cannot be
        compiled."""
        self._machine, self._inputs = machine, inputs
        self._module = machine.load(ServerInstance(len(inputs.token_ids), machine.sms))
        self._window, self._page_size = window, page_size

    def launch(self, ids: Tensor, positions: Tensor, slots: Tensor, metadata: Any) -> None:
        """Enqueues it for rows with these ids, positions and slots, from the metadata of FlashAttention 3, TRT-LLM MHA
        or Triton."""
        params = ForwardBegin(window=self._window, rows=len(ids), page_size=1)
        lent = _bind(params, self._inputs)
        read = {"ids": ids, "row_positions": positions, "row_slots": slots}
        if metadata.swa_out_cache_loc is not None:
            read["row_sliding_slots"] = metadata.swa_out_cache_loc
        if getattr(metadata, "page_table", None) is not None:  # int32 [1, n]: page numbers
            params.page_size = self._page_size
            read["full_table"] = metadata.page_table[0]
            if metadata.swa_page_table is not None:
                read["sliding_table"] = metadata.swa_page_table[0]
        else:
            read["full_table"] = metadata.kv_indices
            if metadata.window_kv_indices is not None:
                read |= {"sliding_table": metadata.window_kv_indices, "ends": metadata.kv_indptr}
                read["window_ends"] = metadata.window_kv_indptr
        for name, tensor in read.items():
            setattr(params, name, Indices.of(tensor))
        self._machine.lend(lent + [(f"server.{name}", tensor, True) for name, tensor in read.items()])
        self._module.launch("forward_begin_kernel", params)


class LiveTables:
    """A whole step's beginning and end: one request's slots out of the server's own tables, which the scheduler may
    change after the beginning, and the step's result into a fresh tensor of every step."""

    def __init__(
        self,
        machine: Machine,
        inputs: StepInputs,
        state: DecodeState,
        *,
        window: int,
        req_to_token: Tensor,
        full_to_sliding: Tensor | None,
        progress: Progress = quiet,
    ) -> None:
        """req_to_token int32 [requests, positions] of full slots; full_to_sliding int64: slot of the sliding pool by
        full slot. Raises UserError when the kernels cannot be compiled."""
        self._machine = machine
        self._module = machine.load(ServerInstance(len(inputs.token_ids), machine.sms), progress)
        self._place = torch.zeros(1, dtype=torch.int64, device=inputs.length.device)
        params = StepBegin(window=window, request_stride=req_to_token.stride(0), result_place=self._place.data_ptr())
        self._lent = _bind(params, inputs)
        self._lent += [("server.result_place", self._place, False), ("server.requests", req_to_token, True)]
        params.requests = Indices.of(req_to_token, req_to_token.shape[1])
        if full_to_sliding is not None:
            params.full_to_sliding = Indices.of(full_to_sliding)
            self._lent.append(("server.full_to_sliding", full_to_sliding, True))
        params.state = state.state.data_ptr()
        self._begin = params
        self._inputs, self._state = inputs, state

    def launch_begin(self, row: Tensor, length: Tensor, anchor: Tensor, result: Tensor) -> None:
        """Enqueues the beginning of a step behind `length` committed rows of the request in row `row`; integers [1].

        result: int64 [width + 3], which the step's end fills.
        """
        read = {"row": row, "committed": length, "anchor": anchor}
        for name, tensor in read.items():
            setattr(self._begin, name, Indices.of(tensor))
        self._begin.result = result.data_ptr()
        lent = [(f"server.{name}", tensor, True) for name, tensor in read.items()]
        self._machine.lend([*self._lent, *lent, ("server.result", result, False)])
        self._module.launch("step_begin_kernel", self._begin)

    def launch_end(self, width: int, *, tree: bool, restore: bool) -> None:
        """Enqueues what writes the step's `width` tokens, how many of them are committed, the anchor and the length.

        restore: rows follow each other afterwards and all of them count, as the server's own steps want it.
        """
        params = StepEnd(result_place=self._place.data_ptr(), width=width, state=self._state.state.data_ptr())
        params.token_ids, params.length = self._inputs.token_ids.data_ptr(), self._inputs.length.data_ptr()
        if tree:
            params.path = self._state.path.data_ptr()
        if restore:
            params.ancestors, params.live = self._inputs.ancestors.data_ptr(), self._inputs.live.data_ptr()
        self._module.launch("step_end_kernel", params)
