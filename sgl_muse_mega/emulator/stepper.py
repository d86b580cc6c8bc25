"""The emulator as a machine of `megakernel.machine`: a step's launches are collected, and run when waited for."""

import ctypes
import struct
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path

import torch
from torch import Tensor

from sgl_muse_mega.emulator.compile import compile_kernels
from sgl_muse_mega.emulator.machine import (
    PLAIN,
    EmulatorFault,
    KernelLibrary,
    Launch,
    Region,
    Schedule,
    Statistics,
    machine,
)
from sgl_muse_mega.megakernel.boxes import ELEMENT_BYTES
from sgl_muse_mega.megakernel.build import Progress, quiet
from sgl_muse_mega.megakernel.compiled import Compiled
from sgl_muse_mega.megakernel.machine import Boxes
from sgl_muse_mega.megakernel.mailbox import SharedMail
from sgl_muse_mega.megakernel.protocol import RECORD_WORDS, FaultRecord
from sgl_muse_mega.megakernel.step import Step


class EmulatedModule:
    """The kernels of one instance."""

    def __init__(self, owner: "Emulator", instance: Compiled, library: KernelLibrary) -> None:
        self._owner = owner
        self._library = library
        self._shared_bytes = instance.shared_offsets["SHARED_BYTES"]
        self._sms = instance.sms

    def launch(self, kernel: str, params: ctypes.Structure) -> None:
        """Puts a launch at the end of the stream."""
        entry = self._library.kernel(kernel)
        self._owner.enqueue(Launch(entry, bytes(params), self._sms, self._shared_bytes, rank=self._owner.rank))


class Emulator:
    """A GPU of `sms` SMs in this process; memory is ordinary CPU tensors."""

    device = torch.device("cpu")
    deadline_ns = 10**12  # passes when nothing else can happen

    def __init__(
        self,
        sms: int = 4,
        schedule: Schedule = PLAIN,
        sources: Path | None = None,
        rank: int = 0,
        defines: Sequence[str] = (),
    ) -> None:
        """sources: another folder than the package's csrc to take step.cu and the phases from; rank: of an
        `EmulatedRanks`; defines: macros for every kernel."""
        self.sms = sms
        self.rank = rank
        self.schedule = schedule
        self._sources, self._defines = sources, defines
        self.statistics: Statistics | None = None  # of the last run
        self.fault_record = torch.zeros(RECORD_WORDS, dtype=torch.int64)
        self._stream: list[Launch] = []
        self.lent: dict[str, Region] = {}

    def load(self, instance: Compiled, progress: Progress = quiet) -> EmulatedModule:
        path = compile_kernels(instance.header(), self._sources, instance.source, progress, self._defines)
        return EmulatedModule(self, instance, KernelLibrary(path))

    def declare(
        self,
        memory: Sequence[tuple[str, Tensor, bool, bool]],
        step: Step | None = None,
        caches: Sequence[tuple[Tensor, Tensor]] = (),
    ) -> None:
        """`attach` for launches beside those of `step`: (name, tensor, constant, written); the step's own memory is
        added where it is not among them."""
        machine().use(declared_regions(memory, step, caches))

    def lend(self, memory: Sequence[tuple[str, Tensor, bool]]) -> None:
        for name, tensor, constant in memory:
            self.lent[name] = Region(f"rank {self.rank} {name}" if self.rank else name, tensor, constant, written=True)

    def describe_boxes(self, boxes: Boxes) -> bytes:
        """BoxDescription of csrc/emulator/instr/bulk.cuh."""
        return struct.pack("<3Q7I", boxes.address, *boxes.strides, *boxes.extents, *boxes.box, ELEMENT_BYTES)

    def enqueue(self, launch: Launch) -> None:
        self._stream.append(launch)

    def attach(self, step: Step, caches: list[tuple[Tensor, Tensor]]) -> None:
        """Declares the memory of a step: from now on every access outside it, and every read of an activation that
        was not written since, stops the run."""
        machine().use(step_regions(step, caches))

    def synchronize(self) -> None:
        """Runs what was launched. Raises EmulatorFault; a kernel that gave up adds its own sentence."""
        self.statistics = run_together([self], self.schedule)

    def take(self) -> list[Launch]:
        """The launches of the stream, which is empty afterwards."""
        stream, self._stream = self._stream, []
        return stream


