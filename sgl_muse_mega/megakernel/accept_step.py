"""The accept launch over the buffers of a verify step."""

from dataclasses import fields

import torch
from torch import Tensor

from sgl_muse_mega.megakernel import draft_protocol
from sgl_muse_mega.megakernel.accept_instance import AcceptInstance
from sgl_muse_mega.megakernel.build import Progress, quiet
from sgl_muse_mega.megakernel.draft_protocol import ACCEPT_LAUNCH, DraftParams
from sgl_muse_mega.megakernel.draft_scratch import DecodeState, DraftActivations, KernelControl, as_int32
from sgl_muse_mega.megakernel.machine import Machine
from sgl_muse_mega.megakernel.protocol import COUNTER_STRIDE
from sgl_muse_mega.megakernel.scratch import StepInputs


class AcceptStep:
    """Judges the drafts in inputs.token_ids[1:] by the logits of their rows, commits, and advances `inputs`."""

    def __init__(
        self,
        machine: Machine,
        inputs: StepInputs,
        logits: Tensor,
        greedy_ids: Tensor,
        state: DecodeState,
        draft: DraftActivations | None,
        *,
        softcap: float,
        progress: Progress = quiet,
        threads: int = 384,
        first_epoch: int = 0,
    ) -> None:
        """logits f32 [row_cap, V], greedy_ids int64 [row_cap]. Raises UserError when the sizes do not fit."""
        self.machine, self.inputs, self.state = machine, inputs, state
        self._logits, self._greedy_ids, self._draft = logits, greedy_ids, draft
        row_cap, vocab = logits.shape
        selector_k = draft.candidates.shape[1] if draft else 1
        self.instance = AcceptInstance.for_sms(
            machine.sms, vocab=vocab, selector_k=selector_k, softcap=softcap, row_cap=row_cap, threads=threads
        )
        self.module = machine.load(self.instance, progress)
        self.control = KernelControl.allocate(
            draft_protocol.ACCEPT_COUNTERS, self.instance.sms, row_cap, machine.device, first_epoch
        )
        growth = self.instance.shares * draft_protocol.ROW_SUMS
        words = torch.zeros(row_cap, COUNTER_STRIDE, dtype=torch.int64)
        words[:, 0] = first_epoch * growth % 2**32
        self.row_counters = as_int32(words).to(machine.device)
        self.row_sums = torch.zeros(row_cap, 2, self.instance.shares, 4, dtype=torch.int64, device=machine.device)
        self.segment_sums = torch.zeros(row_cap, self.instance.segments, dtype=torch.int64, device=machine.device)

    def launch(self, rows: int) -> None:
        """Enqueues the verdict on the first `rows` rows."""
        params = DraftParams()
        params.counters, params.epoch = self.control.counters.data_ptr(), self.control.epoch.data_ptr()
        for name in ("token_ids", "positions", "length", "full_slots", "sliding_slots", "full_pages", "sliding_pages"):
            setattr(params, name, getattr(self.inputs, name).data_ptr())
        for name in ("request", "state", "verdicts", "outputs"):
            setattr(params, name, getattr(self.state, name).data_ptr())
        params.logits, params.greedy_ids = self._logits.data_ptr(), self._greedy_ids.data_ptr()
        if self._draft:
            params.candidates = self._draft.candidates.data_ptr()
            params.probabilities = self._draft.probabilities.data_ptr()
        params.fault_record = self.machine.fault_record.data_ptr()
        params.deadline_ns = self.machine.deadline_ns
        for name in ("row_counters", "row_sums", "segment_sums"):
            setattr(params, name, getattr(self, name).data_ptr())
        params.rows, params.launch = rows, ACCEPT_LAUNCH
        self.module.launch("accept_kernel", params)

    def memory(self) -> list[tuple[str, Tensor, bool, bool]]:
        """What `Machine.declare` wants to know of this object's own memory."""
        found = [(f"accept.{f.name}", getattr(self.control, f.name), False, True) for f in fields(self.control)]
        found += [(f"accept.{n}", getattr(self, n), False, True) for n in ("row_counters", "row_sums", "segment_sums")]
        return found + [(f"state.{f.name}", getattr(self.state, f.name), False, True) for f in fields(self.state)]
