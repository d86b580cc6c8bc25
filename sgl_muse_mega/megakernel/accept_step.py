"""The accept launch over the buffers of a verify step."""

from collections.abc import Sequence
from dataclasses import fields

import torch
from torch import Tensor

from sgl_muse_mega.megakernel import draft_protocol
from sgl_muse_mega.megakernel.accept_instance import AcceptInstance
from sgl_muse_mega.megakernel.build import Progress, quiet
from sgl_muse_mega.megakernel.draft_protocol import ACCEPT_LAUNCH, DraftParams
from sgl_muse_mega.megakernel.draft_scratch import DecodeState, DraftActivations, KernelControl
from sgl_muse_mega.megakernel.machine import Machine
from sgl_muse_mega.megakernel.mailbox import Mail, NoMail, session_word
from sgl_muse_mega.megakernel.protocol import COUNTER_STRIDE
from sgl_muse_mega.megakernel.scratch import StepInputs, on_own_lines


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
        mail: Mail | None = None,
        greedy_logits: Tensor | None = None,
    ) -> None:
        """logits f32 [row_cap, V], greedy_ids int64 [row_cap].

        mail: this rank's place among others. Then `logits` are those of its own ids, and greedy_logits, f32 [row_cap],
        those of the greedy ids, whoever has them. Raises UserError when the sizes do not fit.
        """
        self.machine, self.inputs, self.state = machine, inputs, state
        self._logits, self._greedy_ids, self._draft = logits, greedy_ids, draft
        self._greedy_logits, self._mail = greedy_logits, mail or NoMail()
        ranks = self._mail.ranks
        row_cap, vocab = logits.shape[0], logits.shape[1] * ranks
        selector_k = draft.candidates.shape[1] if draft else 1
        self.instance = AcceptInstance.for_sms(
            machine.sms, vocab=vocab, selector_k=selector_k, softcap=softcap, row_cap=row_cap, threads=threads,
            ranks=ranks,
        )  # fmt: skip
        self.module = machine.load(self.instance, progress)
        self.control = KernelControl.allocate(
            draft_protocol.ACCEPT_COUNTERS, self.instance.sms, row_cap, machine.device, first_epoch
        )
        growth = self.instance.shares * draft_protocol.ROW_SUMS
        words = torch.zeros(row_cap, COUNTER_STRIDE, dtype=torch.int64)
        words[:, 0] = first_epoch * growth % 2**32
        self.row_counters = on_own_lines(words, machine.device)
        self.row_sums = torch.zeros(row_cap, 2, self.instance.shares, 4, dtype=torch.int64, device=machine.device)
        self.segment_sums = torch.zeros(row_cap, self.instance.segments, dtype=torch.int64, device=machine.device)
        self.cache_lines = torch.zeros(0, 3, dtype=torch.int64, device=machine.device)
        self._line_bytes = 0
        self.whole_logits = torch.zeros(row_cap if ranks > 1 else 0, vocab, device=machine.device)
        self.mailbox, self._mailboxes = self._mail.take(self.instance.mail_bytes, machine.device)

    def use_caches(self, caches: Sequence[tuple[Tensor, Tensor]], full: Sequence[bool]) -> None:
        """Binds the target's (keys, values) per layer, in which trees need their rows moved; `full`: which layers have
        full attention."""
        pages = {True: self.inputs.full_pages, False: self.inputs.sliding_pages}
        lines = [
            [keys.data_ptr(), values.data_ptr(), pages[layer].data_ptr()]
            for (keys, values), layer in zip(caches, full, strict=True)
        ]
        self.cache_lines = torch.tensor(lines, dtype=torch.int64, device=self.machine.device)
        self._line_bytes = caches[0][0][0].numel() * caches[0][0].element_size()

    def launch_compact(self) -> None:
        """Enqueues the move of a tree's kept rows to where a chain would have left them."""
        assert len(self.cache_lines), "use_caches comes first"
        params = DraftParams()
        for name in ("state", "path"):
            setattr(params, name, getattr(self.state, name).data_ptr())
        params.cache_lines, params.cache_layers = self.cache_lines.data_ptr(), len(self.cache_lines)
        params.line_bytes, params.launch = self._line_bytes, ACCEPT_LAUNCH + 1
        self.module.launch("compact_kernel", params)

    def launch(self, rows: int, *, nodes: int = 0, auto: bool = False) -> None:
        """Enqueues the verdict on the first `rows` rows, which are a tree if there are nodes; auto: their number was
        chosen."""
        params = DraftParams()
        params.counters, params.epoch = self.control.counters.data_ptr(), self.control.epoch.data_ptr()
        for name in (
            "token_ids", "positions", "live", "length", "full_slots", "sliding_slots", "full_pages", "sliding_pages",
        ):  # fmt: skip
            setattr(params, name, getattr(self.inputs, name).data_ptr())
        for name in (
            "request", "state", "verdicts", "outputs", "parents", "depths", "conditionals", "path", "calibration",
        ):  # fmt: skip
            setattr(params, name, getattr(self.state, name).data_ptr())
        if auto:
            params.costs = self.state.costs.data_ptr()
        params.nodes = nodes
        params.logits, params.greedy_ids = self._logits.data_ptr(), self._greedy_ids.data_ptr()
        if self._draft:
            params.candidates = self._draft.candidates.data_ptr()
            params.probabilities = self._draft.probabilities.data_ptr()
        params.fault_record = self.machine.fault_record.data_ptr()
        params.deadline_ns = self.machine.deadline_ns
        for name in ("row_counters", "row_sums", "segment_sums"):
            setattr(params, name, getattr(self, name).data_ptr())
        params.rows, params.launch = rows, ACCEPT_LAUNCH
        params.rank, params.session = self._mail.rank, session_word(self._mail.session)
        for rank, address in enumerate(self._mailboxes):
            params.mailboxes[rank] = address
        params.whole_logits = self.whole_logits.data_ptr() or None
        params.greedy_logits = None if self._greedy_logits is None else self._greedy_logits.data_ptr()
        self.module.launch("accept_kernel", params)

    def memory(self) -> list[tuple[str, Tensor, bool, bool]]:
        """What `Machine.declare` wants to know of this object's own memory."""
        found = [(f"accept.{f.name}", getattr(self.control, f.name), False, True) for f in fields(self.control)]
        found += [(f"accept.{n}", getattr(self, n), False, True) for n in ("row_counters", "row_sums", "segment_sums")]
        if len(self.cache_lines):
            found.append(("accept.cache_lines", self.cache_lines, True, True))
        if self._mail.ranks > 1:
            found.append(("accept.mailbox", self.mailbox, False, True))
            found.append(("accept.whole_logits", self.whole_logits, False, False))
        return found + [(f"state.{f.name}", getattr(self.state, f.name), False, True) for f in fields(self.state)]
