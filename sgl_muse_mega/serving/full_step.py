"""A whole DFLASH step of one request over the server's caches: two graph replays, no host in between.

The first reads what the scheduler may change afterwards (the request's row of slots, its length, its anchor token); the
second is draft, verify, accept and the draft's context. SGLang's tables stay the only state: a step that SGLang runs
itself may come before and after any of these.
"""

import logging
import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sgl_muse_mega.megakernel.decode_loop import CHAIN
from sgl_muse_mega.megakernel.decode_request import request_words
from sgl_muse_mega.megakernel.decode_step import DecodeStep
from sgl_muse_mega.megakernel.draft_protocol import STATE
from sgl_muse_mega.megakernel.scratch import chain_ancestors
from sgl_muse_mega.serving.tables import LiveTables
from sgl_muse_mega.speculative.rows import RowPlan
from sgl_muse_mega.speculative.sampling import SamplingParams
from sgl_muse_mega.speculative.width import interpolated, only

logger = logging.getLogger(__name__)

TIMED_ROWS = (1, 2, 4, 8, 16)
REPEATS, WARM_UP = 20, 3

Timer = Callable[[Callable[[], None]], float]
"""Runs what it is given; ms."""

WITHOUT_END = 2**62  # the server decides when a text ends


@dataclass(frozen=True, slots=True)
class StepResult:
    """Fresh tensors, so that nothing a later step writes is under a copy that is still to come."""

    tokens: Tensor  # int64 [width]: the first `committed` are the step's
    committed: Tensor  # int32 [1], 1 .. width
    anchor: Tensor  # int64 [1], the last of them
    length: Tensor  # int64 [1], committed rows afterwards


class FullStep:
    """Steps of `width` rows; `decode`'s target and draft are bound to the server's caches."""

    def __init__(
        self,
        decode: DecodeStep,
        *,
        width: int,
        req_to_token: Tensor,
        full_to_sliding: Tensor | None,
        plan: RowPlan = CHAIN,
        timer: Timer | None = None,
    ) -> None:
        """req_to_token int32 [requests, positions]; full_to_sliding int64: the sliding pool's slot of a full slot.

        plan: trees, of no more nodes than the width, for the server keeps no slots for more; or a chosen width. What a
        step learns goes on from request to request. timer: the first step replaces the plan's costs by times of its
        own.
        """
        self._timer = timer
        self._decode, self._width, self._plan = decode, width, plan
        decode.take(plan)
        self._req_to_token, self._full_to_sliding = req_to_token, full_to_sliding
        step = decode.step
        device, row_cap = step.machine.device, step.instance.row_cap
        self._tables = LiveTables(step.inputs, window=step.config.sliding_window)
        self._row, self._length, self._anchor = (torch.zeros(1, dtype=torch.int64, device=device) for _ in range(3))
        self._offsets = torch.arange(row_cap, device=device)
        self._chain = chain_ancestors(row_cap).to(device)
        self._result = torch.zeros(width + 3, dtype=torch.int64, device=device)
        self.use(SamplingParams())
        if decode.draft:
            decode.draft.pages = step.inputs.full_pages  # the draft's cache has the target's full slots
        self._replays: list[Callable[[], None]] = []

    def use(self, params: SamplingParams) -> None:
        """Enqueues a change of how tokens are chosen from the next step on."""
        words = torch.tensor(request_words(params, max_new_tokens=WITHOUT_END, max_context=WITHOUT_END))
        request = self._decode.state.request
        request.copy_(words.pin_memory() if request.is_cuda else words, non_blocking=True)

    def capture(self) -> None:
        """Captures both graphs; on a machine without graphs the launches are made anew every time.

        Each part runs once before, for allocations and lazy initialisation: as a step of nobody, behind no context,
        whose rows go to slot 0.
        """
        with torch.inference_mode():  # as SGLang's forwards, which may have made some of the tensors
            for part in (self._prepare, self._run):
                part()
                if self._decode.step.machine.device.type != "cuda":
                    self._replays.append(part)
                    continue
                torch.cuda.synchronize()
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    part()
                self._replays.append(graph.replay)
            self._decode.take(self._plan)  # nothing is learnt from nobody

    def __call__(
        self, row: Tensor, length: Tensor, anchor: Tensor, tables_read: Callable[[], None] = lambda: None
    ) -> StepResult:
        """Enqueues a step behind `length` committed rows of the request in row `row`; each int64 [1].

        tables_read is called when everything is enqueued that reads the server's tables.
        """
        for static, value in ((self._row, row), (self._length, length), (self._anchor, anchor)):
            static.copy_(value)
        if self._timer:
            self._measure(self._timer)
            self._timer = None
        self._replays[0]()
        tables_read()
        self._replays[1]()
        fresh = self._result.clone()
        width = self._width
        return StepResult(fresh[:width], fresh[width : width + 1].to(torch.int32), fresh[-2:-1], fresh[-1:])

    def _measure(self, timer: Timer) -> None:
        """Costs from replays of the step that is to come, with so many rows that count.

        A step can be repeated: it writes behind the committed rows alone, where the real one writes again, and
        `_prepare` sets back what it reads. What it learns is set back here.
        """
        state, most = self._decode.state, self._plan.nodes or self._width
        learnt = state.calibration.clone()
        points = {}
        for rows in sorted({rows for rows in TIMED_ROWS if rows < most} | {most}):
            self._decode.take(replace(self._plan, cost=only(rows, most)))
            times = []
            for _ in range(WARM_UP + REPEATS):
                self._replays[0]()
                times.append(timer(self._replays[1]))
            points[rows] = statistics.median(times[WARM_UP:])
        self._plan = replace(self._plan, cost=interpolated(points, most))
        self._decode.take(self._plan)
        state.calibration.copy_(learnt)
        shown = ", ".join(f"{rows}: {ms:.3f}" for rows, ms in points.items())
        logger.info("Muse megakernel: ms of a step by the rows that count, measured on the first request: %s.", shown)

    def _prepare(self) -> None:
        inputs = self._decode.step.inputs
        inputs.length.copy_(self._length)
        inputs.token_ids[:1].copy_(self._anchor)
        self._tables.copy(self._req_to_token, self._row, self._full_to_sliding)
        positions = self._offsets + self._length
        inputs.positions.copy_(positions)
        inputs.full_slots.copy_(inputs.full_pages[positions])
        inputs.sliding_slots.copy_(inputs.sliding_pages[positions])
        self._decode.state.state.zero_()

    def _run(self) -> None:
        decode, width, plan = self._decode, self._width, self._plan
        decode.launch(width, nodes=plan.nodes or 0, auto=plan.cost is not None)
        # The accept launch leaves the new anchor in row 0 and the drafts behind it.
        inputs, committed = decode.step.inputs, decode.state.state[STATE.index("COMMITTED")].reshape(1)
        if plan.nodes is None:
            self._result[: width - 1].copy_(inputs.token_ids[1:width])
        else:
            torch.index_select(inputs.token_ids, 0, decode.state.path[1:width], out=self._result[: width - 1])
        if plan.learns:  # the server's own steps verify chains through the same inputs
            inputs.ancestors.copy_(self._chain)
            inputs.live.fill_(len(self._chain))
        self._result.index_copy_(0, (committed - 1).clamp_(min=0), inputs.token_ids[:1])
        self._result[width : width + 1].copy_(committed)
        self._result[-2:-1].copy_(inputs.token_ids[:1])
        self._result[-1:].copy_(inputs.length)
