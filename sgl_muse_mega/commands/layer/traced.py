"""The traced run of `bench layer`: a file for Perfetto, a picture, and where the time goes, phase by phase."""

import statistics
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from rich import box
from rich.table import Table

from sgl_muse_mega.commands.layer import picture, timeline, trace_events
from sgl_muse_mega.commands.layer.session import ArmSpec, Session
from sgl_muse_mega.commands.layer.timeline import PhaseSummary
from sgl_muse_mega.commands.roof import ROOF_GB_S
from sgl_muse_mega.errors import UserError

_NEIGHBOURS = 2  # layers in the file


def session(spec: ArmSpec, workload: Mapping[str, Any], rows: int) -> Session:
    """A traced build of `spec`."""
    return Session([replace(spec, tuning=spec.tuning | {"trace": True})], dict(workload) | {"rows": [rows]})


def run(
    session: Session, workload: Mapping[str, Any], rows: int, trace: Path | None, drawing: Path | None
) -> tuple[Table, list[list[PhaseSummary]]]:
    """Runs the chain once and writes what is asked for. The table, and the phases of every layer.

    Raises UserError when the kernels cannot be traced or a file cannot be written.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "logs.npy"
        ((name, answer),) = session.ask("logs", rows=rows, path=str(path)).items()
        try:
            launches = timeline.read(np.load(path), answer["math_warps"])
        except ValueError as error:
            raise UserError(f"The trace is not whole: {error}; use fewer rows or NVFP4 experts.") from error
        gpu = session.descriptions[name]["gpu"]
    cache_bytes = answer["cache_bytes"]
    phases = [timeline.summarise(each, size) for each, size in zip(launches, cache_bytes, strict=True)]
    first = min(2, len(launches) - 1)
    try:
        if trace:
            trace_events.write(trace, launches[first : first + _NEIGHBOURS], first, cache_bytes[first])
        if drawing:
            title = f"One layer, {rows} rows, context {workload['context']}, {share(workload['ranks'])}, {gpu}"
            picture.draw(drawing, launches[first], title)
    except OSError as error:
        raise UserError(f"{error.filename} cannot be written: {error.strerror}.") from error
    return table(phases), phases


def share(ranks: int) -> str:
    """What a rank of so many has (`arm.Workload`)."""
    return "one rank of four, no exchange" if ranks == 1 else f"one rank of {ranks}, loop-back exchange"


def table(layers: list[list[PhaseSummary]]) -> Table:
    """Medians over the layers; a phase's time lies between the medians, over CTAs, of its end and the end before."""
    shown = Table("phase", "us", "at the roof", "MB", "waiting", "last CTA - median", box=box.SIMPLE)
    total, roof = 0.0, 0.0
    for phases in zip(*layers, strict=True):
        us, waiting, late = (
            statistics.median(values)
            for values in zip(*((p.us, p.waiting, p.last_end - p.median_end) for p in phases), strict=True)
        )
        size = statistics.mean(p.bytes for p in phases)
        total += us
        roof += size / ROOF_GB_S / 1e3
        at_roof = f"{size / ROOF_GB_S / 1e3:.1f}" if size else ""
        shown.add_row(
            trace_events.label(phases[0].name), f"{us:.1f}", at_roof, f"{size / 1e6:.1f}", f"{waiting:.1f}",
            f"{late:.1f}",
        )  # fmt: skip
    shown.add_row("all, traced", f"{total:.1f}", f"{roof:.1f}", "", "", "")
    return shown
