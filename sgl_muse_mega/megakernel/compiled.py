"""What the compiler and a machine need to know of an instance: the target's, the draft's or the accept rule's."""

from typing import Protocol


class Compiled(Protocol):
    """A set of sizes that one source file is compiled for."""

    @property
    def source(self) -> str:
        """File in csrc with the kernels' entry points."""

    @property
    def kernels(self) -> tuple[str, ...]:
        """Names of the entry points."""

    @property
    def sms(self) -> int:
        """CTAs of a launch, one per SM."""

    @property
    def threads(self) -> int:
        """Threads of a CTA."""

    @property
    def shared_offsets(self) -> dict[str, int]:
        """Layout of the CTA's shared memory; SHARED_BYTES is its size."""

    def header(self) -> str:
        """Text of instance.h."""

    def describe(self) -> str:
        """One line for logs and cache entries."""
