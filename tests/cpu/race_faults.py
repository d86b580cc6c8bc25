"""The corpus of faults that the race hunt must find.

A fault is either committed by the emulated machine (an injection) or a change of one place in the kernels' sources.
Running this file prints the table of docs/race-testing.md.
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
from race_case import STAGED, RaceCase, Tuning

from sgl_muse_mega.emulator.machine import EmulatorFault, Injection, racing
from sgl_muse_mega.megakernel import protocol
from sgl_muse_mega.megakernel.build import source_directory

Address = Callable[[RaceCase], int]
Expected = Callable[[int, int, int, Tuning], torch.Tensor]  # SMs, rows, length -> logits without the fault


@dataclass(frozen=True, slots=True)
class Change:
    """The first occurrence of `old` behind `after` in `file` becomes `new`."""

    file: str
    old: str
    new: str = ""
    after: str = ""

    def apply(self, folder: Path) -> None:
        """Changes a copy of csrc. Fails when the place has moved, so that no fault is tested in name only."""
        path = folder / self.file
        text = path.read_text()
        start = text.find(self.after) + len(self.after)
        assert self.after in text, f"{self.file} no longer contains {self.after!r}"
        assert self.old in text[start:], f"{self.file} no longer contains {self.old!r} behind {self.after!r}"
        path.write_text(text[:start] + text[start:].replace(self.old, self.new, 1))


@dataclass(frozen=True, slots=True)
class Fault:
    """A way to break the kernels, and a step that must show it."""

    name: str
    change: Change | None = None
    injection: Injection = Injection.NONE
    address: Address = lambda case: 0
    rows: int = 3
    length: int = 100
    sms: int = 3
    tuning: Tuning = ()


@dataclass(frozen=True, slots=True)
class Finding:
    """What showed a fault: the seed of the schedule, the kind of the report or "wrong result", and the time."""

    seed: int
    kind: str
    text: str
    seconds: float


def counter(name: str) -> Address:
    return lambda case: case.counter_address(name)


def orders(name: str, injection: Injection) -> Fault:
    """A release or an acquire that is missing at one counter of the layer kernel.

    On few SMs every CTA that waits for ROUTER or EXPERT_INPUT has also waited for a later arrival of the same CTAs.
    """
    sms, rows = (10, 8) if name in {"ROUTER", "EXPERT_INPUT"} else (3, 3)
    what = "release" if injection == Injection.MISSING_RELEASE else "acquire"
    return Fault(f"missing {what} at {name}", None, injection, counter(name), rows=rows, sms=sms)


BARRIER, WARP_SYNC = "math_barrier();\n", "warp_sync();\n"
INJECTED = (
    *(orders(name, Injection.MISSING_RELEASE) for name in protocol.KERNELS["layer"]),
    *(orders(name, Injection.MISSING_ACQUIRE) for name in protocol.KERNELS["layer"]),
    Fault("missing release at an activation flag", None, Injection.MISSING_RELEASE, RaceCase.flag_address),
    Fault("missing acquire at an activation flag", None, Injection.MISSING_ACQUIRE, RaceCase.flag_address),
    Fault("missing proxy fence before bulk copies", None, Injection.MISSING_PROXY_FENCE),
    Fault("missing fence after mbarrier initialisation", None, Injection.MISSING_INIT_FENCE),
    Fault("warp_sync that orders nothing", None, Injection.MISSING_WARP_SYNC),
    Fault("early exit of one CTA", None, Injection.EARLY_EXIT, lambda case: 1),
    Fault("copies of keys not waited for", None, Injection.MISSING_COPY_WAIT, tuning=STAGED),
)  # fmt: skip

CHANGED = (
    Fault("counter shared with a polled line", Change("layer/wait.cuh", "* protocol::COUNTER_STRIDE", "* 1")),
    Fault(
        "epoch not advanced",
        Change("layer/kernel.cuh", "store_release(p.epoch, epoch + 1u)", "store_release(p.epoch, epoch)"),
    ),
    Fault(
        "epoch advanced before all CTAs have arrived",
        Change("layer/kernel.cuh", "epoch = meet_epoch();", "epoch = meet_epoch();\n    end_epoch(p, epoch);"),
    ),
    Fault(
        "snapshot of a counter read without order",
        Change("layer/wait.cuh", "load_acquire(address)", "global_load(address)"),
    ),
    Fault(
        "partials read before their producers",
        Change("layer/kernel.cuh", "wait_counter_math(p, Counter::ATTENTION, epoch);"),
    ),
    Fault(
        "split count not scaled with the length",
        Change("layer/output_gate.cuh", "rows.splits(shift) - first", "1"),
        length=150,
    ),
    Fault("double use of a ring slot", Change("layer/load.cuh", "ring.wait_empty(p);")),
    Fault("stale parity", Change("layer/ring.cuh", "parity ^= 1u;")),
    Fault(
        "arrival before the other warps have written",
        Change("layer/wait.cuh", BARRIER, after="DEVICE void arrive_math"),
    ),
    Fault("reduction buffer reused too early", Change("layer/gemm.cuh", BARRIER, after="parked_sum(local, row));")),
    Fault("sums of an expert task overwritten too early", Change("layer/experts.cuh", "wait_sums_taken(p, number);")),
    Fault(
        "expert task finished before its sums are parked",
        Change(
            "layer/experts.cuh",
            "wait_mbarrier(p, cfg::SUMS_PARKED_AT, number & 1, protocol::Site::SUMS_PARKED);",
        ),
    ),
    Fault("sums of two rows in one place", Change("layer/row.cuh", "turn * cfg::MATH_WARPS * 4", "0")),
    Fault(
        "previous launch not waited for",
        Change("layer/kernel.cuh", "wait_for_previous_launch();", after="DEVICE void layer_math("),
    ),
    Fault("epoch read before the previous launch has ended", Change("layer/kernel.cuh", "wait_for_previous_launch();")),
    Fault(
        "table published before it is whole",
        Change("layer/routing.cuh", "    arrive_warp(cfg::ROUTING", "    if (lane == 0) mbarrier_arrive(cfg::ROUTING"),
    ),
    Fault(
        "ring stage released while lanes read it", Change("layer/ring.cuh", WARP_SYNC, after="DEVICE void arrive_warp(")
    ),
    Fault("keys read before the team has met", Change("layer/staged.cuh", "team.meet();"), tuning=STAGED),
    Fault(
        "keys waited for a turn too late",
        Change("layer/staged.cuh", "wait_copies<2>()", "wait_copies<3>()"),
        tuning=STAGED,
    ),
    Fault(
        "weights in stages that attention has not given back",
        Change("layer/staged.cuh", "wait_mbarrier(p, cfg::LENT_BACK_AT, 0, protocol::Site::LENT_BACK);"),
        sms=1,
        tuning=STAGED,
    ),
    Fault(
        "stages given back without a proxy fence",
        Change("layer/staged.cuh", "fence_generic_to_async();"),
        sms=1,
        tuning=STAGED,
    ),
)

FAULTS = INJECTED + CHANGED


def hunt(fault: Fault, folder: Path, seeds: int, expected: Expected) -> Finding | None:
    """The first of schedules 1 .. `seeds` that shows the fault.

    folder: empty, for changed sources.
    """
    if fault.change is not None:
        shutil.copytree(source_directory(), folder, dirs_exist_ok=True)
        fault.change.apply(folder)
    case = RaceCase(None if fault.change is None else folder, sms=fault.sms, tuning=fault.tuning)
    reference = expected(fault.sms, fault.rows, fault.length, fault.tuning)
    start = time.monotonic()
    for seed in range(1, seeds + 1):
        schedule = replace(racing(seed), injection=fault.injection, injection_address=fault.address(case))
        try:
            logits = case.run(schedule, fault.rows, fault.length)
        except EmulatorFault as found:
            return Finding(seed, found.kind, found.text, time.monotonic() - start)
        if not torch.equal(logits, reference):
            return Finding(seed, "wrong result", "", time.monotonic() - start)
    return None


@functools.cache
def clean_logits(sms: int, rows: int, length: int, tuning: Tuning) -> torch.Tensor:
    """Logits of the step without a fault, under the plain schedule."""
    return RaceCase(sms=sms, tuning=tuning).run(rows=rows, length=length)


def main() -> int:
    """Prints the table, one row per fault."""
    print("| fault | found by seed | in s | as |\n|---|---|---|---|")
    missed = 0
    for fault in FAULTS:
        with tempfile.TemporaryDirectory() as folder:
            found = hunt(fault, Path(folder), 100, clean_logits)
        missed += found is None
        row = "never | | " if found is None else f"{found.seed} | {found.seconds:.2f} | {found.kind}"
        print(f"| {fault.name} | {row} |", flush=True)
    return missed


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main())
