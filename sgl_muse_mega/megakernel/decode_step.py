"""One decode step as launches over fixed buffers: draft, verify, accept, draft context. The host is not needed between
two steps: what a step needs of the one before lies in device memory."""

from collections.abc import Sequence
from dataclasses import fields

import torch
from torch import Tensor

from sgl_muse_mega.megakernel.accept_step import AcceptStep
from sgl_muse_mega.megakernel.decode_request import Words, state_words
from sgl_muse_mega.megakernel.draft_scratch import DecodeState
from sgl_muse_mega.megakernel.draft_step import DraftStep
from sgl_muse_mega.megakernel.scratch import chain_ancestors
from sgl_muse_mega.megakernel.step import Step
from sgl_muse_mega.speculative.rows import RowPlan


class DecodeStep:
    """A step of width w: w - 1 drafts after the anchor, w rows verified, 1 to w tokens committed.

    With nodes, a tree of so many rows is verified instead, of which a path of up to w tokens is committed. An automatic
    step verifies as many of the rows as pay, by the costs and the calibration in `state`.

    `step` is the target's; `draft` shares its inputs and taps. Every buffer stays where it is, so `launch` can be
    captured into a graph, one per width and kind.
    """

    def __init__(self, step: Step, draft: DraftStep | None, accept: AcceptStep, state: DecodeState) -> None:
        self.step, self.draft, self.accept, self.state = step, draft, accept, state

    def launch(self, width: int, *, nodes: int = 0, auto: bool = False) -> None:
        """Enqueues one step; of width 1 it is the anchor's alone, whatever the others say."""
        if self.draft is None or width == 1:
            nodes, auto = 0, False
        rows = nodes or width
        if self.draft and width > 1:
            self.draft.launch(width, nodes=nodes, auto=auto)
        self._verify(rows)
        self.accept.launch(rows, nodes=nodes, auto=auto)
        if nodes:
            self.accept.launch_compact()
        if self.draft:
            self.draft.launch_context(rows, nodes=nodes)

    def launch_prompt(self, rows: int) -> None:
        """Enqueues `rows` prompt rows: the target's K, V and logits, and the draft's context."""
        self._verify(rows)
        if self.draft:
            self.draft.launch_context(rows)

    def launch_head(self, rows: int) -> None:
        """Enqueues the target's head; with a draft, over the draft's copy of it, which is the faster one to read."""
        if self.draft:
            self.draft.launch_verify_head(rows, self.step)
        else:
            self.step.launch_head(rows)

    def _verify(self, rows: int) -> None:
        self.step.launch_embed(rows)
        for index in range(len(self.step.weights.layers)):
            self.step.launch_layer(index, rows)
        self.launch_head(rows)

    def seek(self, tokens: Sequence[int], length: int) -> None:
        """Makes `tokens` the next rows, at positions length .. ; the draft context of all of them will be written."""
        inputs, device = self.step.inputs, self.step.machine.device
        row_cap = len(inputs.token_ids)
        inputs.ancestors.copy_(chain_ancestors(row_cap))
        inputs.live.fill_(row_cap)
        positions = torch.arange(length, length + row_cap, device=device)
        inputs.token_ids[: len(tokens)].copy_(torch.tensor(list(tokens)))
        inputs.positions.copy_(positions)
        inputs.full_slots.copy_(inputs.full_pages[positions])
        inputs.sliding_slots.copy_(inputs.sliding_pages[positions])
        inputs.length.fill_(length)
        self.state.state.copy_(torch.tensor(state_words(start=length, committed=len(tokens))))

    def begin(self, anchor: int, length: int, request: Words, plan: RowPlan | None = None) -> None:
        """Makes the next step the first of a sequence whose first new token, the anchor, is known.

        plan: the calibration that trees and automatic steps start from, and the latter's costs.
        """
        self.seek([anchor], length)
        if plan is not None:
            self.take(plan)
        self.state.request.copy_(torch.tensor(request))
        self.state.state.copy_(torch.tensor(state_words(emitted=1)))
        self.state.outputs.zero_()

    def take(self, plan: RowPlan) -> None:
        """What steps of this plan learn starts with its prior, and they choose by its costs."""
        if plan.learns:
            self.state.calibration.copy_(torch.from_numpy(plan.first_state()))
        if plan.cost is not None:
            rows = min(len(plan.cost), len(self.state.costs))
            self.state.costs[:rows].copy_(torch.from_numpy(plan.cost[:rows]))

    def declare(self, caches: list[tuple[Tensor, Tensor]]) -> None:
        """Tells the machine of all memory that a step may touch; caches: the target's."""
        step = self.step
        found: list[tuple[str, Tensor, bool, bool]] = [
            (f"inputs.{f.name}", getattr(step.inputs, f.name), False, True) for f in fields(step.inputs)
        ]
        found += self.accept.memory()
        if self.draft:
            found += self.draft.memory()
        step.machine.declare(found, step, caches)
