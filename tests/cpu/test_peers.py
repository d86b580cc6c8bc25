"""Connecting ranks: a driver that only remembers, one thread per rank, and what must be refused."""

import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed import HashStore

from sgl_muse_mega.errors import UserError
from sgl_muse_mega.megakernel.peer_handles import FabricHandles
from sgl_muse_mega.megakernel.peers import Identity, PeerMemory, StoreGroup, reasons_against

ARENA = 4096


class Code(int):
    name = "CUDA_SUCCESS"


GOOD, BAD = Code(0), Code(1)
BAD.name = "CUDA_ERROR_INVALID_VALUE"


@dataclass
class World:
    """Several GPUs. lost: (source, rank) whose writes do not arrive; apart: pairs without peer access."""

    names: list[str]
    uuids: list[bytes]
    lost: set[tuple[int, int]] = field(default_factory=set)
    apart: set[tuple[int, int]] = field(default_factory=set)
    closed: set[tuple[int, int]] = field(default_factory=set)  # (rank, owner) that cannot be opened
    hosts: list[str] = field(default_factory=list)  # by rank; none: all on one
    hidden: bool = False  # processes see their own GPU only
    fabric: set[int] = field(default_factory=set)  # ranks whose GPU has fabric handles
    unmappable: set[tuple[int, int]] = field(default_factory=set)  # (rank, owner) that can be opened but not mapped
    memory: dict[int, bytearray] = field(default_factory=dict)  # by rank
    allocated: int = 0
    mapped: int = 0
    reserved: int = 0
    imported: int = 0


