"""One process per GPU for benchmarks over several ranks, with an end that comes by itself.

A worker is a function (machine, place, options, tell) of a module; tell(kind, content) sends what it has found so far
to the process that started it, so that a run which is cut off keeps what it had.
"""

import multiprocessing
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

from sgl_muse_mega.errors import UserError
from sgl_muse_mega.megakernel.cuda import DEADLINE_SECONDS, CudaMachine
from sgl_muse_mega.megakernel.machine import Machine
from sgl_muse_mega.megakernel.place import Place

Tell = Callable[[str, Any], None]
Worker = Callable[[Machine, Place, Any, Tell], None]


@dataclass(slots=True)
class Found:
    """told: of every rank what it said, in order, by kind. problems: why the run is not complete, if it is not."""

    told: list[list[tuple[str, Any]]]
    problems: list[str] = field(default_factory=list)

    def of(self, kind: str) -> list[list[Any]]:
        """What each rank said of this kind."""
        return [[content for said, content in rank if said == kind] for rank in self.told]


class Store:
    """The ranks' store, in the process that starts them: no rank is left without it when another has ended."""

    def __init__(self) -> None:
        self._store = _store(0, holds=True)
        self.port = int(self._store.port)


def client(port: int) -> Any:
    """A rank's end of the store."""
    return _store(port, holds=False)


def _store(port: int, *, holds: bool) -> Any:
    from torch.distributed import TCPStore

    return TCPStore("127.0.0.1", port, None, holds, timedelta(seconds=300), wait_for_workers=False)


def run_on_gpus(
    worker: Worker, options: Any, ranks: int, *, seconds: float, deadline: float = DEADLINE_SECONDS,
    show: Tell | None = None, defines: Sequence[str] = (),
) -> Found:  # fmt: skip
    """Runs the worker on GPUs 0 .. ranks - 1 for at most `seconds`, then ends what is left.

    deadline: of waits in the kernels. show: called for what rank 0 tells, as it comes. defines: macros for the kernels.
    """
    spawn, store, end = multiprocessing.get_context("spawn"), Store(), time.monotonic() + seconds
    found, processes, pipes = Found([[] for _ in range(ranks)]), [], {}
    for rank in range(ranks):
        here, there = spawn.Pipe(duplex=False)
        process = spawn.Process(
            target=_process, args=(worker, options, rank, ranks, store.port, deadline, defines, there), daemon=True
        )
        process.start()
        there.close()
        processes.append(process)
        pipes[here] = rank
    try:
        while pipes and (left := end - time.monotonic()) > 0:
            for pipe in wait(list(pipes), timeout=left):
                rank = pipes[pipe]  # type: ignore[index]
                try:
                    kind, content = pipe.recv()  # type: ignore[union-attr]
                except EOFError:
                    del pipes[pipe]  # type: ignore[arg-type]
                    processes[rank].join(10)
                    code = processes[rank].exitcode
                    if code and not any(text.startswith(f"rank {rank}: ") for text in found.problems):
                        found.problems.append(f"rank {rank} ended with code {code}")  # the others would wait for it
                    continue
                if kind == "problem":
                    found.problems.append(f"rank {rank}: {content}")
                else:
                    found.told[rank].append((kind, content))
                    if show and rank == 0:
                        show(kind, content)
            if found.problems:
                end = min(end, time.monotonic() + 3 * deadline)  # for the others' sentences
        if pipes and not found.problems:
            late = ", ".join(str(rank) for rank in pipes.values())
            found.problems.append(f"not done within {seconds:.0f} s: rank {late}")
    finally:
        for process in processes:
            process.join(10 if not found.problems else 0.1)
            if process.is_alive():
                process.kill()
                process.join(10)
    dead = [f"rank {rank} ended with code {p.exitcode}" for rank, p in enumerate(processes) if p.exitcode]
    found.problems += [] if found.problems else dead
    return found


def run_on_emulator(worker: Worker, options: Any, ranks: int, *, show: Tell | None = None) -> Found:
    """The same in threads of this process."""
    from sgl_muse_mega.emulator.rank_threads import RankThreads

    found = Found([[] for _ in range(ranks)])

    def work(machine: Machine, place: Place) -> None:
        def tell(kind: str, content: Any) -> None:
            found.told[place.rank].append((kind, content))
            if show and place.rank == 0:
                show(kind, content)

        worker(machine, place, options, tell)

    try:
        RankThreads(ranks, sms=2).run(work)
    except UserError as error:
        found.problems.append(str(error))
    return found


def _process(
    worker: Worker, options: Any, rank: int, ranks: int, port: int, deadline: float, defines: Sequence[str],
    answer: Connection,
) -> None:  # fmt: skip
    import torch

    from sgl_muse_mega.megakernel.peers import DECODE_ARENA_BYTES, PeerMemory, StoreGroup

    def tell(kind: str, content: Any) -> None:
        answer.send((kind, content))

    try:
        torch.cuda.set_device(rank)
        machine = CudaMachine(f"cuda:{rank}", deadline_seconds=deadline, defines=defines)
        group = StoreGroup(client(port), rank, ranks)
        from cuda.bindings import driver  # after torch has made the context

        peers = PeerMemory(group, driver, arena_bytes=DECODE_ARENA_BYTES)
        worker(machine, Place(peers.mail(), group), options, tell)
        machine.synchronize()
        peers.close()
    except Exception as error:  # whatever it is, the other processes must hear of it
        tell("problem", str(error))
