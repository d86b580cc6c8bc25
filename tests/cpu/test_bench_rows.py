"""`bench step` of trees and automatic widths, on the emulator."""

import json
import statistics
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from sgl_muse_mega.cli import app
from sgl_muse_mega.commands import bench_rows
from sgl_muse_mega.commands.bench_step import Options
from sgl_muse_mega.errors import UserError
from sgl_muse_mega.speculative.calibration import default_prior
from sgl_muse_mega.speculative.tree import Tree
from sgl_muse_mega.speculative.width import chain_rows, interpolated, only, read_cost_table, tree_rows

STEP = Options(14, 4, 3, 2048, 4.0, 0.0, 1.0, 50, 1, False)


@pytest.mark.parametrize("rows", [1, 2, 7, 16])
def test_a_forced_table_leaves_no_choice(rows: int) -> None:
    rng = np.random.default_rng(rows)
    table = only(rows, 16)
    falling = np.sort(rng.random(16).astype(np.float32))[::-1]
    tree = Tree((-1,) * 16, (0,) * 16, (5,) * 16, (1.0,) * 16, (1.0, *map(float, falling[1:])))
    assert tree_rows(tree, table) == rows
    assert chain_rows(default_prior(), [float(q) for q in rng.random(15).astype(np.float32)], table) == rows


def test_times_of_every_number_of_rows(tmp_path: Path) -> None:
    """Every step verifies as many rows as it is timed for; the written file is one that --cost-table takes, and says
    what was measured."""
    path = tmp_path / "costs.json"
    options = bench_rows.options_of(
        STEP, "auto", tree=True, nodes=2, costs=path, dry_run=True
    )  # fmt: skip
    assert bench_rows.run(options) == 0
    points = read_cost_table(path)
    assert sorted(points) == [1, 2]
    assert len(interpolated(points, 2)) == 3
    written = json.loads(path.read_text())
    assert list(written["ms"]) == ["chain of 1", "chain of 2", "chain of 3", "1", "2"]
    assert {len(ms) for ms in written["ms"].values()} == {1}
    assert points[2] == statistics.median(written["ms"]["2"])
    assert {"gpu", "date", "commit", "command"} <= written["environment"].keys()
    sizes = {"layers": 14, "width": 3, "nodes": 2, "context": 12, "emulated": True}
    assert sizes.items() <= written["options"].items()
    assert (written["row_capacity"], written["most_rows"]) == (8, 2)


def test_what_is_measured() -> None:
    auto = bench_rows.options_of(STEP, "auto", tree=True, nodes=None, costs=None, dry_run=False)
    assert list(bench_rows.cases(auto)) == ["chain of 1", "chain of 2", "chain of 3", "1", "2", "3"]
    more = bench_rows.options_of(STEP, "auto", tree=True, nodes=7, costs=None, dry_run=False)
    names = [f"chain of {n}" for n in (1, 2, 3)] + [f"tree of {n}" for n in (4, 6, 7)]
    assert list(bench_rows.cases(more)) == [*names, "1", "2", "3", "4", "6", "7"]
    launches = {name: (case.width, case.plan.nodes, case.rows) for name, case in bench_rows.cases(more).items()}
    assert launches["chain of 2"] == (2, None, 2)
    assert launches["tree of 6"] == (3, 6, 6)
    assert launches["6"] == (3, 7, 6)
    fixed = bench_rows.options_of(STEP, "3", tree=True, nodes=9, costs=None, dry_run=False)
    assert list(bench_rows.cases(fixed)) == ["chain of 3", "tree of 9"]
    chain = bench_rows.options_of(STEP, "auto", tree=False, nodes=None, costs=None, dry_run=False)
    assert bench_rows.cases(chain).keys() == bench_rows.cases(auto).keys()
    assert bench_rows.cases(chain)["2"].plan.nodes is None


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--nodes", "4"], "are for --tree and --width auto"),
        (["--dry-run"], "are for --tree and --width auto"),
        (["--width", "auto", "--nodes", "4"], "--nodes 4 is for trees"),
        (["--tree", "--costs", "there.json"], "--costs is written by --width auto"),
        (["--width", "wide"], "a number or auto"),
        (["--tree", "--nodes", "17"], "between 2 and 16 nodes"),
    ],
)
def test_refusals(arguments: list[str], sentence: str) -> None:
    result = CliRunner().invoke(app, ["bench", "step", *arguments])
    assert isinstance(result.exception, UserError)
    assert sentence in str(result.exception)
