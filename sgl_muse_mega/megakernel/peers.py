"""Mailboxes of ranks in several processes: an arena per GPU, exchanged as CUDA IPC handles on one host and as fabric
handles where the ranks run on several hosts of one NVLink domain.

The arenas are the driver's own allocations, not torch's: what torch's allocator is configured to do (expandable
segments, for one) does not touch them.
"""

import os
import secrets
import socket
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Protocol

import torch
from torch import Tensor

from sgl_muse_mega.errors import UserError
from sgl_muse_mega.megakernel.driver import checked
from sgl_muse_mega.megakernel.mailbox import SharedMail
from sgl_muse_mega.megakernel.peer_handles import (
    FabricHandles,
    Handles,
    IpcHandles,
    Unopened,
    supports_fabric,
)

ARENA_BYTES = 64 << 20  # for the layers of the target
DECODE_ARENA_BYTES = 160 << 20  # for whole decode steps: rows of logits are the largest part
_MASK = 2**64 - 1


class Group(Protocol):
    """The processes of all ranks."""

    @property
    def rank(self) -> int: ...

    @property
    def ranks(self) -> int: ...

    def gather(self, value: bytes) -> list[bytes]:
        """What every rank gave, in rank order; returns when all have given. Raises UserError when one does not."""


class StoreGroup:
    """A group over a torch.distributed store (TCPStore, FileStore); each gather has keys of its own."""

    def __init__(self, store: Any, rank: int, ranks: int, name: str = "sgl-muse-mega") -> None:
        self.rank, self.ranks = rank, ranks
        self._store, self._name, self._turn = store, name, 0

    def gather(self, value: bytes) -> list[bytes]:
        self._turn += 1
        keys = [f"{self._name}.{self._turn}.{rank}" for rank in range(self.ranks)]
        self._store.set(keys[self.rank], value)
        found = []
        for rank, key in enumerate(keys):
            try:
                found.append(bytes(self._store.get(key)))
            except RuntimeError as error:
                raise UserError(
                    f"Rank {self.rank} waited for rank {rank} while connecting and it did not come; look at that "
                    "rank's output."
                ) from error
        return found


@dataclass(frozen=True, slots=True)
class Identity:
    """What a rank says of itself before anything is shared."""

    rank: int
    ranks: int
    host: str
    process: int
    device: str  # UUID in hexadecimal
    bus: str  # PCI bus id
    name: str
    arena_bytes: int
    session: int
    fabric: int = 0  # whether its memory can be shared by fabric handles

    def pack(self) -> bytes:
        return "\n".join(str(getattr(self, name)) for name in self.__slots__).encode()

    @classmethod
    def unpack(cls, text: bytes) -> "Identity":
        rank, ranks, host, process, device, bus, name, arena, session, fabric = text.decode().split("\n")
        return cls(int(rank), int(ranks), host, int(process), device, bus, name, int(arena), int(session), int(fabric))


def reasons_against(identities: Sequence[Identity]) -> list[str]:
    """Why these ranks cannot exchange, as far as what they say of themselves tells."""
    found = []
    places = [(i, identity) for i, identity in enumerate(identities)]
    found += [
        f"the process at place {i} says that it is rank {identity.rank} of {identity.ranks}"
        for i, identity in places
        if (identity.rank, identity.ranks) != (i, len(identities))
    ]
    found += [
        f"rank {i} runs on a slice of a partitioned GPU ({identity.name}), which reaches no other"
        for i, identity in places
        if "MIG" in identity.name
    ]
    without = [str(i) for i, identity in places if not identity.fabric]
    if several_hosts(identities) and without:
        hosts = ", ".join(sorted({identity.host for identity in identities}))
        found.append(
            f"the ranks run on several hosts ({hosts}), which IPC handles do not reach, and rank {', '.join(without)} "
            "has no fabric handles"
        )
    devices = Counter(identity.device for identity in identities)
    for device, count in devices.items():
        if count > 1:
            sharing = [str(i) for i, identity in places if identity.device == device]
            found.append(f"ranks {' and '.join(sharing)} share one GPU ({identities[int(sharing[0])].bus})")
    if len({identity.arena_bytes for identity in identities}) > 1:
        sizes = ", ".join(str(identity.arena_bytes) for identity in identities)
        found.append(f"the ranks' arenas have different sizes ({sizes} bytes)")
    return found


def several_hosts(identities: Sequence[Identity]) -> bool:
    return len({identity.host for identity in identities}) > 1


class Arena:
    """Device memory that torch can look into (CUDA array interface)."""

    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (size,), "typestr": "|u1", "data": (address, False), "version": 3, "strides": None,
        }  # fmt: skip


def cuda_bytes(address: int, size: int) -> Tensor:
    """uint8 [size] over device memory that somebody else keeps."""
    return torch.as_tensor(Arena(address, size), device="cuda")


