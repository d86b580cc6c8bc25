"""How work is cut, for the instances of all kernels: dense products, expert tasks, packets, sizes over ranks."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sgl_muse_mega.config import DraftConfig, TargetConfig

BLOCK_ROWS = 64  # weight rows of a dense task
WARP = 32
PACKET_COLUMNS, PACKET_BYTES = 4, 16  # what ranks send each other (packet.cuh)


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


@dataclass(frozen=True, slots=True)
class Dense:
    """A dense product [n, k]: how it is cut into blocks of 64 rows and chunks of `chunk` inputs (schedule.cuh)."""

    n: int
    k: int
    chunk: int
    sms: int
    element_bytes: int = 2
    whole_k: bool = False

    @property
    def blocks(self) -> int:
        return -(-self.n // BLOCK_ROWS)

    @property
    def chunks(self) -> int:
        return self.k // self.chunk

    @property
    def workers(self) -> int:
        return min(self.blocks * self.chunks, self.sms)

    def first_unit(self, worker: int) -> int:
        return worker * self.blocks * self.chunks // self.workers

    def worker_of(self, unit: int) -> int:
        return ((unit + 1) * self.workers - 1) // (self.blocks * self.chunks)

    @property
    def parts(self) -> int:
        """Most CTAs that share a block: the number of partial sums to keep per output."""
        if self.whole_k:
            return 1
        ends = ((b * self.chunks, (b + 1) * self.chunks - 1) for b in range(self.blocks))
        return max(self.worker_of(last) - self.worker_of(first) + 1 for first, last in ends)

    @property
    def stage_bytes(self) -> int:
        return padded_rows(BLOCK_ROWS, self.chunk * self.element_bytes)

    def partial_shape(self, row_cap: int) -> tuple[int, int, int, int]:
        """f32 [blocks, parts, rows, 64]."""
        return (self.blocks, self.parts, row_cap, BLOCK_ROWS)


@dataclass(frozen=True, slots=True)
class Tiles:
    """How a task on NVFP4 experts is cut.

    A task is `tiles` n64 tiles side by side over all k16 steps. Its weights come in boxes of `steps` steps, at most
    `boxes` of them in a stage; in a box each of the `k_parts` warps behind each other has two steps.
    """

    tiles: int
    steps: int
    k_parts: int
    boxes: int

    @property
    def box_bytes(self) -> int:
        return self.tiles * self.steps * 576


def padded_rows(rows: int, row_bytes: int) -> int:
    """Shared-memory bytes of a chunk of `rows` rows (ring.cuh, row_offset)."""
    return -(-rows // 2) * (2 * row_bytes + 64)


def mail_offsets(packets: Mapping[str, int]) -> dict[str, int]:
    """First packet of each exchange point in what one source fills of a half of a mailbox, and their number."""
    starts = itertools.accumulate(packets.values(), initial=0)
    return dict(zip([*(f"{name}_MAIL_AT" for name in packets), "MAIL_PACKETS"], starts, strict=True))


def uneven_sizes(config: TargetConfig | DraftConfig, names: Sequence[str], ranks: int) -> list[str]:
    """Which of these sizes do not divide among the ranks."""
    return [f"{name} = {getattr(config, name)}" for name in names if getattr(config, name) % ranks]


def largest(candidates: tuple[int, ...], divides: int) -> int | None:
    """The first of the candidates that divides the number."""
    return next((c for c in candidates if divides % c == 0), None)
