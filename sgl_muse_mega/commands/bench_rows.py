"""`sgl-muse-mega bench step --tree` or `--width auto`: what a step takes by the number of its rows that count."""

import json
import statistics
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from sgl_muse_mega import results
from sgl_muse_mega.checkpoint import tiny
from sgl_muse_mega.checkpoint.draft import load_draft
from sgl_muse_mega.checkpoint.target import load_target
from sgl_muse_mega.commands import bench_step
from sgl_muse_mega.config import load_draft_config, load_target_config
from sgl_muse_mega.emulator.stepper import Emulator
from sgl_muse_mega.errors import UserError
from sgl_muse_mega.megakernel.cuda import CudaMachine
from sgl_muse_mega.megakernel.decode_backend import decode_backend
from sgl_muse_mega.megakernel.decode_loop import CHAIN, DecodeLoop
from sgl_muse_mega.speculative.rows import RowPlan
from sgl_muse_mega.speculative.tree import MAX_NODES
from sgl_muse_mega.speculative.width import only

ROWS = (1, 2, 3, 4, 6, 8, 10, 12, 14, 16)
WARM_UP = 3


@dataclass(frozen=True, slots=True)
class Options:
    """step: the sizes, whose width is the draft's block. automatic: every number of rows, else all of them."""

    step: bench_step.Options
    automatic: bool
    nodes: int | None  # rows of a tree
    costs: Path | None  # where to write all of it, for --cost-table
    dry_run: bool

    @property
    def most_rows(self) -> int:
        return self.nodes or self.step.width


def options_of(
    step: bench_step.Options, width: str, *, tree: bool, nodes: int | None, costs: Path | None, dry_run: bool
) -> Options:
    """width: as it was asked for. Raises UserError for what does not go together."""
    automatic = width == "auto"
    if nodes is not None and not tree:
        raise UserError(f"--nodes {nodes} is for trees; add --tree or leave it out.")
    if costs is not None and not automatic:
        raise UserError("--costs is written by --width auto; add it or leave --costs out.")
    if dry_run:
        step = replace(step, context=min(step.context, 12), repeats=1)
    if tree:
        nodes = step.width if nodes is None else nodes
    return Options(step, automatic, nodes, costs, dry_run)


@dataclass(frozen=True, slots=True)
class Case:
    """Steps over a block of `width` rows, of which `rows` are verified for their own sake."""

    width: int
    plan: RowPlan
    rows: int


def cases(options: Options) -> dict[str, Case]:
    """What is measured, by name: a number of rows that count in the launch of most, or a launch of so many rows.

    Chains of fewer rows than the block, and trees of more, are what a chosen number competes with: launches of their
    own. One of width 1 runs no draft.
    """
    block, most, nodes = options.step.width, options.most_rows, options.nodes
    if not options.automatic:
        return {f"chain of {block}": Case(block, CHAIN, block), f"tree of {most}": Case(block, RowPlan(nodes), most)}
    counts = sorted({rows for rows in ROWS if rows < most} | {block, most})
    chains = {f"chain of {rows}": Case(rows, CHAIN, rows) for rows in counts if rows <= block}
    trees = {f"tree of {rows}": Case(block, RowPlan(rows), rows) for rows in counts if rows > block}
    chosen = {str(rows): Case(block, RowPlan(nodes, only(rows, most)), rows) for rows in counts if rows <= most}
    return chains | trees | chosen


def run(options: Options) -> int:
    """Measure, print, and save if asked. Raises UserError without a Hopper GPU, unless it is a dry run."""
    measured = cases(options)
    for case in measured.values():
        case.plan.check(case.width)
    loop = small_loop(options) if options.dry_run else real_loop(options)
    times = {name: time_steps(loop, options, case) for name, case in measured.items()}
    console = Console(soft_wrap=True)
    gpu = None if options.dry_run else torch.cuda.get_device_name()
    kind = f"a tree of {options.nodes}" if options.nodes else "a chain"
    console.print(
        f"{gpu or 'the emulator, whose times say nothing'}: {kind}, block of {options.step.width}, context "
        f"{options.step.context}, {options.step.repeats} repeats"
    )
    table = Table("rows that count", "ms (min..max)")
    for name, ms in times.items():
        table.add_row(name, f"{statistics.median(ms):.3f} ({min(ms):.3f}..{max(ms):.3f})")
    console.print(table)
    environment, all_of_it = results.environment(gpu), content(options, loop, times)
    if options.costs is not None:
        text = json.dumps({"environment": environment, **all_of_it}, indent=1)
        options.costs.write_text(text + "\n", encoding="utf-8")
    if options.step.save:
        print(results.save("rows", environment, all_of_it, {}))
    return 0


def content(options: Options, loop: DecodeLoop, times: dict[str, list[float]]) -> dict[str, Any]:
    """Everything measured: ms of every repeat, by the names of `cases`."""
    step = {name: getattr(options.step, name) for name in bench_step.Options.__slots__}
    own = {"automatic": options.automatic, "nodes": options.nodes, "emulated": options.dry_run}
    return {"options": step | own, "row_capacity": loop.width_limit, "most_rows": options.most_rows, "ms": times}


def real_loop(options: Options) -> DecodeLoop:
    """Random weights of Muse Spark's sizes on the GPU."""
    return bench_step.build(options.step, CudaMachine(), rows=options.most_rows)


def small_loop(options: Options) -> DecodeLoop:
    """The bundled pair on the emulator."""
    target, draft = tiny.target_directory(), tiny.draft_directory()
    config, draft_config = load_target_config(target), load_draft_config(draft)
    room = (options.step.repeats + WARM_UP + 3) * options.step.width + MAX_NODES
    loop = decode_backend(
        config, load_target(target, config), draft_config, load_draft(draft, draft_config), machine=Emulator(),
        width=max(options.step.width, options.most_rows), max_context=options.step.context + room,
    )  # fmt: skip
    loop.prefill([5] * options.step.context)
    return loop


def time_steps(loop: DecodeLoop, options: Options, case: Case) -> list[float]:
    """ms of such steps, all from the same place in the context on.

    Raises UserError when a step did not verify the rows that it should.
    """
    step = options.step
    loop.length = step.context
    params = bench_step.sampling(step)
    loop.begin(5, params, width=case.width, max_new_tokens=1 << 40, stop_ids=(), plan=case.plan)
    if options.dry_run:
        return [_host_step(loop, case.rows) for _ in range(step.repeats)]
    steps, _ = bench_step.time_steps(loop, step.repeats, case.rows)
    return [us / 1e3 for us in steps]


def _host_step(loop: DecodeLoop, rows: int) -> float:
    start = time.perf_counter()
    bench_step.check_rows(loop.next_step(), rows)
    return (time.perf_counter() - start) * 1e3
