"""This rank among those of SGLang's tensor parallelism, and its mailboxes."""

from typing import Any

import torch

from sgl_muse_mega.errors import UserError
from sgl_muse_mega.megakernel.peers import PeerMemory
from sgl_muse_mega.megakernel.place import Place


def place() -> tuple[int, int]:
    """(rank, ranks) of this process."""
    from sglang.srt.runtime_context import get_parallel

    parallel = get_parallel()
    return int(parallel.tp_rank), int(parallel.tp_size)


class ServerGroup:
    """The ranks' processes, over the group that SGLang has for messages between their hosts' memories."""

    def __init__(self, rank: int, ranks: int, group: Any) -> None:
        """group: a torch.distributed group on the CPU with all ranks in their order."""
        self.rank, self.ranks, self._group = rank, ranks, group

    def gather(self, value: bytes) -> list[bytes]:
        found: list[Any] = [None] * self.ranks
        try:
            torch.distributed.all_gather_object(found, value, group=self._group)
        except RuntimeError as error:
            raise UserError(
                f"Rank {self.rank} waited for the others while connecting and one did not come ({error}); look at the "
                "ranks' logs above."
            ) from error
        return found


def connect(rank: int, ranks: int, arena_bytes: int) -> tuple[PeerMemory, Place]:
    """Mailboxes that all ranks reach; all ranks must call it, each with its GPU's context current.

    Raises UserError on every rank when they cannot reach each other.
    """
    from cuda.bindings import driver
    from sglang.srt.runtime_context import get_parallel

    group = ServerGroup(rank, ranks, get_parallel().tp_group.cpu_group)
    memory = PeerMemory(group, driver, arena_bytes=arena_bytes)
    return memory, Place(memory.mail(), group)