class EmulatedRanks:
    """Several GPUs in this process, each with an arena that all reach; their launches run together."""

    def __init__(
        self,
        ranks: int,
        sms: int = 3,
        schedule: Schedule = PLAIN,
        sources: Path | None = None,
        session: int = 1,
        arena_bytes: int = 1 << 22,
        defines: Sequence[str] = (),
    ) -> None:
        self.machines = [Emulator(sms, schedule, sources, rank, defines) for rank in range(ranks)]
        self.schedule = schedule
        self.arenas = [torch.zeros(arena_bytes, dtype=torch.uint8) for _ in range(ranks)]
        self.session = session
        self.statistics: Statistics | None = None

    def mail(self, rank: int, session: int | None = None) -> SharedMail:
        """Rank `rank`'s place among the ranks; mailboxes are taken from the beginning of the arenas."""
        reached = [arena.data_ptr() for arena in self.arenas]
        return SharedMail(self.arenas[rank], reached, rank, self.session if session is None else session)

    def attach(self, steps: Sequence[Step], caches: Sequence[list[tuple[Tensor, Tensor]]]) -> None:
        """Declares the memory of every rank's step (`Emulator.attach`)."""
        regions: list[Region] = []
        for rank, (step, own) in enumerate(zip(steps, caches, strict=True)):
            regions += [replace(r, name=f"rank {rank} {r.name}") for r in step_regions(step, own)]
        machine().use(regions)

    def synchronize(self) -> None:
        """Runs what was launched on all ranks. Raises EmulatorFault; a kernel that gave up adds its own sentence."""
        self.statistics = run_together(self.machines, self.schedule)


def run_together(machines: Sequence[Emulator], schedule: Schedule) -> Statistics:
    """Runs the streams of the machines, one rank each. Raises EmulatorFault with the sentences of the kernels that gave
    up."""
    launches = [launch for each in machines for launch in each.take()]
    machine().lend([region for each in machines for region in each.lent.values()])
    try:
        return machine().run(launches, schedule)
    except EmulatorFault as fault:
        records = [FaultRecord.read(each.fault_record.tolist()) for each in machines]
        sentences = [record.sentence() for record in records if record]
        if not sentences:
            raise
        raise EmulatorFault(fault.kind, "\n".join([*sentences, fault.text]), schedule) from fault


def declared_regions(
    memory: Sequence[tuple[str, Tensor, bool, bool]], step: Step | None, caches: Sequence[tuple[Tensor, Tensor]]
) -> list[Region]:
    """(name, tensor, constant, written) each, and the memory of `step` that is not among them."""
    regions = [Region(*each) for each in memory]
    known = {region.tensor.data_ptr() for region in regions}
    if step is not None:
        regions += [r for r in step_regions(step, list(caches)) if r.tensor.data_ptr() not in known]
    return regions


def step_regions(step: Step, caches: list[tuple[Tensor, Tensor]]) -> list[Region]:
    """All memory a step's launches may touch."""
    regions = [Region("fault_record", step.machine.fault_record, constant=False, written=True)]
    regions += [Region(f"inputs.{f.name}", getattr(step.inputs, f.name), True, True) for f in fields(step.inputs)]
    regions += [Region(f.name, getattr(step.activations, f.name), False, False) for f in fields(step.activations)]
    regions.append(Region("taps", step.taps, constant=False, written=False))
    if step.instance.trace:
        regions.append(Region("trace", step.trace, constant=False, written=True))
    for nvfp4, variant in step.variants.items():
        for kernel, control in variant.control.items():
            label = f"{kernel}{'.nvfp4' if nvfp4 else '.bf16'}"
            regions += [Region(f"{label}.{f.name}", getattr(control, f.name), False, True) for f in fields(control)]
        if variant.mailbox.numel():
            regions.append(Region(f"{'nvfp4' if nvfp4 else 'bf16'}.mailbox", variant.mailbox, False, True))
    for index, pair in enumerate(caches):
        regions += [
            Region(f"layers.{index}.{n}", t, False, True) for n, t in zip(("keys", "values"), pair, strict=True)
        ]
    for index, layer in enumerate(step.weights.layers):
        tensors = {f.name: getattr(layer, f.name) for f in fields(layer)}
        regions += [Region(f"layers.{index}.{n}", t, True, True) for n, t in tensors.items() if isinstance(t, Tensor)]
    for index, boxes in enumerate(step.expert_boxes):
        if boxes is not None:
            regions.append(Region(f"layers.{index}.expert_boxes", boxes, constant=True, written=True))
    for name in ("embedding", "final_norm", "lm_head"):
        regions.append(Region(name, getattr(step.weights, name), constant=True, written=True))
    regions += [Region(f"rope {theta}", table, True, True) for theta, table in step._rope.items()]
    return regions
