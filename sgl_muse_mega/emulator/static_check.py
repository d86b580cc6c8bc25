"""Checks a launch's hand-offs without a schedule: who arrives where, who waits for what, and that all waits end.

A launch is taken apart into one program per warp, a list of operations on counters, flags, mbarriers and barriers;
`programs_of` reads them off the events of one run of the kernels themselves. Waits only ever need arrivals, and
arrivals are never taken back, so if one maximal execution of the programs ends, every execution does: there is no cycle
and no wait that cannot be satisfied, whatever the schedule.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from sgl_muse_mega.emulator.machine import Event, EventKind
from sgl_muse_mega.megakernel import draft_protocol, protocol
from sgl_muse_mega.megakernel.protocol import Arrivals, HandOff

WARP = 32
LINE_BYTES = 128
Actor = tuple[int, int]  # CTA, warp


@dataclass(frozen=True, slots=True)
class Operation:
    """kind and place as in an Event, places by name: a counter's name, "flag 3", "mbarrier 16", "barrier 1", and
    "packet" with the address of one of its halves."""

    kind: EventKind
    place: str
    phase: int = 0


Programs = dict[Actor, list[Operation]]


@dataclass(frozen=True, slots=True)
class Rules:
    """The hand-offs of a set of kernels: all counters, and which of them a launch of a kernel advances on one of a
    number of ranks."""

    counters: Sequence[HandOff]
    advanced: Callable[[str, int], Sequence[str]]


TARGET = Rules(protocol.COUNTERS, protocol.kernel_counters)
DRAFT = Rules(draft_protocol.DRAFT_COUNTERS, draft_protocol.kernel_counters)
ACCEPT = Rules(draft_protocol.ACCEPT_COUNTERS, draft_protocol.kernel_counters)


def programs_of(
    events: Sequence[Event], launch: int, counters: Tensor, flags: Tensor | None, rules: Rules = TARGET
) -> Programs:
    """The programs of one launch. counters, flags: the kernel's words (megakernel.scratch.Control).

    Of a warp's lanes that do the same, and of polls that follow each other, one is kept. A warp is at a barrier when
    its last lane is. Its lanes' packets between two other operations are taken in step: all send, then all receive what
    each receives before it sends again.
    """
    programs: Programs = defaultdict(list)
    seen: set[tuple[Actor, Operation]] = set()
    lanes_at: Counter[tuple[Actor, str]] = Counter()
    packets: dict[Actor, dict[int, list[Operation]]] = defaultdict(lambda: defaultdict(list))

    def close(actor: Actor) -> None:
        programs[actor] += _in_step(packets.pop(actor, {}))

    for event in events:
        if event.launch != launch:
            continue
        actor = (event.cta, event.thread // WARP)
        operation = Operation(event.kind, _place(event, counters, flags, rules), event.phase)
        if not operation.place:
            continue  # the epoch, which is read before and written after all hand-offs
        if event.kind == EventKind.BARRIER:
            lanes_at[actor, operation.place] += 1
            if lanes_at[actor, operation.place] % WARP:
                continue
        if event.kind in (EventKind.ACQUIRE, EventKind.MBARRIER_WAIT, EventKind.RECEIVE):
            if (actor, operation) in seen:
                continue
            seen.add((actor, operation))
        if event.kind in (EventKind.SEND, EventKind.RECEIVE):
            packets[actor][event.thread].append(operation)
            continue
        close(actor)
        programs[actor].append(operation)
    for actor in list(packets):
        close(actor)
    return dict(programs)


def _in_step(lanes: Mapping[int, list[Operation]]) -> list[Operation]:
    """Operations of the lanes of a warp, by lane, as one program."""
    merged: list[Operation] = []
    left = [list(reversed(operations)) for operations in lanes.values()]
    while any(left):
        for kind in (EventKind.SEND, EventKind.RECEIVE):
            for operations in left:
                while operations and operations[-1].kind == kind:
                    merged.append(operations.pop())
    return merged


def _place(event: Event, counters: Tensor, flags: Tensor | None, rules: Rules) -> str:
    if event.kind in (EventKind.MBARRIER_INIT, EventKind.MBARRIER_ARRIVE, EventKind.MBARRIER_WAIT):
        return f"mbarrier {event.place}"
    if event.kind == EventKind.BARRIER:
        return f"barrier {event.place}"
    if event.kind in (EventKind.SEND, EventKind.RECEIVE):
        return f"packet {event.place}"
    index, rest = divmod(event.place - counters.data_ptr(), protocol.COUNTER_STRIDE * 4)
    if 0 <= index < len(rules.counters) and rest == 0:
        return rules.counters[index].name
    if flags is None:
        return ""
    flag = (event.place - flags.data_ptr()) // 4
    return f"flag {flag}" if 0 <= flag < flags.numel() else ""


def check_protocol(
    counters: Sequence[HandOff] = protocol.COUNTERS,
    kernels: Mapping[str, Sequence[str]] = protocol.KERNELS,
    stride: int = protocol.COUNTER_STRIDE,
) -> list[str]:
    """What is wrong with the counters as data; empty when nothing is."""
    names = [c.name for c in counters]
    problems = [f"two counters are called {name}" for name, n in Counter(names).items() if n > 1]
    problems += [f"kernel {k} has no counter {n}" for k, used in kernels.items() for n in used if n not in names]
    problems += [
        f"kernel {k} lists {n} twice" for k, used in kernels.items() for n, c in Counter(used).items() if c > 1
    ]
    problems += [f"no kernel uses counter {n}" for n in names if not any(n in used for used in kernels.values())]
    if stride * 4 < LINE_BYTES or stride * 4 % LINE_BYTES:
        problems.append(f"counters {stride * 4} bytes apart share lines of {LINE_BYTES} bytes")
    problems += [f"site {s} has a counter's name" for s, _ in protocol.SITES if s in names]
    return problems


def check_expected(counters: Sequence[HandOff], sms: int, row_cap: int) -> list[str]:
    """The expected values grow by the arrivals from epoch to epoch, across the wrap, by less than half the range."""
    problems = []
    for counter in counters:
        arrivals = sms if counter.arrivals is Arrivals.EVERY_CTA else row_cap
        if not 0 < arrivals < 2**31:
            problems.append(f"{counter.name} grows by {arrivals} in a launch")
        for epoch in (0, 1, 2**31 // arrivals, 2**32 // arrivals - 1, 2**32 // arrivals, 2**32 - 1):
            before = protocol.expected(counter, epoch - 1, sms=sms, row_cap=row_cap)
            after = protocol.expected(counter, epoch, sms=sms, row_cap=row_cap)
            if (after - before) % 2**32 != arrivals:
                problems.append(
                    f"{counter.name} expects {before}, then {after} at epoch {epoch} of {arrivals} arrivals"
                )
    return problems


def check_launch(programs: Programs, kernel: str, sms: int, row_cap: int) -> list[str]:
    """What is wrong with one launch of the target's; empty when nothing is."""
    return _check_writers(programs, kernel, sms, row_cap, 1, TARGET) + _execute(programs, _goals(sms, row_cap, TARGET))


