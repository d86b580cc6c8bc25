"""What a step of 62 layers takes by its rows, from measured steps of fewer layers; for `width_profiles.py`."""

import json
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from sgl_muse_mega.speculative.width import CostTable, interpolated

LAYERS = 62
BLOCK, WIDEST = 8, 16  # rows of a launch: the draft's block, the usual capacity of automatic widths, and the most
COST_FILES = {
    BLOCK: "step_costs8-2026-11-30T14-33-nvidia-h200.json",
    WIDEST: "step_costs-2026-11-30T13-14-nvidia-h200.json",
}
"""In benchmark/results, from `bench step --layers 14 --width auto --tree --nodes 8 --costs FILE`, and with 16 nodes."""
STEP_FILE = "step-2026-11-30T13-14-17-nvidia-h200.json"  # the parts of a step, from `bench step --layers 14 --save`
WITHOUT_DRAFT = ("head", "accept")  # parts of a step of plain decoding, besides the layers


@dataclass(frozen=True, slots=True)
class Costs:
    """ms of a step of `LAYERS` layers by rows, at the rows that were measured."""

    fixed: Mapping[int, float]  # a launch of so many rows, with a draft
    chosen: Mapping[int, Mapping[int, float]]  # by the rows of a launch: so many of them count
    plain: float  # one row without a draft
    planning: float  # what a step that chooses its rows takes more than one that verifies as many anyway

    def of_fixed(self) -> CostTable:
        """Chains of fixed widths; that of 1 runs no draft."""
        table = interpolated(self.fixed, WIDEST)
        table[1] = self.plain
        return table

    def of_trees(self) -> CostTable:
        """Trees of a fixed number of rows, which are planned, too."""
        return interpolated(self.fixed, WIDEST) + np.float32(self.planning)

    def of_chosen(self, capacity: int) -> CostTable:
        return interpolated(self.chosen[capacity], capacity)


def measured_costs(directory: Path) -> Costs:
    """From whole steps of few layers that one H200 ran as one rank of four: medians, their layers' share scaled.

        cost62(n) = rest + (cost14(n) - rest) 62 / 14

    with the rest of a step from its parts, each timed alone in a launch of 8 rows: draft layers, draft head, target's
    head, accept, draft context (draft and heads whole on the rank), and the gap between steps; where rows are chosen,
    with the planning, too: the difference to a chain of as many rows in the same run, since the layers do the same
    work. The rest is taken as the same for all rows and for launches of 16, although the parts were measured at context
    1024 and the steps at 2048. Not in it: the two layers with BF16 experts, a real exchange between ranks, a draft
    block wider than 8.

    Fixed widths cost what their own launches do where those were measured; above 8 rows, where not, what so many rows
    that count cost in a launch of 16, which is a little more.
    """
    step = json.loads((directory / STEP_FILE).read_text(encoding="utf-8"))
    parts = {part["name"]: statistics.median(part["us"]) / 1e3 for part in step["parts"]}
    gap = statistics.median(step["gap_us"]) / 1e3
    rest = sum(ms for name, ms in parts.items() if name != "verify layers") + gap
    plain_rest = sum(parts[name] for name in WITHOUT_DRAFT) + gap
    block = json.loads((directory / COST_FILES[BLOCK]).read_text(encoding="utf-8"))["ms"]
    planning = statistics.median(block[str(BLOCK)]) - statistics.median(block[f"chain of {BLOCK}"])
    planned = rest + planning
    chosen: dict[int, dict[int, float]] = {}
    layers: dict[int, float] = {}  # of launches with a fixed number of rows
    for capacity in sorted(COST_FILES, reverse=True):
        file = json.loads((directory / COST_FILES[capacity]).read_text(encoding="utf-8"))
        scale = LAYERS / file["options"]["layers"]
        ms = {name: statistics.median(repeats) for name, repeats in file["ms"].items()}
        chosen[capacity] = {int(n): planned + (ms[n] - planned) * scale for n in ms if n.isdigit()}
        for name in ms:
            if not name.isdigit():
                rows = int(name.split()[-1])
                # one of width 1 is without the draft's block, but writes the draft's context
                without = rest if rows > 1 else plain_rest + parts["draft context"]
                layers[rows] = (ms[name] - without) * scale
    above = {n: ms - planning for n, ms in chosen[WIDEST].items() if n > BLOCK}
    fixed = dict(sorted((above | {n: rest + ms for n, ms in layers.items()}).items()))
    return Costs(fixed, dict(sorted(chosen.items())), plain_rest + layers[1], planning)