class PeerMemory:
    """This rank's arena and where it reaches the arenas of the others, checked by writing and reading both ways.

    Every rank must create it at the same time, and close it at the same time.
    """

    def __init__(
        self,
        group: Group,
        driver: Any,
        *,
        arena_bytes: int = ARENA_BYTES,
        as_tensor: Callable[[int, int], Tensor] = cuda_bytes,
    ) -> None:
        """driver: cuda.bindings.driver, with this rank's context current.

        Raises UserError with one sentence, on every rank, when the ranks cannot reach each other.
        """
        self._group, self._driver = group, driver
        self._opened: dict[int, int] = {}
        self._own = 0
        self._device = int(checked(driver.cuCtxGetDevice(), "name the device"))
        mine = self._identity(arena_bytes)
        identities = [Identity.unpack(text) for text in group.gather(mine.pack())]
        self._handles: Handles = IpcHandles(driver)
        reasons = reasons_against(identities)
        if several_hosts(identities):
            self._handles = FabricHandles(driver, self._device)
        else:
            reasons = reasons or self._unreachable(identities)
        self._agree(reasons)
        self.session = identities[0].session
        self._bytes = arena_bytes
        try:
            self._allocate(as_tensor)
            self._agree(self._open())
            self._agree(self._check())
        except BaseException:
            self._release()
            raise

    def mail(self) -> SharedMail:
        """This rank's place among the ranks; mailboxes are taken from the beginning of the arenas."""
        reached = [self._own if rank == self._group.rank else self._opened[rank] for rank in range(self._group.ranks)]
        return SharedMail(self._arena, reached, self._group.rank, self.session)

    def close(self) -> None:
        """Gives the memory back once no rank can still write to it."""
        checked(self._driver.cuCtxSynchronize(), "finish")
        self._group.gather(b"done")
        self._release()

    def __enter__(self) -> "PeerMemory":
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        if kind is None:
            self.close()
        else:
            self._release()  # the others may be gone: nobody waits

    # ---- steps of connecting ----

    def _identity(self, arena_bytes: int) -> Identity:
        driver, device = self._driver, self._device
        return Identity(
            rank=self._group.rank,
            ranks=self._group.ranks,
            host=socket.gethostname(),
            process=os.getpid(),
            device=bytes(checked(driver.cuDeviceGetUuid(device), "name the device").bytes).hex(),
            bus=_text(checked(driver.cuDeviceGetPCIBusId(32, device), "name the device")),
            name=_text(checked(driver.cuDeviceGetName(128, device), "name the device")),
            arena_bytes=arena_bytes,
            session=secrets.randbits(31) | 1,
            fabric=int(supports_fabric(driver, device)),
        )

    def _unreachable(self, identities: Sequence[Identity]) -> list[str]:
        """Peers that this process sees and the driver says it cannot access; one it does not see shows when opened."""
        driver = self._driver
        found = []
        for rank, identity in enumerate(identities):
            if rank == self._group.rank:
                continue
            code, *devices = driver.cuDeviceGetByPCIBusId(identity.bus.encode())
            if int(code) != 0:
                continue
            if not checked(driver.cuDeviceCanAccessPeer(self._device, devices[0]), "ask for peer access"):
                found.append(
                    f"GPU {identities[self._group.rank].bus} of rank {self._group.rank} has no peer access to GPU "
                    f"{identity.bus} of rank {rank}"
                )
        return found

    def _allocate(self, as_tensor: Callable[[int, int], Tensor]) -> None:
        self._own = self._handles.allocate(self._bytes)
        checked(self._driver.cuMemsetD8(self._own, 0, self._bytes), "clear the mailboxes")
        checked(self._driver.cuCtxSynchronize(), "clear the mailboxes")
        self._arena = as_tensor(self._own, self._bytes)

    def _open(self) -> list[str]:
        me, found = self._group.rank, []
        for rank, shared in enumerate(self._group.gather(self._handles.share())):
            if rank == me:
                continue
            try:
                self._opened[rank] = self._handles.open(shared)
            except Unopened as why:
                found.append(f"rank {me} cannot open the mailboxes of rank {rank} {why}")
        return found

    def _check(self) -> list[str]:
        """Every rank writes a word into every arena and reads it back there; then all look what came to them."""
        me, ranks = self._group.rank, self._group.ranks
        reached = {**self._opened, me: self._own}
        for rank in range(ranks):
            self._write(reached[rank] + 8 * me, self._word(me, rank))
        checked(self._driver.cuCtxSynchronize(), "write to the other ranks' mailboxes")
        self._group.gather(b"written")
        found = [
            f"what rank {source} wrote to rank {me} did not arrive"
            for source in range(ranks)
            if self._read(self._own + 8 * source) != self._word(source, me)
        ]
        found += [
            f"rank {me} does not read back what rank {source} wrote to rank {rank}"
            for rank in range(ranks)
            for source in range(ranks)
            if self._read(reached[rank] + 8 * source) != self._word(source, rank)
        ]
        self._group.gather(b"read")
        checked(self._driver.cuMemsetD8(self._own, 0, 8 * ranks), "clear the mailboxes")
        checked(self._driver.cuCtxSynchronize(), "clear the mailboxes")
        return found

    def _word(self, source: int, rank: int) -> int:
        return (self.session * 0x9E3779B97F4A7C15 + source * 0x100 + rank + 1) & _MASK

    def _write(self, address: int, word: int) -> None:
        data = word.to_bytes(8, "little")
        checked(self._driver.cuMemcpyHtoD(address, data, 8), "write to another rank's mailboxes")

    def _read(self, address: int) -> int:
        data = bytearray(8)
        checked(self._driver.cuMemcpyDtoH(data, address, 8), "read another rank's mailboxes")
        return int.from_bytes(data, "little")

    def _agree(self, reasons: Sequence[str]) -> None:
        """Raises the same UserError on all ranks when any of them has a reason."""
        everybody = [text.decode() for text in self._group.gather("\n".join(reasons).encode())]
        all_reasons = list(dict.fromkeys(line for text in everybody for line in text.split("\n") if line))
        if all_reasons:
            raise UserError("The ranks cannot exchange rows: " + "; ".join(all_reasons) + ".")

    def _release(self) -> None:
        for address in self._opened.values():
            self._handles.close(address)
        self._opened.clear()
        self._handles.free()
        self._own = 0


def _text(value: Any) -> str:
    """A driver's C string."""
    return bytes(value).split(b"\0")[0].decode()
