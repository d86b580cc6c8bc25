"""What a step needs from the machine it runs on: `cuda.CudaMachine` or `sgl_muse_mega.emulator.stepper.Emulator`."""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from sgl_muse_mega.megakernel.build import Progress
from sgl_muse_mega.megakernel.compiled import Compiled

if TYPE_CHECKING:
    from sgl_muse_mega.megakernel.step import Step


@dataclass(frozen=True, slots=True)
class Boxes:
    """A 3D array of 8-byte elements in device memory, and the box that one copy takes of it; innermost first."""

    address: int
    extents: tuple[int, int, int]  # elements
    strides: tuple[int, int]  # bytes from one y, and from one z, to the next
    box: tuple[int, int, int]  # elements, each at most 256


class Module(Protocol):
    """The kernels of one instance."""

    def launch(self, kernel: str, params: ctypes.Structure) -> None:
        """Launches `kernel` ("embed_kernel", ...) on the current stream; it may overlap the previous launch's end."""


class Machine(Protocol):
    @property
    def device(self) -> torch.device: ...

    @property
    def sms(self) -> int: ...

    @property
    def deadline_ns(self) -> int: ...

    @property
    def fault_record(self) -> Tensor:
        """int64 [RECORD_WORDS] in host memory that the kernels can write."""

    def attach(self, step: "Step", caches: list[tuple[Tensor, Tensor]]) -> None:
        """Called before the launches of `step`, whose memory (with `caches`) is then all that they may touch."""

    def declare(
        self,
        memory: Sequence[tuple[str, Tensor, bool, bool]],
        step: "Step | None" = None,
        caches: Sequence[tuple[Tensor, Tensor]] = (),
    ) -> None:
        """The same for launches beside those of `step`: (name, tensor, whether no launch may write it, whether it holds
        values) of the memory that they may touch, and `step` with its caches."""

    def lend(self, memory: Sequence[tuple[str, Tensor, bool]]) -> None:
        """Memory of others, (name, tensor, whether no launch may write it), that launches may touch from now on,
        whatever is declared; what was lent under one of the names before is taken back."""

    def describe_boxes(self, boxes: Boxes) -> bytes:
        """The description that box copies take, at most 128 bytes."""

    def load(self, instance: Compiled, progress: Progress = ...) -> Module: ...

    def synchronize(self) -> None:
        """Waits for all launches. Raises UserError with the fault record's sentence when a kernel gave up."""