class FakeDriver:
    """The part of cuda.bindings.driver that connecting uses, as rank `rank` of a world sees it."""

    CUipcMem_flags = SimpleNamespace(CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS=1)

    def __init__(self, world: World, rank: int) -> None:
        self.world, self.rank = world, rank
        self._reserved = 0
        self._owners: dict[int, int] = {}  # by address that an allocation is mapped at

    CUmemAllocationType = SimpleNamespace(CU_MEM_ALLOCATION_TYPE_PINNED=1)
    CUmemLocationType = SimpleNamespace(CU_MEM_LOCATION_TYPE_DEVICE=1)
    CUmemAllocationHandleType = SimpleNamespace(CU_MEM_HANDLE_TYPE_FABRIC=8)
    CUmemAllocationGranularity_flags = SimpleNamespace(CU_MEM_ALLOC_GRANULARITY_MINIMUM=0)
    CUmemAccess_flags = SimpleNamespace(CU_MEM_ACCESS_FLAGS_PROT_READWRITE=3)
    CUdevice_attribute = SimpleNamespace(CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED=128)

    def CUmemAllocationProp(self) -> Any:
        return SimpleNamespace(location=SimpleNamespace())

    def CUmemAccessDesc(self) -> Any:
        return SimpleNamespace(location=SimpleNamespace())

    def CUmemFabricHandle(self) -> Any:
        handle = SimpleNamespace(data=bytes(64))
        handle.getPtr = lambda: handle
        return handle

    def cuDeviceGetAttribute(self, attribute: int, device: int) -> tuple[Any, ...]:
        assert attribute == 128
        return GOOD, int(device in self.world.fabric)

    def cuMemGetAllocationGranularity(self, properties: Any, option: int) -> tuple[Any, ...]:
        assert (properties.type, properties.location.type, properties.location.id) == (1, 1, self.rank)
        return GOOD, 3 * ARENA  # no divisor of what is asked for

    def cuMemCreate(self, size: int, properties: Any, flags: int) -> tuple[Any, ...]:
        assert properties.requestedHandleTypes == 8
        assert size == 3 * ARENA
        self.world.memory[self.rank] = bytearray(b"\xaa" * size)
        self.world.allocated += 1
        return GOOD, SimpleNamespace(owner=self.rank)

    def cuMemRelease(self, allocation: Any) -> tuple[Any, ...]:
        if allocation.owner == self.rank:
            self.world.allocated -= 1
        else:
            self.world.imported -= 1
        return (GOOD,)

    def cuMemAddressReserve(self, size: int, alignment: int, address: int, flags: int) -> tuple[Any, ...]:
        self.world.reserved += 1
        self._reserved += 1
        return GOOD, ((self.rank + 1) << 40) + (1 << 39) + (self._reserved << 32)

    def cuMemAddressFree(self, address: int, size: int) -> tuple[Any, ...]:
        self.world.reserved -= 1
        return (GOOD,)

    def cuMemMap(self, address: int, size: int, offset: int, allocation: Any, flags: int) -> tuple[Any, ...]:
        assert size == 3 * ARENA
        if (self.rank, allocation.owner) in self.world.unmappable:
            return (BAD,)
        self.world.mapped += 1
        self._owners[address] = allocation.owner
        return (GOOD,)

    def cuMemSetAccess(self, address: int, size: int, access: list[Any], count: int) -> tuple[Any, ...]:
        assert (access[0].location.id, access[0].flags, count) == (self.rank, 3, 1)
        return (GOOD,)

    def cuMemUnmap(self, address: int, size: int) -> tuple[Any, ...]:
        self.world.mapped -= 1
        return (GOOD,)

    def cuMemExportToShareableHandle(self, allocation: Any, kind: int, flags: int) -> tuple[Any, ...]:
        assert (allocation.owner, kind) == (self.rank, 8)
        return GOOD, SimpleNamespace(data=bytes([self.rank]).ljust(64, b"f"))

    def cuMemImportFromShareableHandle(self, handle: Any, kind: int) -> tuple[Any, ...]:
        assert (len(handle.data), kind) == (64, 8)
        owner = handle.data[0]
        if (self.rank, owner) in self.world.closed:
            return (BAD,)
        self.world.imported += 1
        return GOOD, SimpleNamespace(owner=owner)

    def CUipcMemHandle(self) -> Any:
        return SimpleNamespace(reserved=bytes(64))

    def cuCtxGetDevice(self) -> tuple[Any, ...]:
        return GOOD, self.rank

    def cuCtxSynchronize(self) -> tuple[Any, ...]:
        return (GOOD,)

    def cuDeviceGetUuid(self, device: int) -> tuple[Any, ...]:
        return GOOD, SimpleNamespace(bytes=self.world.uuids[device])

    def cuDeviceGetPCIBusId(self, size: int, device: int) -> tuple[Any, ...]:
        return GOOD, f"0000:{device:02x}:00.0".encode().ljust(size, b"\0")

    def cuDeviceGetName(self, size: int, device: int) -> tuple[Any, ...]:
        return GOOD, self.world.names[device].encode().ljust(size, b"\0")

    def cuDeviceGetByPCIBusId(self, bus: bytes) -> tuple[Any, ...]:
        return (BAD,) if self.world.hidden else (GOOD, int(bus.split(b":")[1], 16))

    def cuDeviceCanAccessPeer(self, device: int, peer: int) -> tuple[Any, ...]:
        return GOOD, int((device, peer) not in self.world.apart)

    def cuMemAlloc(self, size: int) -> tuple[Any, ...]:
        self.world.memory[self.rank] = bytearray(b"\xaa" * size)
        self.world.allocated += 1
        return GOOD, self._address(self.rank)

    def cuMemFree(self, address: int) -> tuple[Any, ...]:
        self.world.allocated -= 1
        return (GOOD,)

    def cuIpcGetMemHandle(self, address: int) -> tuple[Any, ...]:
        return GOOD, SimpleNamespace(reserved=bytes([self.rank]).ljust(64, b"\0"))

    def cuIpcOpenMemHandle(self, handle: Any, flags: int) -> tuple[Any, ...]:
        owner = handle.reserved[0]
        if (self.rank, owner) in self.world.closed:
            return (BAD,)
        self.world.mapped += 1
        return GOOD, self._address(owner)

    def cuIpcCloseMemHandle(self, address: int) -> tuple[Any, ...]:
        self.world.mapped -= 1
        return (GOOD,)

    def cuMemsetD8(self, address: int, value: int, size: int) -> tuple[Any, ...]:
        owner, offset = self._place(address)
        self.world.memory[owner][offset : offset + size] = bytes([value]) * size
        return (GOOD,)

    def cuMemcpyHtoD(self, address: int, data: bytes, size: int) -> tuple[Any, ...]:
        owner, offset = self._place(address)
        if (self.rank, owner) not in self.world.lost:
            self.world.memory[owner][offset : offset + size] = data[:size]
        return (GOOD,)

    def cuMemcpyDtoH(self, data: bytearray, address: int, size: int) -> tuple[Any, ...]:
        owner, offset = self._place(address)
        data[:size] = self.world.memory[owner][offset : offset + size]
        return (GOOD,)

    def _address(self, owner: int) -> int:
        """Every process maps an arena somewhere else."""
        return ((self.rank + 1) << 40) + (owner << 32)

    def _place(self, address: int) -> tuple[int, int]:
        assert address >> 40 == self.rank + 1, "an address of another process"
        start, offset = address & ~0xFFFFFFFF, address & 0xFFFFFFFF
        return self._owners.get(start, address >> 32 & 0x7F), offset


