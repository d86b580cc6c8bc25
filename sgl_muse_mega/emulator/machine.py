"""The emulated machine of this process (csrc/emulator/api.cpp), and how its runs are scheduled and checked."""

import ctypes
import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path

from torch import Tensor

from sgl_muse_mega.emulator.compile import compile_machine
from sgl_muse_mega.errors import UserError


class Order(IntEnum):
    """Which of the warps that can run runs next."""

    ROUND_ROBIN = 0
    RANDOM = 1
    PRIORITY = 2  # random priorities, drawn anew for a warp that is preempted


class Injection(IntEnum):
    """Faults that the machine commits on purpose (csrc/emulator/options.h)."""

    NONE = 0
    MISSING_RELEASE = 1
    MISSING_ACQUIRE = 2
    MISSING_PROXY_FENCE = 3
    MISSING_WARP_SYNC = 4
    MISSING_INIT_FENCE = 5
    EARLY_EXIT = 6  # the CTA whose number is the address (its rank in the upper 32 bits)
    MISSING_COPY_WAIT = 7


@dataclass(frozen=True, slots=True)
class Schedule:
    """One way to run launches; equal schedules and inputs give equal runs.

    seed 0 is the plain schedule: round robin, bulk copies land at once. ordered: whatever an access relies on must be
    ordered before it by acquires, releases and barriers, or the run stops with both places; stale_values lets such
    accesses pass and gives them an old or a new value instead. overlap: CTAs of the next launch start when programmatic
    launch would allow it.
    """

    seed: int = 0
    order: Order = Order.ROUND_ROBIN
    preempt_interval: int = 0  # mean number of memory operations between preemptions, 16 per ordered one; 0: none
    preempt_limit: int = 0  # most preemptions; 0: no bound
    ordered: bool = False
    stale_values: bool = False
    overlap: bool = False
    injection: Injection = Injection.NONE
    injection_address: int = 0
    trace: bool = False  # keep the events of the run, for `EmulatedMachine.events`


PLAIN = Schedule()


