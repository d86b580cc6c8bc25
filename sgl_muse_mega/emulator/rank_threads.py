"""Several emulated ranks as a program sees them: one thread per rank, each with a machine of its own.

A thread that waits for its machine waits for all: when the last has come, the launches of all ranks run together.
"""

import contextlib
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from torch import Tensor
from torch.distributed import HashStore  # type: ignore[attr-defined]

from sgl_muse_mega.emulator.machine import PLAIN, Region, Schedule, machine
from sgl_muse_mega.emulator.stepper import EmulatedRanks, Emulator, declared_regions, step_regions
from sgl_muse_mega.megakernel.peers import StoreGroup
from sgl_muse_mega.megakernel.place import Place
from sgl_muse_mega.megakernel.step import Step

T = TypeVar("T")
PATIENCE_SECONDS = 300.0  # that a thread waits for the others


class RankEmulator(Emulator):
    """The machine of one rank's thread."""

    def __init__(self, owner: "RankThreads", sms: int, sources: Path | None, rank: int) -> None:
        super().__init__(sms, PLAIN, sources, rank)
        self._owner = owner

    def declare(
        self,
        memory: Sequence[tuple[str, Tensor, bool, bool]],
        step: Step | None = None,
        caches: Sequence[tuple[Tensor, Tensor]] = (),
    ) -> None:
        self._owner.declare(self.rank, declared_regions(memory, step, caches))

    def attach(self, step: Step, caches: list[tuple[Tensor, Tensor]]) -> None:
        self._owner.declare(self.rank, step_regions(step, caches))

    def synchronize(self) -> None:
        """Waits for all ranks' launches. Raises, on every rank, what stopped them."""
        self._owner.meet()


class RankThreads(EmulatedRanks):
    """The ranks, and what their threads run."""

    def __init__(
        self,
        ranks: int,
        sms: int = 3,
        schedule: Schedule = PLAIN,
        sources: Path | None = None,
        session: int = 1,
        arena_bytes: int = 1 << 23,
    ) -> None:
        super().__init__(ranks, sms, schedule, sources, session, arena_bytes)
        self.machines = [RankEmulator(self, sms, sources, rank) for rank in range(ranks)]
        self._regions: dict[int, list[Region]] = {}
        self._new_regions = False
        self._failure: Exception | None = None
        # The machine always runs in the thread of `run`'s caller: its fibers belong to one thread.
        self._met, self._done = threading.Barrier(ranks + 1), threading.Barrier(ranks + 1)

    def run(self, work: Callable[[RankEmulator, Place], T]) -> list[T]:
        """work(machine, place) of every rank, each in its thread; raises the first exception of any."""
        store, ranks = HashStore(), len(self.machines)
        mails = [self.mail(rank) for rank in range(ranks)]
        self._met.reset()
        self._done.reset()
        left = ranks

        def one(rank: int) -> T:
            nonlocal left
            try:
                place = Place(mails[rank], StoreGroup(store, rank, ranks))
                result = work(self.machines[rank], place)  # type: ignore[arg-type]
            except BaseException:
                self._met.abort()
                raise
            with lock:
                left -= 1
                if left == 0:
                    self._met.abort()  # nobody will come
            return result

        lock = threading.Lock()
        with ThreadPoolExecutor(ranks) as pool:
            tasks = [pool.submit(one, rank) for rank in range(ranks)]
            with contextlib.suppress(threading.BrokenBarrierError):
                while True:
                    self._met.wait(PATIENCE_SECONDS)
                    self._run_all()
                    self._done.wait(PATIENCE_SECONDS)
            self._done.abort()
        failures = [e for task in tasks if (e := task.exception())]
        for failure in sorted(failures, key=lambda e: isinstance(e, threading.BrokenBarrierError)):
            raise failure
        return [task.result() for task in tasks]

    def declare(self, rank: int, regions: Sequence[Region]) -> None:
        """All memory that this rank's launches may touch."""
        self._regions[rank] = [replace(r, name=f"rank {rank} {r.name}") for r in regions]
        self._new_regions = True

    def meet(self) -> None:
        """By a rank's thread: returns when the launches of all ranks have run. Raises what stopped them."""
        self._met.wait(PATIENCE_SECONDS)
        self._done.wait(PATIENCE_SECONDS)
        if self._failure:
            raise self._failure

    def _run_all(self) -> None:
        self._failure = None
        try:
            if self._new_regions:
                machine().use([region for rank in sorted(self._regions) for region in self._regions[rank]])
                self._new_regions = False
            self.synchronize()
        except Exception as failure:  # every rank's thread raises it
            self._failure = failure