def check_ranks(ranks: Sequence[Programs], kernel: str, sms: int, row_cap: int, rules: Rules = TARGET) -> list[str]:
    """What is wrong with one launch of every rank; empty when nothing is.

    Every packet is sent once and read by somebody, and all ranks' programs end when they run together.
    """
    problems: list[str] = []
    together: Programs = {}
    goals: dict[str, int] = {}
    for rank, programs in enumerate(ranks):
        found = _check_writers(programs, kernel, sms, row_cap, len(ranks), rules)
        problems += [f"rank {rank}: {problem}" for problem in found]
        goals |= {f"rank {rank} {name}": goal for name, goal in _goals(sms, row_cap, rules).items()}
        for (cta, warp), program in programs.items():
            together[rank * sms + cta, warp] = [_of_rank(operation, rank) for operation in program]
    operations = [operation for program in together.values() for operation in program]
    sent = Counter(o.place for o in operations if o.kind == EventKind.SEND)
    received = {o.place for o in operations if o.kind == EventKind.RECEIVE}
    problems += [f"{place} is sent {n} times" for place, n in sent.items() if n > 1]
    problems += [f"somebody waits for {place}, which nobody sends" for place in sorted(received - sent.keys())]
    problems += [f"{place} is sent to nobody" for place in sorted(sent.keys() - received)]
    return problems + _execute(together, goals)