def racing(seed: int, **changes: object) -> Schedule:
    """Schedule number `seed` (from 1) of the race hunt: random or priority order, few or many preemptions.

    Every fourth runs by priority with at most 8 preemptions: faults that a few changes of order in the right places
    show are found soonest by such schedules.
    """
    order = (Order.RANDOM, Order.PRIORITY)[seed % 2]
    interval = (40, 400, 4000)[seed // 2 % 3]
    chosen: dict[str, object] = {
        "seed": seed,
        "order": order,
        "preempt_interval": interval,
        "preempt_limit": 1 + seed // 4 % 8 if seed % 4 == 3 else 0,
        "ordered": True,
        "overlap": True,
    }
    return Schedule(**{**chosen, **changes})  # type: ignore[arg-type]


class EmulatorFault(UserError):
    """A run that stopped. kind: race, unwritten, bounds, alignment, constant, deadlock, trap, divergence, ..."""

    def __init__(self, kind: str, text: str, schedule: Schedule) -> None:
        super().__init__(f"The emulated kernels stopped ({kind}): {text}\nReplay with {schedule}.")
        self.kind = kind
        self.text = text


@dataclass(frozen=True, slots=True)
class Region:
    """Memory that launches may touch. constant: no launch may write it; written: it holds values at the start."""

    name: str
    tensor: Tensor
    constant: bool
    written: bool


@dataclass(frozen=True, slots=True)
class Launch:
    """kernel: the address of its entry in a library; parameters: the parameter block's bytes."""

    kernel: int
    parameters: bytes
    ctas: int
    shared_bytes: int
    overlaps: bool = True
    rank: int = 0


@dataclass(frozen=True, slots=True)
class Statistics:
    switches: int  # between fibers
    races: int  # accesses that got an arbitrary value (stale_values)
    nanoseconds: int  # the machine's own clock


class EventKind(IntEnum):
    ADD = 0
    PUBLISH = 1
    ACQUIRE = 2
    MBARRIER_INIT = 3
    MBARRIER_ARRIVE = 4
    MBARRIER_WAIT = 5
    BARRIER = 6
    SEND = 7
    RECEIVE = 8


@dataclass(frozen=True, slots=True)
class Event:
    """launch, cta and thread say who. place: address of a word or packet, offset of an mbarrier, number of a barrier;
    phase: of an mbarrier, how many arrivals an initialised one counts, how many threads meet at a barrier, or the tag
    of a packet that is sent."""

    launch: int
    cta: int
    thread: int
    kind: EventKind
    place: int
    phase: int


class _Event(ctypes.Structure):
    _fields_ = (
        ("launch", ctypes.c_uint32), ("cta", ctypes.c_uint32), ("thread", ctypes.c_uint32), ("kind", ctypes.c_uint32),
        ("place", ctypes.c_uint64), ("phase", ctypes.c_uint64),
    )  # fmt: skip


class _Launch(ctypes.Structure):
    _fields_ = (
        ("kernel", ctypes.c_void_p), ("parameters", ctypes.c_char_p), ("parameter_bytes", ctypes.c_uint32),
        ("ctas", ctypes.c_int32), ("shared_bytes", ctypes.c_uint32), ("overlaps", ctypes.c_uint32),
        ("rank", ctypes.c_uint32),
    )  # fmt: skip


class _Options(ctypes.Structure):
    _fields_ = (
        ("seed", ctypes.c_uint64), ("order", ctypes.c_uint32), ("preempt_interval", ctypes.c_uint32),
        ("preempt_limit", ctypes.c_uint32), ("ordered", ctypes.c_uint32), ("stale_values", ctypes.c_uint32),
        ("overlap", ctypes.c_uint32), ("injection", ctypes.c_uint32), ("trace", ctypes.c_uint32),
        ("injection_address", ctypes.c_uint64),
    )  # fmt: skip


class _Result(ctypes.Structure):
    _fields_ = (
        ("switches", ctypes.c_uint64), ("races", ctypes.c_uint64), ("nanoseconds", ctypes.c_uint64),
        ("kind", ctypes.c_char * 32), ("text", ctypes.c_char * 8192),
    )  # fmt: skip


@functools.cache
def machine() -> "EmulatedMachine":
    """The one machine of this process, compiled at first use."""
    return EmulatedMachine(compile_machine())


class EmulatedMachine:
    def __init__(self, library: Path) -> None:
        # Global, so that the kernels' libraries find the machine's functions.
        self._library = ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
        self._library.emulator_add_region.argtypes = [
            ctypes.c_char_p, ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint32
        ]  # fmt: skip
        self._library.emulator_count_unwritten.argtypes = [ctypes.c_void_p, ctypes.c_uint64]
        self._library.emulator_events.restype = ctypes.c_uint64
        self._regions: tuple[Region, ...] = ()
        self._lent: tuple[Region, ...] = ()

    def lend(self, regions: Sequence[Region]) -> None:
        """From now on exactly this memory may be touched besides, and by these rules where it is in use, too."""
        if [id(region) for region in regions] != [id(region) for region in self._lent]:
            self._lent = tuple(regions)
            self.use(self._regions)

    def use(self, regions: Sequence[Region]) -> None:
        """From now on exactly this memory may be touched; what was written to it before is forgotten."""
        self._library.emulator_clear_regions()
        lent = {region.tensor.data_ptr(): region for region in self._lent}
        for region in (*lent.values(), *(region for region in regions if region.tensor.data_ptr() not in lent)):
            tensor = region.tensor
            size = tensor.numel() * tensor.element_size()
            self._library.emulator_add_region(
                region.name.encode(), tensor.data_ptr(), size, region.constant, region.written
            )
        self._regions = tuple(regions)  # keeps the tensors alive

    def unwritten_bytes(self, tensor: Tensor) -> int:
        """How many of the tensor's bytes no launch has written since `use`."""
        size = tensor.numel() * tensor.element_size()
        return int(self._library.emulator_count_unwritten(tensor.data_ptr(), size))

    def run(self, launches: Sequence[Launch], schedule: Schedule = PLAIN) -> Statistics:
        """Runs the launches, those of each rank in stream order, to their end. Raises EmulatorFault."""
        array = (_Launch * len(launches))(
            *(
                _Launch(x.kernel, x.parameters, len(x.parameters), x.ctas, x.shared_bytes, x.overlaps, x.rank)
                for x in launches
            )
        )
        s = schedule
        options = _Options(
            s.seed, s.order, s.preempt_interval, s.preempt_limit, s.ordered, s.stale_values, s.overlap, s.injection,
            s.trace, s.injection_address,
        )  # fmt: skip
        result = _Result()
        if self._library.emulator_run(array, len(launches), ctypes.byref(options), ctypes.byref(result)):
            raise EmulatorFault(result.kind.decode(), result.text.decode(errors="replace"), schedule)
        return Statistics(result.switches, result.races, result.nanoseconds)

    def events(self) -> list[Event]:
        """What the threads of the last run did to be waited for, and waited for, in order (Schedule.trace)."""
        pointer = ctypes.POINTER(_Event)()
        count = self._library.emulator_events(ctypes.byref(pointer))
        return [Event(e.launch, e.cta, e.thread, EventKind(e.kind), e.place, e.phase) for e in pointer[:count]]


@dataclass(slots=True)
class KernelLibrary:
    """A compiled instance; its kernels by name."""

    path: Path
    _library: ctypes.CDLL = field(init=False)

    def __post_init__(self) -> None:
        machine()  # its symbols must be there first
        self._library = ctypes.CDLL(str(self.path))

    def kernel(self, name: str) -> int:
        """Address of the entry that `Launch.kernel` takes."""
        return ctypes.addressof(ctypes.c_char.in_dll(self._library, name))
