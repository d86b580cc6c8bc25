"""Cost-aware width: how many rows of a step to verify, so that expected tokens per millisecond are highest.

cost[n] is the time of a step that verifies n rows, in ms. All arithmetic is float32, each operation rounded by itself,
sums from the first row on, so that a kernel decides the same.

Trees
-----
Nothing is drawn to choose a tree's nodes, so the decision may look at all of them: n is the first maximum of

    (P_0 + ... + P_(n-1)) / cost[n],   n = 1 .. T.

Chains
------
The drafts of a chain are drawn (or are maxima), and which of them are verified changes how their positions are settled:
by acceptance and residual, or by a draw from the target. That is exact only if the decision about slot i may be made
before draft i is drawn. It looks at drafts 1 .. i - 1 and at the distribution of draft i, never at draft i or later
ones: a stopping time. With c_i = calibrated(i, max q_i), P_i = c_1 ... c_i and E_i = 1 + P_1 + ... + P_i, slot i + 1 is
verified behind n = i + 1 rows iff for some m = 1 .. T - n

    (E_i + P_(i+1) (1 + c_(i+1) + ... + c_(i+1)^(m-1))) / cost[n + m]  >  E_i / cost[n]

that is, if going on pays should the drafts behind be worth as much as this one. Greedy chains use the same rule.
"""

import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from sgl_muse_mega.errors import UserError
from sgl_muse_mega.speculative.backend import DraftBlock
from sgl_muse_mega.speculative.calibration import State, calibrated, conditionals
from sgl_muse_mega.speculative.tree import Tree

CostTable = NDArray[np.float32]
"""ms of a step, float32 [T + 1]; entry n is that of n rows, entry 0 is not used."""

COMPOSED_COST = {
    8: {1: 11.54, 2: 12.32, 3: 12.98, 4: 13.66, 6: 14.95, 8: 16.16},
    16: {1: 12.35, 2: 13.14, 3: 13.84, 4: 14.48, 6: 15.81, 8: 17.05, 10: 18.13, 12: 19.13, 14: 19.98, 16: 20.71},
}
"""ms of a step of 62 layers by the rows that count, in a launch of 8 and in one of 16 rows: scaled from steps of 14 on
one H200 of four, see docs/tree-and-width.md."""


def only(rows: int, most: int) -> CostTable:
    """A cost table for up to `most` rows by which every step verifies `rows`: no other number is worth its time."""
    table = np.full(most + 1, 1e9, dtype=np.float32)
    table[rows] = 1e-3
    return table


def tree_rows(tree: Tree, cost: CostTable) -> int:
    """How many rows of the tree to verify, 1 .. len(tree). cost float32 [>= len(tree) + 1]."""
    expected, best, rows = np.float32(0), np.float32(-1), 1
    for n, probability in enumerate(tree.probabilities, start=1):
        expected = expected + np.float32(probability)
        rate = expected / cost[n]
        if rate > best:
            best, rows = rate, n
    return rows


def chain_rows(state: State, maxima: Sequence[float], cost: CostTable) -> int:
    """How many rows of a chain to verify, 1 .. len(maxima) + 1.

    maxima[i - 1] is the largest conditional of slot i behind drafts 1 .. i - 1. Whether slot i counts depends on
    maxima[: i] alone.
    """
    limit = len(maxima) + 1
    expected, path = np.float32(1), np.float32(1)
    for rows, q in enumerate(maxima, start=1):
        worth = calibrated(state, rows, q)
        path = path * worth
        if not _pays(expected, path, worth, cost[rows : limit + 1]):
            return rows
        expected = expected + path
    return limit


def _pays(expected: np.float32, path: np.float32, worth: np.float32, cost: CostTable) -> bool:
    """cost[0] is that of the rows so far, cost[m] that of m more."""
    rate = expected / cost[0]
    for more in cost[1:]:
        expected = expected + path
        if expected / more > rate:
            return True
        path = path * worth
    return False


def chain_maxima(block: DraftBlock, lattice: Tensor, temperature: float) -> list[float]:
    """The largest conditional of every slot behind the drafts before it; `temperature` of the request, 1 for greedy."""
    scores = lattice.float().numpy(force=True)
    chosen = (block.candidates == block.tokens[:, None]).int().argmax(dim=1).tolist()
    before = [0, *chosen[:-1]]
    return [float(conditionals(scores[slot, p], temperature).max()) for slot, p in enumerate(before)]


def interpolated(points: Mapping[int, float], rows: int) -> CostTable:
    """Cost table for 1 .. `rows` rows from measured points {rows: ms}, straight lines between them.

    Raises UserError unless the points are positive, include 1 and reach `rows`.
    """
    if not points or min(points) != 1 or max(points) < rows:
        raise UserError(
            f"The cost table has {', '.join(map(str, sorted(points))) or 'no'} rows, but times from 1 to {rows} rows "
            "are needed; measure the missing ends."
        )
    wrong = [ms for ms in points.values() if not 0 < ms < float("inf")]
    if wrong:
        raise UserError(f"The cost table holds {wrong[0]} ms; times must be positive numbers.")
    known = sorted(points)
    table = np.interp(np.arange(rows + 1), known, [points[n] for n in known]).astype(np.float32)
    table[0] = 0
    return table


def default_cost(rows: int) -> CostTable:
    """Cost table of `COMPOSED_COST` for launches of `rows` rows. Raises UserError for more rows than it has."""
    fitting = [points for most, points in sorted(COMPOSED_COST.items()) if rows <= most]
    return interpolated(fitting[0] if fitting else COMPOSED_COST[max(COMPOSED_COST)], rows)


def read_cost_table(path: Path) -> dict[int, float]:
    """Measured points from JSON {"rows": ms, ...}, as {"1": 9.8, "8": 15.1, "16": 20.2}, or the medians of a file that
    `bench step --width auto` wrote, whose "ms" also holds launches with names. Raises UserError."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if "ms" in content:
            counted = {int(rows): ms for rows, ms in content["ms"].items() if rows.isdigit()}
            return {rows: statistics.median(map(float, ms)) for rows, ms in counted.items()}
        return {int(rows): float(ms) for rows, ms in content.items()}
    except OSError as error:
        raise UserError(f"The cost table {path} cannot be read: {error.strerror}.") from None
    except (ValueError, TypeError, AttributeError):
        raise UserError(
            f'The cost table {path} is not a JSON object of rows and ms, such as {{"1": 9.8, "8": 15.1, "16": 20.2}}.'
        ) from None
