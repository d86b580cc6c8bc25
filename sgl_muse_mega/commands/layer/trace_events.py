"""Logs of launches as a file in the Trace Event format, which Perfetto (ui.perfetto.dev) and chrome://tracing open."""

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from sgl_muse_mega.commands.layer.timeline import LaunchLog, WarpLog, summarise
from sgl_muse_mega.commands.roof import ROOF_GB_S

_LAYER = 1  # process that holds the phases of all CTAs together, and the counters
_SHORTEST_WAIT_NS = 100  # shorter ones are left out: there are tens of thousands
_BIN_NS = 1000  # of the counters


def write(path: Path, launches: list[LaunchLog], first_layer: int, attention_bytes: int) -> None:
    """launches: neighbouring layers from `first_layer` on. A path that ends with .gz is compressed."""
    with _opened(path) as file:
        file.write('{"displayTimeUnit":"ns","traceEvents":[\n')
        for index, event in enumerate(events(launches, first_layer, attention_bytes)):
            file.write((",\n" if index else "") + json.dumps(event, separators=(",", ":")))
        file.write("\n]}\n")


def events(launches: list[LaunchLog], first_layer: int, attention_bytes: int) -> Iterator[dict[str, Any]]:
    """Processes are roles of warps, their threads the CTAs; of the math warps only the first is shown."""
    math_warps = launches[0].math_warps
    shown = {0: "math warp 0"} | {
        math_warps + i: name for i, name in enumerate(("weight loader", "token loader", "routing warp"))
    }
    yield _metadata("process_name", _LAYER, name="layers")
    yield _metadata("process_sort_index", _LAYER, sort_index=0)
    for warp, name in shown.items():
        yield _metadata("process_name", 2 + warp, name=name)
        yield _metadata("process_sort_index", 2 + warp, sort_index=2 + warp)
    for cta in sorted({w.cta for launch in launches for w in launch.warps}):
        for warp in shown:
            yield _metadata("thread_name", 2 + warp, cta, name=f"CTA {cta}")
    for index, launch in enumerate(launches):
        yield from _layer_events(launch, f"layer {first_layer + index}", attention_bytes)
        for log in launch.warps:
            if log.warp in shown:
                yield from _warp_events(log)
    yield from _counters(launches)


def _layer_events(launch: LaunchLog, name: str, attention_bytes: int) -> Iterator[dict[str, Any]]:
    """The launch, and its phases between the medians of their ends."""
    phases = summarise(launch, attention_bytes)
    total = sum(p.bytes for p in phases)
    us = (launch.end - launch.start) / 1e3
    figures = {"HBM bytes": total, "GB/s": total / us / 1e3, "us at the roof": total / ROOF_GB_S / 1e3}
    yield _slice(name, _LAYER, 0, launch.start, launch.end, figures)
    start = launch.start
    for phase in phases:
        end = launch.start + round(phase.median_end * 1e3)
        figures = {
            "HBM bytes": phase.bytes, "us at the roof": phase.bytes / ROOF_GB_S / 1e3, "waiting us": phase.waiting,
            "first CTA starts us": phase.first_start, "last CTA ends us": phase.last_end,
        }  # fmt: skip
        yield _slice(label(phase.name), _LAYER, 1, start, max(start, end), figures)
        start = max(start, end)


def _warp_events(log: WarpLog) -> Iterator[dict[str, Any]]:
    pid = 2 + log.warp
    for phase in log.phases:
        yield _slice(label(phase.name), pid, log.cta, phase.start, phase.end, {})
    for task in log.tasks:
        yield _slice(f"task {task.name}", pid, log.cta, task.start, task.end, {})
    for wait in log.waits:
        if wait.end - wait.start >= _SHORTEST_WAIT_NS:
            yield _slice(f"wait: {label(wait.name)}", pid, log.cta, wait.start, wait.end, {})


def _counters(launches: list[LaunchLog]) -> Iterator[dict[str, Any]]:
    """Weights taken up, in GB/s, and the bytes issued but not yet taken up."""
    issued: dict[int, int] = {}
    taken: dict[int, int] = {}
    for launch in launches:
        for log in launch.of_warp(launch.math_warps):
            for ns, size in log.issued:
                issued[ns // _BIN_NS] = issued.get(ns // _BIN_NS, 0) + size
        for ns, size, _ in launch.taken_up():
            taken[ns // _BIN_NS] = taken.get(ns // _BIN_NS, 0) + size
    ahead = 0
    for at in range(min([*issued, *taken], default=0), max([*issued, *taken], default=-1) + 2):
        ahead += issued.get(at, 0) - taken.get(at, 0)
        rate = taken.get(at, 0) / _BIN_NS
        yield _counter("weights taken up, GB/s", at * _BIN_NS, {"GB/s": rate, "roof": ROOF_GB_S})
        yield _counter("weights on the way or in the ring, MB", at * _BIN_NS, {"MB": ahead / 1e6})


def label(name: str) -> str:
    return name.lower().replace("_", " ")


def _slice(name: str, pid: int, tid: int, start: int, end: int, arguments: dict[str, Any]) -> dict[str, Any]:
    return {"ph": "X", "name": name, "pid": pid, "tid": tid, "ts": start / 1e3, "dur": (end - start) / 1e3,
            "args": arguments}  # fmt: skip


def _counter(name: str, ns: int, values: dict[str, float]) -> dict[str, Any]:
    return {"ph": "C", "name": name, "pid": _LAYER, "ts": ns / 1e3, "args": values}


def _metadata(kind: str, pid: int, tid: int = 0, **arguments: Any) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": arguments}


def _opened(path: Path) -> IO[str]:
    return gzip.open(path, "wt") if path.suffix == ".gz" else path.open("w")
