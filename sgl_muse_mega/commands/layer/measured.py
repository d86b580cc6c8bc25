"""What the turns of an arm add up to."""

import statistics
from dataclasses import dataclass, field
from typing import Any

from sgl_muse_mega.commands.roof import ROOF_GB_S
from sgl_muse_mega.results import Figure


@dataclass(slots=True)
class Case:
    """One arm at one number of rows. Repeat i of turn t ran draw (t * repeats + i) % draws."""

    arm: str
    rows: int
    layers: int
    experts: list[list[int]]  # distinct local experts [draws][layers]
    bytes: list[int]  # of the chain, [draws]
    turns: list[list[float]] = field(default_factory=list)  # us per layer

    def add(self, answer: dict[str, Any]) -> None:
        """One turn: the embedding, which the chain begins with, is taken off by its median."""
        embed = statistics.median(answer["embed_us"])
        self.turns.append([(us - embed) / self.layers for us in answer["chain_us"]])

    @property
    def us(self) -> list[float]:
        return [us for turn in self.turns for us in turn]

    @property
    def speeds(self) -> list[float]:
        """GB/s of every repeat, each over the bytes of its own draw."""
        draws = len(self.bytes)
        return [self.bytes[i % draws] / self.layers / us / 1e3 for i, us in enumerate(self.us)]

    @property
    def fractions(self) -> list[float]:
        return [speed / ROOF_GB_S for speed in self.speeds]

    @property
    def megabytes(self) -> float:
        """Per layer, mean of the draws."""
        return statistics.mean(self.bytes) / self.layers / 1e6

    @property
    def mean_experts(self) -> float:
        return statistics.mean(count for counts in self.experts for count in counts)

    def ratios_to(self, other: "Case") -> list[float]:
        """us of `other` over ours, turn by turn: above 1 where this arm is faster."""
        pairs = zip(other.turns, self.turns, strict=True)
        return [statistics.median(a) / statistics.median(b) for a, b in pairs]

    def content(self) -> dict[str, Any]:
        return {
            "arm": self.arm, "rows": self.rows, "us": self.turns, "bytes": self.bytes, "distinct_experts": self.experts,
            "median_us": statistics.median(self.us), "gb_s": statistics.median(self.speeds),
            "fraction": statistics.median(self.fractions),
        }  # fmt: skip


def of_roof(case: Case) -> Figure:
    return Figure.of(case.fractions, "of the measured roof")