_thread = threading.local()


@pytest.fixture(autouse=True)
def host_of_the_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: getattr(_thread, "host", "host"))


def world(ranks: int, **changes: Any) -> World:
    return World(["NVIDIA H200"] * ranks, [bytes([i]) * 16 for i in range(ranks)], **changes)


def connect(gpus: World, ranks: int, use: Callable[[PeerMemory], Any]) -> list[Any]:
    """Result or UserError of every rank."""
    store = HashStore()

    def run(rank: int) -> Any:
        _thread.host = gpus.hosts[rank] if gpus.hosts else "host"
        group = StoreGroup(store, rank, ranks)
        tensors = lambda address, size: torch.frombuffer(gpus.memory[rank], dtype=torch.uint8)  # noqa: E731
        try:
            with PeerMemory(group, FakeDriver(gpus, rank), arena_bytes=ARENA, as_tensor=tensors) as peers:
                return use(peers)
        except UserError as error:
            return error

    with ThreadPoolExecutor(ranks) as pool:
        return list(pool.map(run, range(ranks)))


def several_hosts(ranks: int, **changes: Any) -> World:
    """Two ranks to a host, all GPUs with fabric handles."""
    hosts = [f"host{rank // 2}" for rank in range(ranks)]
    return world(ranks, **{"hosts": hosts, "fabric": set(range(ranks)), **changes})


