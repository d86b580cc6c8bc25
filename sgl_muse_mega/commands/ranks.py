"""A command over several GPUs: the process that was started is rank 0, and runs the same command once more for each of
the other ranks, without their output."""

import atexit
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import IO, TYPE_CHECKING

from sgl_muse_mega.errors import UserError
from sgl_muse_mega.megakernel.peers import DECODE_ARENA_BYTES, PeerMemory, StoreGroup
from sgl_muse_mega.megakernel.place import Place

if TYPE_CHECKING:
    from sgl_muse_mega.megakernel.cuda import CudaMachine

RANK, PORT = "SGL_MUSE_MEGA_RANK", "SGL_MUSE_MEGA_RANK_PORT"  # of a process that another one has started
CONNECT_SECONDS = 600.0  # ranks may compile and read weights first
GRACE_SECONDS = 10.0  # for the sentence of a rank that finds out by itself


class RankProcesses:
    """This process's rank and the processes of the others."""

    def __init__(self, ranks: int, arguments: Sequence[str]) -> None:
        """arguments: of the command, for the other ranks to run too. Raises UserError for a number that cannot be."""
        if ranks not in (2, 4, 8):
            raise UserError(f"Decoding can take 1, 2, 4 or 8 ranks, {ranks} were asked for; change --ranks.")
        self.ranks, self.rank = ranks, int(os.environ.get(RANK, "0"))
        self._children: list[tuple[subprocess.Popen[bytes], IO[bytes]]] = []
        self._peers: PeerMemory | None = None
        if self.rank > 0:
            self._port = int(os.environ[PORT])
            return
        self._port = _free_port()
        command = [sys.executable, "-m", "sgl_muse_mega.cli", *(a for a in arguments if a != "--save")]
        for rank in range(1, ranks):
            environment = {**os.environ, RANK: str(rank), PORT: str(self._port)}
            said = tempfile.TemporaryFile()  # noqa: SIM115 - read when the process ends
            child = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=said)
            self._children.append((child, said))
        atexit.register(self.stop)

    def connect(self) -> tuple["CudaMachine", Place]:
        """This rank's GPU, which has the rank's number, and its place among the others.

        Raises UserError, on all ranks, when they cannot reach each other.
        """
        import torch
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        from sgl_muse_mega.megakernel.cuda import CudaMachine

        if torch.cuda.device_count() < self.ranks:
            raise UserError(
                f"{self.ranks} ranks need as many GPUs and this machine shows {torch.cuda.device_count()}; change "
                "--ranks or CUDA_VISIBLE_DEVICES."
            )
        threading.Thread(target=self.watch, daemon=True).start()
        torch.cuda.set_device(self.rank)
        machine = CudaMachine(f"cuda:{self.rank}")
        timeout = timedelta(seconds=CONNECT_SECONDS)
        group = StoreGroup(
            TCPStore("127.0.0.1", self._port, self.ranks, self.rank == 0, timeout), self.rank, self.ranks
        )
        from cuda.bindings import driver  # after torch has made the context

        self._peers = PeerMemory(group, driver, arena_bytes=DECODE_ARENA_BYTES)
        return machine, Place(self._peers.mail(), group)

    def close(self) -> None:
        """After the last launch, on every rank: memory is given back when nobody writes to it any more."""
        if self._peers:
            self._peers.close()
        for child, _ in self._children:
            child.wait(timeout=60)

    def watch(self, grace: float = GRACE_SECONDS) -> None:
        """Ends this process, and with it the command, some seconds after another rank has failed: this one may wait for
        it where nothing else can wake it up."""
        while all(child.poll() in (None, 0) for child, _ in self._children):
            time.sleep(0.2)
        time.sleep(grace)
        self.stop()
        os._exit(2)

    def stop(self) -> None:
        """Ends what still runs; a rank that misses others would only do so at its deadline. Of a rank that failed the
        last lines are shown."""
        for rank, (child, said) in enumerate(self._children, start=1):
            if child.poll() is None:
                child.kill()
                child.wait()
            elif child.returncode:
                said.seek(0)
                lines = said.read().decode(errors="replace").strip().splitlines()[-3:]
                print("\n".join(f"Rank {rank}: {line}" for line in lines), file=sys.stderr)


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
