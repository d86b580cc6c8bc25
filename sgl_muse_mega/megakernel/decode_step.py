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
from sgl_muse_mega.megakernel.step import Step


class DecodeStep:
    """A step of width w: w - 1 drafts after the anchor, w rows verified, 1 to w tokens committed.

    `step` is the target's; `draft` shares its inputs and taps. Every buffer stays where it is, so `launch` can be
    captured into a graph, one per width.
    """

    def __init__(self, step: Step, draft: DraftStep | None, accept: AcceptStep, state: DecodeState) -> None:
        self.step, self.draft, self.accept, self.state = step, draft, accept, state

    def launch(self, width: int) -> None:
        """Enqueues one step."""
        if self.draft and width > 1:
            self.draft.launch(width)
        self._verify(width)
        self.accept.launch(width)
        if self.draft:
            self.draft.launch_context(width)

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
        positions = torch.arange(length, length + row_cap, device=device)
        inputs.token_ids[: len(tokens)].copy_(torch.tensor(list(tokens)))
        inputs.positions.copy_(positions)
        inputs.full_slots.copy_(inputs.full_pages[positions])
        inputs.sliding_slots.copy_(inputs.sliding_pages[positions])
        inputs.length.fill_(length)
        self.state.state.copy_(torch.tensor(state_words(start=length, committed=len(tokens))))

    def begin(self, anchor: int, length: int, request: Words) -> None:
        """Makes the next step the first of a sequence whose first new token, the anchor, is known."""
        self.seek([anchor], length)
        self.state.request.copy_(torch.tensor(request))
        self.state.state.copy_(torch.tensor(state_words(emitted=1)))
        self.state.outputs.zero_()

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