def test_ranks_of_several_hosts_share_fabric_handles() -> None:
    gpus, barrier = several_hosts(4), threading.Barrier(4)

    def look(peers: PeerMemory) -> list[int]:
        barrier.wait()
        assert (gpus.allocated, gpus.imported, gpus.mapped, gpus.reserved) == (4, 12, 16, 16)
        assert not any(gpus.memory[peers.mail().rank][:ARENA])
        _, addresses = peers.mail().take(100, torch.device("cpu"))
        barrier.wait()
        return addresses

    found = connect(gpus, 4, look)
    assert all(len(set(addresses)) == 4 for addresses in found)
    assert (gpus.allocated, gpus.imported, gpus.mapped, gpus.reserved) == (0, 0, 0, 0)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"fabric": {0, 1, 2}}, "on several hosts (host0, host1), which IPC handles do not reach, and rank 3 has no"),
        ({"closed": {(1, 2)}}, "rank 1 cannot open the mailboxes of rank 2 (CUDA_ERROR_INVALID_VALUE); the hosts must"),
        ({"unmappable": {(3, 0)}}, "rank 3 cannot open the mailboxes of rank 0 (The CUDA driver could not map"),
        ({"unmappable": {(2, 2)}}, None),
        ({"lost": {(0, 3)}}, "what rank 0 wrote to rank 3 did not arrive"),
    ],
)
def test_what_the_fabric_refuses_leaves_nothing_behind(changes: dict[str, Any], words: str | None) -> None:
    gpus = several_hosts(4, **changes)
    if words is None:  # one rank cannot even allocate: it stops alone, and the others miss it
        with pytest.raises(UserError, match="could not allocate"):
            FabricHandles(FakeDriver(gpus, 2), 2).allocate(ARENA)
        assert (gpus.mapped, gpus.reserved) == (0, 0)
        return
    answers = connect(gpus, 4, lambda peers: None)
    assert len({str(answer) for answer in answers}) == 1
    assert words in str(answers[0])
    assert (gpus.allocated, gpus.imported, gpus.mapped, gpus.reserved) == (0, 0, 0, 0)


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_every_rank_reaches_every_arena_which_is_clear(ranks: int) -> None:
    gpus = world(ranks, fabric=set(range(ranks)))  # which one host does not need
    barrier = threading.Barrier(ranks)

    def look(peers: PeerMemory) -> tuple[int, list[list[int]], int]:
        mail = peers.mail()
        barrier.wait()
        assert not any(gpus.memory[mail.rank])  # nothing is left of the check
        takes = [mail.take(100, torch.device("cpu")) for _ in range(2)]
        assert takes[0][0].shape == (2, ranks, 100)
        barrier.wait()
        return mail.rank, [addresses for _, addresses in takes], mail.session

    found = connect(gpus, ranks, look)
    assert [rank for rank, _, _ in found] == list(range(ranks))
    assert len({session for _, _, session in found}) == 1
    for rank, (first, second), _ in found:
        assert first == [((rank + 1) << 40) + (owner << 32) for owner in range(ranks)]
        steps = {b - a for a, b in zip(first, second, strict=True)}
        assert steps == {-(-2 * ranks * 100 // 128) * 128}
    assert (gpus.allocated, gpus.mapped) == (0, 0)


def test_sessions_differ() -> None:
    sessions = {connect(world(2), 2, lambda peers: peers.session)[0] for _ in range(5)}
    assert len(sessions) == 5


@pytest.mark.parametrize(
    ("gpus", "words"),
    [
        (world(2, lost={(1, 0)}), "what rank 1 wrote to rank 0 did not arrive"),
        (world(2, lost={(0, 1)}), "rank 0 does not read back what rank 0 wrote to rank 1"),
        (world(2, apart={(0, 1)}), "GPU 0000:00:00.0 of rank 0 has no peer access to GPU 0000:01:00.0 of rank 1"),
        (world(2, closed={(1, 0)}), "rank 1 cannot open the mailboxes of rank 0"),
        (replace(world(2), uuids=[bytes(16)] * 2), "ranks 0 and 1 share one GPU"),
        (replace(world(2), names=["NVIDIA H200", "NVIDIA H200 MIG 1g.18gb"]), "rank 1 runs on a slice"),
    ],
)
def test_every_rank_refuses_with_the_same_sentence(gpus: World, words: str) -> None:
    first, second = connect(gpus, 2, lambda peers: None)
    assert isinstance(first, UserError)
    assert str(first) == str(second)
    assert words in str(first)
    assert str(first).startswith("The ranks cannot exchange rows: ")
    assert (gpus.allocated, gpus.mapped) == (0, 0)


def test_a_gpu_that_a_process_does_not_see_is_tried() -> None:
    assert connect(world(2, hidden=True, apart={(0, 1)}), 2, lambda peers: peers.mail().ranks) == [2, 2]


ME = Identity(0, 2, "host", 1, "aa", "0000:00:00.0", "NVIDIA H200", ARENA, 5)
OTHER = replace(ME, rank=1, process=2, device="bb", bus="0000:01:00.0")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, None),
        ({"rank": 0}, "the process at place 1 says that it is rank 0 of 2"),
        ({"ranks": 4}, "rank 1 of 4"),
        (
            {"host": "elsewhere"},
            "several hosts (elsewhere, host), which IPC handles do not reach, and rank 0, 1 has no",
        ),
        ({"host": "elsewhere", "fabric": 1}, "and rank 0 has no fabric handles"),
        ({"device": "aa"}, "ranks 0 and 1 share one GPU"),
        ({"arena_bytes": 8192}, "different sizes (4096, 8192 bytes)"),
        ({"name": "NVIDIA H200 MIG 2g.35gb"}, "partitioned GPU"),
    ],
)
def test_what_ranks_say_of_themselves(changes: dict[str, Any], words: str | None) -> None:
    other = Identity.unpack(replace(OTHER, **changes).pack())
    reasons = reasons_against([ME, other])
    assert bool(reasons) == (words is not None)
    assert words is None or words in "; ".join(reasons)


def test_all_reasons_come_together() -> None:
    reasons = reasons_against([ME, replace(OTHER, rank=0, host="elsewhere", device="aa")])
    assert len(reasons) == 3


def test_a_rank_that_does_not_come_is_named() -> None:
    class Silent:
        def set(self, key: str, value: bytes) -> None: ...

        def get(self, key: str) -> bytes:
            if key.endswith(".1"):
                raise RuntimeError("wait timeout")
            return b""

    with pytest.raises(UserError, match="waited for rank 1"):
        StoreGroup(Silent(), 0, 2).gather(b"x")