_OF_THE_RANK = (EventKind.ADD, EventKind.PUBLISH, EventKind.ACQUIRE)


def _of_rank(operation: Operation, rank: int) -> Operation:
    """The operation with a rank's counters and flags told from those of others."""
    if operation.kind not in _OF_THE_RANK:
        return operation
    return Operation(operation.kind, f"rank {rank} {operation.place}", operation.phase)


def _goals(sms: int, row_cap: int, rules: Rules) -> dict[str, int]:
    """Arrivals that a counter's readers wait for."""
    return {c.name: sms if c.arrivals is Arrivals.EVERY_CTA else row_cap for c in rules.counters}


def _check_writers(programs: Programs, kernel: str, sms: int, row_cap: int, ranks: int, rules: Rules) -> list[str]:
    problems = []
    declared = {c.name: c for c in rules.counters if c.name in rules.advanced(kernel, ranks)}
    arrivals: dict[str, Counter[int]] = defaultdict(Counter)
    waited: set[str] = set()
    flags: Counter[str] = Counter()
    for (cta, _), program in programs.items():
        for operation in program:
            if operation.kind == EventKind.ADD:
                arrivals[operation.place][cta] += 1
            elif operation.kind == EventKind.PUBLISH:
                flags[operation.place] += 1
            elif operation.kind == EventKind.ACQUIRE:
                waited.add(operation.place)
    for name in sorted(set(arrivals) - set(declared)):
        problems.append(f"{name} is advanced by {kernel}, which does not declare it")
    for name, counter in declared.items():
        if counter.arrivals is Arrivals.EVERY_CTA:
            wrong = [cta for cta in range(sms) if arrivals[name][cta] != 1]
            if wrong or len(arrivals[name]) > sms:
                problems.append(f"{name} counts every CTA once, but CTA {wrong[:4]} arrive another number of times")
        elif arrivals[name].total() != row_cap:
            problems.append(f"{name} counts {row_cap} rows and gets {arrivals[name].total()} arrivals")
    problems += [f"{flag} is set {n} times" for flag, n in flags.items() if n > 1]
    known = set(declared) | set(flags)
    problems += [f"somebody waits for {name}, which nothing in {kernel} advances" for name in sorted(waited - known)]
    return problems


def _execute(programs: Programs, goal: Mapping[str, int]) -> list[str]:
    """Runs every program as far as it comes; what still waits at the end can never go on."""
    done: Counter[str] = Counter()
    local: dict[int, Counter[tuple[str, int]]] = defaultdict(Counter)
    arrivals: dict[tuple[int, str], int] = {}  # of the phases of an initialised mbarrier
    met: dict[int, Counter[str]] = defaultdict(Counter)  # arrivals at barriers, in warps
    at = dict.fromkeys(programs, 0)
    waiting_at: dict[Actor, int] = {}  # arrivals at its barrier that a warp waits for

    def step(actor: Actor) -> bool:
        operation, (cta, _) = programs[actor][at[actor]], actor
        place, phase = operation.place, operation.phase
        match operation.kind:
            case EventKind.ADD | EventKind.PUBLISH | EventKind.SEND:
                done[place] += 1
            case EventKind.ACQUIRE | EventKind.RECEIVE:
                return done[place] >= goal.get(place, 1)
            case EventKind.MBARRIER_INIT:
                arrivals[cta, place] = phase
            case EventKind.MBARRIER_ARRIVE:
                local[cta][place, phase] += 1
            case EventKind.MBARRIER_WAIT:
                return local[cta][place, phase] == arrivals.get((cta, place))
            case EventKind.BARRIER:
                if actor not in waiting_at:
                    met[cta][place] += 1
                    group = phase // WARP
                    waiting_at[actor] = -(-met[cta][place] // group) * group
                if met[cta][place] < waiting_at[actor]:
                    return False
                del waiting_at[actor]
        return True

    moved = True
    while moved:
        moved = False
        for actor, program in programs.items():
            while at[actor] < len(program) and step(actor):
                at[actor] += 1
                moved = True
    stuck = [(actor, programs[actor][at[actor]]) for actor in programs if at[actor] < len(programs[actor])]
    return [f"CTA {a[0]} warp {a[1]} waits for ever for {o.place} ({o.kind.name}, phase {o.phase})" for a, o in stuck]
