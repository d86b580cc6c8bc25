"""Times of decode steps and of their parts, by events on the stream round each of them."""

from collections.abc import Callable

import torch

from sgl_muse_mega.megakernel.decode_loop import DecodeLoop
from sgl_muse_mega.megakernel.decode_request import Report

WARM_UP = 3


def timed_replays(graph: torch.cuda.CUDAGraph, repeats: int) -> list[float]:
    """us of each of `repeats` replays, after `WARM_UP` others; every one begins when the one before has ended."""
    times = []
    for _ in range(WARM_UP + repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3)
    return times[WARM_UP:]


def timed_steps(
    loop: DecodeLoop, steps: int, *, warm_up: int = WARM_UP, check: Callable[[Report], None] | None = None
) -> tuple[list[float], list[float]]:
    """us of each step, and us between the end of one and the begin of the next while the host reads every report.

    The loop's sequence has begun; `steps` reports are read, and the first `warm_up` steps are left out. check(report)
    may raise. Needs a GPU. Raises UserError with the sentence of a kernel that gave up.
    """
    marks: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def mark(before: bool) -> None:
        if before:
            marks.append((torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)))
        marks[-1][0 if before else 1].record()

    loop.mark = mark
    for _ in range(steps):
        report = loop.next_step()
        if check:
            check(report)
    loop.mark = None
    loop.decode.step.machine.synchronize()
    lasted = [start.elapsed_time(end) * 1e3 for start, end in marks[warm_up:]]
    between = [marks[i][1].elapsed_time(marks[i + 1][0]) * 1e3 for i in range(warm_up, len(marks) - 1)]
    return lasted, between
