"""`sgl-muse-mega bench step --tree` or `--width auto`: what a step takes by the number of its rows that count."""

import json
import statistics
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
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
from sgl_muse_mega.speculative.width import CostTable

ROWS = (1, 2, 3, 4, 6, 8, 10, 12, 14, 16)
WARM_UP = 3


@dataclass(frozen=True, slots=True)
class Options:
    """step: the sizes, whose width is the draft's block. automatic: every number of rows, else all of them."""

    step: bench_step.Options
    automatic: bool
    nodes: int | None  # rows of a tree
    costs: Path | None  # where to write a table for --cost-table
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
        nodes = nodes or (MAX_NODES if automatic else step.width)
    return Options(step, automatic, nodes, costs, dry_run)


def forced(rows: int, most: int) -> CostTable:
    """A cost table by which every step verifies `rows` rows: no other number is worth its time."""
    table = np.full(most + 1, 1e9, dtype=np.float32)
    table[rows] = 1e-3
    return table


def plans(options: Options) -> dict[str, RowPlan]:
    """What is measured, by name: a number of rows, or a kind of step."""
    most, nodes = options.most_rows, options.nodes
    found: dict[str, RowPlan] = {f"chain of {options.step.width}": CHAIN}
    if not options.automatic:
        return found | {f"tree of {most}": RowPlan(nodes)}
    counts = sorted({rows for rows in ROWS if rows < most} | {most})
    return found | {str(rows): RowPlan(nodes, forced(rows, most)) for rows in counts}


def run(options: Options) -> int:
    """Measure, print, and save if asked. Raises UserError without a Hopper GPU, unless it is a dry run."""
    for plan in plans(options).values():
        plan.check(options.step.width)
    loop = small_loop(options) if options.dry_run else real_loop(options)
    times = {name: time_steps(loop, options, plan) for name, plan in plans(options).items()}
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
    if options.costs is not None:
        points = {name: statistics.median(ms) for name, ms in times.items() if name.isdigit()}
        options.costs.write_text(json.dumps(points) + "\n", encoding="utf-8")
    if options.step.save:
        print(results.save("rows", results.environment(gpu), content(options, times), {}))
    return 0


def content(options: Options, times: dict[str, list[float]]) -> dict[str, Any]:
    """Everything measured, for the results file."""
    step = {name: getattr(options.step, name) for name in bench_step.Options.__slots__}
    own = {"automatic": options.automatic, "nodes": options.nodes, "emulated": options.dry_run}
    return {"options": step | own, "ms": times}


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


def time_steps(loop: DecodeLoop, options: Options, plan: RowPlan) -> list[float]:
    """ms of steps of this plan, all from the same place in the context on.

    Raises UserError when a step did not verify the rows that it should.
    """
    step = options.step
    loop.length = step.context
    params = bench_step.sampling(step)
    loop.begin(5, params, width=step.width, max_new_tokens=1 << 40, stop_ids=(), plan=plan)
    rows = options.most_rows if plan is not CHAIN else step.width
    if plan.cost is not None:
        rows = int(plan.cost[1:].argmin()) + 1
    if options.dry_run:
        return [_host_step(loop, rows) for _ in range(step.repeats)]
    steps, _ = bench_step.time_steps(loop, step.repeats, rows)
    return [us / 1e3 for us in steps]


def _host_step(loop: DecodeLoop, rows: int) -> float:
    start = time.perf_counter()
    bench_step.check_rows(loop.next_step(), rows)
    return (time.perf_counter() - start) * 1e3
