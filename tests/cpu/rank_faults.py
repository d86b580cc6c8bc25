"""Faults of the exchange between ranks that the race hunt must find (see race_faults.py).

Running this file prints the second table of docs/race-testing.md.
"""

import functools
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from race_faults import Change, Finding
from rank_case import RankCase

from sgl_muse_mega.emulator.machine import EmulatorFault, Injection, racing
from sgl_muse_mega.megakernel.build import source_directory

MAILBOX, POINTS, ROWS = "layer/mailbox.cuh", "layer/points.cuh", "layer/row_mail.cuh"


@dataclass(frozen=True, slots=True)
class RankFault:
    """A way to break the exchange, and steps that must show it. before: what happens to the ranks ahead of each run."""

    name: str
    change: Change | None = None
    before: Callable[[RankCase], None] = RankCase.reset
    injection: Injection = Injection.NONE
    address: int = 0
    ranks: int = 2
    steps: int = 1


def one_ahead(case: RankCase) -> None:
    case.reset()
    case.ahead(1)


def after_another_step(case: RankCase) -> None:
    """The same session has done a step of other content."""
    case.reset()
    case.run(content=2)


def another_session(case: RankCase) -> None:
    """Mailboxes are full of an earlier session's packets, with the same epochs and other content."""
    case.reset()
    case.run(content=2, steps=2)
    case.begin_session(2)


RANK_FAULTS = (
    RankFault("a peer one step ahead", before=one_ahead),
    RankFault("a CTA of another rank exits early", injection=Injection.EARLY_EXIT, address=1 << 32),
    RankFault(
        "a packet of any launch is taken",
        Change(MAILBOX, "packet[i].differs_from(expected)", "(packet[i].low_tag == 0u)"),
        before=after_another_step,
    ),
    RankFault(
        "a stale packet is as good as a new one",
        Change(MAILBOX, "packet[i].differs_from(expected)", "(static_cast<int32_t>(expected - packet[i].low_tag) < 0)"),
    ),
    RankFault(
        "only the first half of a packet is looked at",
        Change(MAILBOX, "packet[i].differs_from(expected)", "(packet[i].low_tag ^ expected)"),
    ),
    RankFault(
        "stale parity: the reader polls the other half",
        Change(MAILBOX, "place<Point>(epoch, MIDDLE", "place<Point>(epoch + 1u, MIDDLE"),
    ),
    RankFault(
        "no session in the tag",
        Change(MAILBOX, "static_cast<uint32_t>(p.session) + 2u * epoch", "1u + 2u * epoch"),
        before=another_session,
        steps=2,
    ),
    RankFault(
        "two exchange points in one place",
        Change(POINTS, "AT = cfg::EXPERT_MAIL_AT", "AT = cfg::PRE_PROJ_MAIL_AT"),
    ),
    RankFault("rows in one place", Change(MAILBOX, "row * Point::PACKETS", "row / 2 * Point::PACKETS")),
    RankFault(
        "a rank is left out",
        Change(MAILBOX, "int rank = 0; rank < cfg::RANKS", "int rank = 1; rank < cfg::RANKS"),
    ),
    RankFault(
        "packets of the wrong source",
        Change(MAILBOX, "place<Point>(epoch, p.rank,", "place<Point>(epoch, 0,"),
    ),
    RankFault(
        "sums in another order on every rank",
        Change(
            ROWS,
            "unpack_bf16x4(data[turn * cfg::RANKS + rank])",
            "unpack_bf16x4(data[turn * cfg::RANKS + (rank + p.rank) % cfg::RANKS])",
        ),
        ranks=4,
    ),
    RankFault(
        "a tag that does not change from launch to launch",
        Change(MAILBOX, "+ 2u * epoch", "+ 2u * (epoch & 1u)"),
        before=after_another_step,
    ),
    RankFault(
        "mailbox read as ordinary memory",
        Change(
            MAILBOX,
            "receive_packet(base + offset_of(name(i), first) * PACKET_BYTES)",
            "global_load(reinterpret_cast<const Packet*>(base + offset_of(name(i), first) * PACKET_BYTES))",
            after="DEVICE void receive(",
        ),
    ),
)


def hunt(fault: RankFault, folder: Path, seeds: int) -> Finding | None:
    """The first of schedules 1 .. `seeds` that shows the fault. folder: empty, for changed sources."""
    if fault.change is not None:
        shutil.copytree(source_directory(), folder, dirs_exist_ok=True)
        fault.change.apply(folder)
    reference = clean_logits(fault.ranks)
    case = RankCase(fault.ranks, None if fault.change is None else folder)
    start = time.monotonic()
    for seed in range(1, seeds + 1):
        schedule = replace(racing(seed), injection=fault.injection, injection_address=fault.address)
        try:
            fault.before(case)
            logits = case.run(schedule, steps=fault.steps)
        except EmulatorFault as found:
            return Finding(seed, found.kind, found.text, time.monotonic() - start)
        except AssertionError as found:
            return Finding(seed, "ranks differ", str(found), time.monotonic() - start)
        if not torch.equal(logits, reference):
            return Finding(seed, "wrong result", "", time.monotonic() - start)
    return None


@functools.cache
def clean_logits(ranks: int) -> torch.Tensor:
    """Logits without a fault, under the plain schedule."""
    return RankCase(ranks).run()


def main() -> int:
    """Prints the table, one row per fault."""
    print("| fault | ranks | found by seed | in s | as |\n|---|---|---|---|---|")
    missed = 0
    for fault in RANK_FAULTS:
        with tempfile.TemporaryDirectory() as folder:
            found = hunt(fault, Path(folder), 40)
        missed += found is None
        row = "never | | " if found is None else f"{found.seed} | {found.seconds:.2f} | {found.kind}"
        print(f"| {fault.name} | {fault.ranks} | {row} |", flush=True)
    return missed


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main())
