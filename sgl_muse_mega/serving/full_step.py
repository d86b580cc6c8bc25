"""A whole DFLASH step of one request over the server's caches: a launch and a graph's replay, no host in between.

The launch reads what the scheduler may change afterwards (the request's row of slots, its length, its anchor token);
the graph is draft, verify, accept, the draft's context and the result. SGLang's tables stay the only state: a step that
SGLang runs itself may come before and after any of these.
"""

import logging
import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sgl_muse_mega.megakernel.build import Progress, quiet
from sgl_muse_mega.megakernel.decode_loop import CHAIN
from sgl_muse_mega.megakernel.decode_request import request_words
from sgl_muse_mega.megakernel.decode_step import DecodeStep
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
        progress: Progress = quiet,
    ) -> None:
        """req_to_token int32 [requests, positions]; full_to_sliding int64: the sliding pool's slot of a full slot.

        plan: trees, of no more nodes than the width, for the server keeps no slots for more; or a chosen width. What a
        step learns goes on from request to request. timer: the first step replaces the plan's costs by times of its
        own. Raises UserError when the kernels cannot be compiled.
        """
        self._timer = timer
        self._decode, self._width, self._plan = decode, width, plan
        decode.take(plan)
        step = decode.step
        self._tables = LiveTables(
            step.machine, step.inputs, decode.state, window=step.config.sliding_window, req_to_token=req_to_token,
            full_to_sliding=full_to_sliding, progress=progress,
        )  # fmt: skip
        self.use(SamplingParams())
        if decode.draft:
            decode.draft.pages = step.inputs.full_pages  # the draft's cache has the target's full slots
        self._replay: Callable[[], None] = self._run

    def use(self, params: SamplingParams) -> None:
        """Enqueues a change of how tokens are chosen from the next step on."""
        words = torch.tensor(request_words(params, max_new_tokens=WITHOUT_END, max_context=WITHOUT_END))
        request = self._decode.state.request
        request.copy_(words.pin_memory() if request.is_cuda else words, non_blocking=True)

    def capture(self) -> None:
        """Captures the graph; on a machine without graphs the launches are made anew every time.

        All of it runs once before, for allocations and lazy initialisation: as a step of nobody, behind no context,
        whose rows go to slot 0.
        """
        device = self._decode.step.machine.device
        with torch.inference_mode():  # as SGLang's forwards, which may have made some of the tensors
            row, length, anchor = (torch.zeros(1, dtype=torch.int64, device=device) for _ in range(3))
            self._tables.launch_begin(row, length, anchor, self._result())
            self._run()
            if device.type == "cuda":
                torch.cuda.synchronize()
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    self._run()
                self._replay = graph.replay
            self._decode.take(self._plan)  # nothing is learnt from nobody

    def __call__(
        self, row: Tensor, length: Tensor, anchor: Tensor, tables_read: Callable[[], None] = lambda: None
    ) -> StepResult:
        """Enqueues a step behind `length` committed rows of the request in row `row`; each int64 [1].

        tables_read is called when everything is enqueued that reads the server's tables.
        """
        width, fresh = self._width, self._result()

        def begin() -> None:
            self._tables.launch_begin(row, length, anchor, fresh)

        if self._timer:
            self._measure(self._timer, begin)
            self._timer = None
        begin()
        tables_read()
        self._replay()
        committed = fresh[width : width + 1].view(torch.int32)[:1]  # the word's lower half
        return StepResult(fresh[:width], committed, fresh[-2:-1], fresh[-1:])

    def _result(self) -> Tensor:
        """The memory of a step's result, as csrc/server/step_end.cuh fills it."""
        return torch.empty(self._width + 3, dtype=torch.int64, device=self._decode.step.machine.device)

    def _measure(self, timer: Timer, begin: Callable[[], None]) -> None:
        """Costs from replays of the step that is to come, with so many rows that count.

        A step can be repeated: it writes behind the committed rows alone, where the real one writes again, and
        `begin` sets back what it reads. What it learns is set back here.
        """
        state, most = self._decode.state, self._plan.nodes or self._width
        learnt = state.calibration.clone()
        points = {}
        for rows in sorted({rows for rows in TIMED_ROWS if rows < most} | {most}):
            self._decode.take(replace(self._plan, cost=only(rows, most)))
            times = []
            for _ in range(WARM_UP + REPEATS):
                begin()
                times.append(timer(self._replay))
            points[rows] = statistics.median(times[WARM_UP:])
        self._plan = replace(self._plan, cost=interpolated(points, most))
        self._decode.take(self._plan)
        state.calibration.copy_(learnt)
        shown = ", ".join(f"{rows}: {ms:.3f}" for rows, ms in points.items())
        logger.info("Muse megakernel: ms of a step by the rows that count, measured on the first request: %s.", shown)

    def _run(self) -> None:
        plan = self._plan
        self._decode.launch(self._width, nodes=plan.nodes or 0, auto=plan.cost is not None)
        # The server's own steps verify chains through the same inputs.
        self._tables.launch_end(self._width, tree=plan.nodes is not None, restore=plan.learns)
