"""What the logs of a launch say: phases, waits, expert tasks and the flow of weights, warp by warp."""

import statistics
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from sgl_muse_mega.megakernel import protocol

POINT_NAMES = ("NOTHING", *protocol.POINTS, *protocol.LOG_POINTS)
SITE_NAMES = tuple(c.name for c in protocol.COUNTERS) + tuple(name for name, _ in protocol.SITES)
_CLOCK = 1 << 40  # nanoseconds wrap here (csrc/layer/trace.cuh)


@dataclass(frozen=True, slots=True)
class Slice:
    """A stretch of time of one warp, in ns from the trace's first event."""

    name: str
    start: int
    end: int


@dataclass(slots=True)
class WarpLog:
    """One warp in one launch. A phase is named after the point at its end."""

    cta: int
    warp: int
    phases: list[Slice] = field(default_factory=list)
    waits: list[Slice] = field(default_factory=list)  # named after the counter or site
    tasks: list[Slice] = field(default_factory=list)  # named after their number in the list of expert tasks
    issued: list[tuple[int, int]] = field(default_factory=list)  # (ns, bytes of weights)
    taken: list[int] = field(default_factory=list)  # ns, in the order of `issued` of the CTA's weight loader

    def waiting(self, phase: Slice) -> int:
        """ns of a phase spent in waits."""
        return sum(w.end - w.start for w in self.waits if phase.start <= w.start < phase.end)


@dataclass(slots=True)
class LaunchLog:
    """All warps of one launch; math warps come first, then the weight loader, the token loader, the routing warp."""

    math_warps: int
    warps: list[WarpLog]

    def of_warp(self, warp: int) -> list[WarpLog]:
        """That warp of every CTA, by CTA."""
        return [w for w in self.warps if w.warp == warp]

    @property
    def start(self) -> int:
        return min(p.start for w in self.warps for p in w.phases)

    @property
    def end(self) -> int:
        return max(p.end for w in self.warps for p in w.phases)

    def taken_up(self) -> list[tuple[int, int, str]]:
        """(ns, bytes, phase of the math warps) of every stage of weights, when math warp 0 had it."""
        found = []
        loaders = {w.cta: w for w in self.of_warp(self.math_warps)}
        for math in self.of_warp(0):
            phases = iter(math.phases)
            phase = next(phases, None)
            for (_, size), ns in zip(loaders[math.cta].issued, math.taken, strict=False):
                while phase and ns > phase.end:
                    phase = next(phases, None)
                found.append((ns, size, phase.name if phase else "END"))
        return sorted(found)


@dataclass(frozen=True, slots=True)
class PhaseSummary:
    """One phase over math warp 0 of all CTAs; times in us from the launch's start."""

    name: str
    first_start: float
    median_end: float
    last_end: float
    us: float  # between the median ends of the phase before and of this one
    waiting: float  # median
    bytes: int  # of weights taken up, and of keys and values in attention


def summarise(launch: LaunchLog, attention_bytes: int) -> list[PhaseSummary]:
    """Every phase of the math warps, in the order of the first CTA; one that a CTA leaves out is the others' alone."""
    warps = launch.of_warp(0)
    sizes: dict[str, int] = {"ATTENTION": attention_bytes}
    for _, size, name in launch.taken_up():
        sizes[name] = sizes.get(name, 0) + size
    found, before = [], 0.0
    for name in dict.fromkeys(phase.name for phase in warps[0].phases):
        mine = [(w, phase) for w in warps for phase in w.phases if phase.name == name]
        ends = [(p.end - launch.start) / 1e3 for _, p in mine]
        waiting = statistics.median(w.waiting(p) for w, p in mine) / 1e3
        start = min(p.start for _, p in mine) - launch.start
        end = statistics.median(ends)
        found.append(PhaseSummary(name, start / 1e3, end, max(ends), end - before, waiting, sizes.get(name, 0)))
        before = end
    return found


def read(words: npt.NDArray[np.int64], math_warps: int) -> list[LaunchLog]:
    """words [launches, CTAs, warps, LOG_WORDS], as `Step.trace` holds them. Launches without logs are left out.

    Raises ValueError when a log is full: its launch went on unseen.
    """
    if bool((words[..., -1] != 0).any()):
        raise ValueError("a warp's log is full")
    bits = words.astype(np.uint64)
    times = (bits >> np.uint64(24)).astype(np.int64)
    first = times[bits != 0]
    if first.size == 0:
        return []
    base = int(first[0])
    base += int(min(_signed(first - base)))
    launches = []
    for launch in range(words.shape[0]):
        warps = [
            _warp_log(cta, warp, list(_events(bits[launch, cta, warp], base)))
            for cta in range(words.shape[1])
            for warp in range(words.shape[2])
        ]
        logged = [w for w in warps if w.phases]
        if logged:
            launches.append(LaunchLog(math_warps, logged))
    return launches


def _signed(difference: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """A difference of two clock values, modulo the clock."""
    return (difference + _CLOCK // 2) % _CLOCK - _CLOCK // 2


def _events(log: npt.NDArray[np.uint64], base: int) -> Iterator[tuple[int, str, int]]:
    """(ns, point, value) in the order of the log."""
    for word in log[log != 0].tolist():
        yield ((word >> 24) - base) % _CLOCK, POINT_NAMES[word >> 16 & 0xFF], word & 0xFFFF


def _warp_log(cta: int, warp: int, events: list[tuple[int, str, int]]) -> WarpLog:
    log = WarpLog(cta, warp)
    last = task = wait = events[0][0] if events else 0
    for ns, point, value in events:
        if point == "WAIT":
            wait = ns
        elif point == "GO":
            log.waits.append(Slice(SITE_NAMES[value], wait, ns))
        elif point == "ISSUED":
            log.issued.append((ns, value * 16))
        elif point == "TAKEN":
            log.taken.append(ns)
        elif point == "TASK":
            log.tasks.append(Slice(str(value), task, ns))
            task = ns
        elif point == "START":
            last = ns
        else:
            log.phases.append(Slice(point, last, ns))
            last = task = ns
    return log
