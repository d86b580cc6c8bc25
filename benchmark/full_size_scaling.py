"""How the full-size step scales with GPUs: one table and one plot of several files of full_size.py.

    python benchmark/full_size_scaling.py full.json full-2.json full-1.json --plot docs/full-size.svg

Fewer GPUs hold fewer layers. What is missing of the 62 is taken as so many more of the run's NVFP4 layers, in time and
in bytes; the two layers with BF16 experts, draft, heads and the host's gap are those of the run. The roof is what the
measured stream of one GPU takes for the bytes of each layer's busiest rank.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from full_size_model import LAYERS
from full_size_report import GOAL_LENGTH, roof_ms, row


@dataclass(frozen=True, slots=True)
class Point:
    """One number of rows on so many GPUs; times in ms."""

    rows: int
    ranks: int
    layers: int
    ms: float  # of a step as it ran, with the host's gap
    layer_ms: float  # of an NVFP4 layer
    layer_roof_ms: float
    roof_ms: float  # of the step as it ran
    stock_ms: float | None = None

    @property
    def missing(self) -> int:
        return LAYERS - self.layers

    @property
    def scaled_ms(self) -> float:
        return self.ms + self.missing * self.layer_ms

    @property
    def scaled_roof_ms(self) -> float:
        return self.roof_ms + self.missing * self.layer_roof_ms


def points(content: dict[str, Any]) -> list[Point]:
    """Of one file."""
    sizes = content["sizes"]
    found = []
    for case in content["cases"]:
        stock = sorted(content.get("stock", {}).get("ms", [])) if case["rows"] == 8 else []
        found.append(
            Point(
                case["rows"], sizes["ranks"], sizes["layers"], case["ms"] + case["gap_ms"],
                case["parts"]["NVFP4 layer"], roof_ms(case["nvfp4_layer_bytes"]), roof_ms(case["bytes"]),
                stock[len(stock) // 2] if stock else None,
            )
        )  # fmt: skip
    return found


def table(found: Sequence[Point]) -> list[str]:
    """One line for every number of rows and GPUs, the fewest GPUs first; faster: than on the fewest."""
    lines = [
        row(["rows", "GPUs", "layers", "step", "layer", "layer's", f"step of {LAYERS}", "its", "of", "faster",
             "tokens/s", "stock's", "stock /"], 12),
        row(["", "", "run", "ms", "us", "roof us", "layers, ms", "roof ms", "roof", "", f"at {GOAL_LENGTH}", "step ms",
             "ours"], 12),
    ]  # fmt: skip
    for rows in sorted({point.rows for point in found}):
        same = sorted((point for point in found if point.rows == rows), key=lambda point: point.ranks)
        for p in same:
            cells = [
                p.rows, p.ranks, p.layers, p.ms, f"{p.layer_ms * 1e3:.1f}", f"{p.layer_roof_ms * 1e3:.1f}",
                p.scaled_ms, p.scaled_roof_ms, p.scaled_roof_ms / p.scaled_ms, same[0].scaled_ms / p.scaled_ms,
                f"{GOAL_LENGTH / p.scaled_ms * 1e3:.1f}", p.stock_ms, p.stock_ms / p.ms if p.stock_ms else None,
            ]  # fmt: skip
            lines.append(row(cells, 12))
    return lines


def draw(path: Path, found: Sequence[Point]) -> None:
    """us of a layer and ms of a whole step against GPUs, with their roofs."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "full size"
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(9, 4), constrained_layout=True)
    ranks = sorted({point.ranks for point in found})
    for number, rows in enumerate(sorted({point.rows for point in found})):
        same = sorted((point for point in found if point.rows == rows), key=lambda point: point.ranks)
        across, colour = [point.ranks for point in same], f"C{number}"
        left.plot(across, [p.layer_ms * 1e3 for p in same], "-o", color=colour, label=f"{rows} rows")
        left.plot(across, [p.layer_roof_ms * 1e3 for p in same], ":", color=colour)
        right.plot(across, [p.scaled_ms for p in same], "-o", color=colour)
        right.plot(across, [p.scaled_roof_ms for p in same], ":", color=colour)
    left.plot([], [], ":", color="black", label="roof of the busiest rank")
    for axis, title in ((left, "NVFP4 layer, us"), (right, f"step of {LAYERS} layers, ms")):
        axis.set_xscale("log", base=2)
        axis.set_xticks(ranks, map(str, ranks))
        axis.minorticks_off()
        axis.set_ylim(bottom=0)
        axis.set_xlabel("GPUs")
        axis.set_title(title, fontsize=10)
        axis.grid(alpha=0.3)
    left.legend(fontsize=8)
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    pyplot.close(figure)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", type=Path, nargs="+", help="what full_size.py --json wrote")
    parser.add_argument("--plot", type=Path, help="draw to this file (.svg or .png)")
    given = parser.parse_args(arguments)
    found = [point for path in given.files for point in points(json.loads(path.read_text(encoding="utf-8")))]
    for line in table(found):
        print(line)
    if given.plot:
        draw(given.plot, found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
