"""Decoding as graph replays: steps are enqueued ahead of the host, which reads their reports from its own memory."""

import time
from collections.abc import Callable, Collection, Sequence
from functools import partial

import torch
from torch import Tensor

from sgl_muse_mega.megakernel.decode_request import Report, read_report, request_words
from sgl_muse_mega.megakernel.decode_step import DecodeStep
from sgl_muse_mega.megakernel.place import Place
from sgl_muse_mega.speculative.backend import check_prompt
from sgl_muse_mega.speculative.calibration import State
from sgl_muse_mega.speculative.rows import RowPlan
from sgl_muse_mega.speculative.sampling import SamplingParams

AHEAD = 2
"""Steps in flight: while one runs, the next is already enqueued, and the host reads the one before."""

CHAIN = RowPlan()


class DecodeLoop:
    """Implements `speculative.backend.StepBackend` over a step and the target's caches."""

    def __init__(
        self, decode: DecodeStep, caches: list[tuple[Tensor, Tensor]], max_context: int, place: Place | None = None
    ) -> None:
        """place: this rank's among several, each of which has a loop of its own and makes the same calls."""
        self.decode = decode
        self.max_context = max_context
        self.vocab_size = decode.step.config.vocab_size
        self.has_draft = decode.draft is not None
        self.width_limit = decode.step.instance.row_cap
        self.length = 0
        self.caches = caches
        self.mark: Callable[[bool], None] | None = None  # called before (True) and after each step is enqueued
        self._machine = decode.step.machine
        self._place = place
        self._graphs: dict[tuple[str, int], torch.cuda.CUDAGraph] = {}
        self._width, self._nodes, self._auto = 1, 0, False
        self._launched = self._read = 0

    def prefill(self, ids: Sequence[int]) -> Tensor:
        """Starts a sequence, in steps of up to `width_limit` rows; float32 logits [V] of the last prompt row.

        Raises UserError on an empty or long prompt.
        """
        check_prompt(ids, self.max_context)
        self._drain()
        if self._place:
            self._place.meet()
        self.decode.declare(self.caches)
        self.length = 0
        for start in range(0, len(ids), self.width_limit):
            chunk = ids[start : start + self.width_limit]
            self.decode.seek(chunk, start)
            self.replay("prompt", len(chunk), self.decode.launch_prompt)
            self._machine.synchronize()
            self.length += len(chunk)
        own = self.decode.step.activations.logits[len(chunk) - 1].cpu().clone()
        return self._place.join(own) if self._place else own

    @property
    def calibration(self) -> State:
        """What the steps of this sequence have learnt; waits for those that were enqueued ahead."""
        self._machine.synchronize()
        state: State = self.decode.state.calibration.cpu().numpy().copy()
        return state

    def begin(
        self,
        anchor: int,
        params: SamplingParams,
        *,
        width: int,
        max_new_tokens: int,
        stop_ids: Collection[int],
        plan: RowPlan = CHAIN,
    ) -> None:
        """Decoding starts behind `anchor`, the first new token; steps are as wide as `width` and `plan` say where the
        context allows it."""
        words = request_words(params, max_new_tokens=max_new_tokens, max_context=self.max_context, stop_ids=stop_ids)
        self._drain()
        self.decode.begin(anchor, self.length, words, plan)
        self._width, self._nodes, self._auto = width, plan.nodes or 0, plan.cost is not None
        self._launched = self._read = 0

    def next_step(self) -> Report:
        """The report of the next step. Further steps are enqueued before it is waited for."""
        while self._launched - self._read < AHEAD:
            # Steps in flight move the sequence on by an unknown number of rows; near the end of the context the next
            # width depends on it.
            moved = (self._launched - self._read) * self._width
            room = self.max_context - 1 - self.length - moved
            if moved and room < max(self._width, self._nodes):
                break
            if room < 1:
                break
            if self.mark:
                self.mark(True)
            self._replay_step(min(self._width, room), min(self._nodes, room))
            if self.mark:
                self.mark(False)
            self._launched += 1
        report = self._wait(self._read + 1)
        self._read += 1
        self.length = report.length
        return report

    def _replay_step(self, width: int, nodes: int) -> None:
        kind = f"tree of {nodes}" if nodes else "step"
        launch = partial(self.decode.launch, nodes=nodes, auto=self._auto)
        self.replay(f"automatic {kind}" if self._auto else kind, width, launch)

    def _wait(self, step: int) -> Report:
        if self._machine.device.type != "cuda":
            self._machine.synchronize()
        deadline = time.monotonic() + self._machine.deadline_ns * 1e-9
        while (report := read_report(self.decode.state, step)) is None:
            if time.monotonic() > deadline:
                self._machine.synchronize()  # raises when a kernel gave up
                deadline = time.monotonic() + 1
        return report

    def _drain(self) -> None:
        """Steps that were enqueued ahead of the end of a sequence must not meet the next one's inputs."""
        self._machine.synchronize()
        self._launched = self._read

    def replay(self, kind: str, rows: int, launch: Callable[[int], None]) -> None:
        """Enqueues what launch(rows) launches, as one graph on a GPU; `kind` names the launches."""
        if self._machine.device.type != "cuda":
            launch(rows)
            return
        if (kind, rows) not in self._graphs:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                launch(rows)
            self._graphs[kind, rows] = graph
        self._graphs[kind, rows].replay()
