"""Logs of a launch: what is read from them, the Trace Event file, and the picture."""

import gzip
import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sgl_muse_mega.commands.layer import picture, timeline, trace_events
from sgl_muse_mega.megakernel import protocol
from sgl_muse_mega.megakernel.build import source_directory
from sgl_muse_mega.megakernel.instance import Instance
from sgl_muse_mega.megakernel.random_step import tiny_config
from sgl_muse_mega.toolchain import find_nvcc

Log = list[tuple[int, str, int]]
MATH_WARPS = 2
CTAS = 3


def word(ns: int, point: str, value: int) -> int:
    bits = (ns % 2**40) << 24 | timeline.POINT_NAMES.index(point) << 16 | value
    return bits - 2**64 if bits >= 2**63 else bits


def words(logs: dict[tuple[int, int], Log], launches: int = 1) -> np.ndarray[Any, np.dtype[np.int64]]:
    """The same logs, by (CTA, warp), in every launch, 10 us apart."""
    found = np.zeros((launches, CTAS, MATH_WARPS + 3, protocol.LOG_WORDS), dtype=np.int64)
    for launch in range(launches):
        for (cta, warp), log in logs.items():
            found[launch, cta, warp, : len(log)] = [word(ns + 10000 * launch, *rest) for ns, *rest in log]
    return found


def site(name: str) -> int:
    return timeline.SITE_NAMES.index(name)


def logs(base: int) -> dict[tuple[int, int], Log]:
    """Every CTA: two stages of o_proj and one of the router; a wait of 500 ns inside o_proj."""
    found: dict[tuple[int, int], Log] = {}
    for cta in range(CTAS):
        at = base + 100 * cta
        found[cta, 0] = [
            (at, "START", 0), (at + 1000, "ATTENTION", 0), (at + 1200, "WAIT", site("RING_FULL")),
            (at + 1700, "GO", site("RING_FULL")), (at + 1700, "TAKEN", 0), (at + 2000, "TAKEN", 0),
            (at + 2500, "O_PROJ", 0), (at + 2600, "TAKEN", 0), (at + 3000, "ROUTER", 0),
            (at + 3500, "TASK", 7), (at + 3600, "TASK", 9), (at + 4000, "GATE_UP", 0),
        ]  # fmt: skip
        found[cta, MATH_WARPS] = [
            (at, "START", 0), (at + 10, "ISSUED", 64), (at + 20, "ISSUED", 64), (at + 30, "O_PROJ", 0),
            (at + 40, "ISSUED", 32), (at + 50, "ROUTER", 0),
        ]  # fmt: skip
    return found


@settings(max_examples=30)
@given(base=st.integers(0, 2**40 - 1) | st.integers(2**40 - 20000, 2**40 - 1))
def test_phases_waits_and_bytes_are_read_even_where_the_clock_wraps(base: int) -> None:
    launches = timeline.read(words(logs(base), launches=2), MATH_WARPS)
    assert [launch.start for launch in launches] == [0, 10000]
    phases = timeline.summarise(launches[0], attention_bytes=1000)
    assert [p.name for p in phases] == ["ATTENTION", "O_PROJ", "ROUTER", "GATE_UP"]
    assert [p.bytes for p in phases] == [1000, CTAS * 2048, CTAS * 512, 0]
    assert [p.us for p in phases] == pytest.approx([1.1, 1.5, 0.5, 1.0])
    assert [p.waiting for p in phases] == pytest.approx([0, 0.5, 0, 0])
    assert [p.last_end for p in phases] == pytest.approx([1.2, 2.7, 3.2, 4.2])
    math = launches[0].of_warp(0)[1]
    assert [(t.name, t.end - t.start) for t in math.tasks] == [("7", 500), ("9", 100)]


def test_a_launch_without_logs_is_left_out() -> None:
    found = words(logs(0), launches=2)
    found[0] = 0
    assert len(timeline.read(found, MATH_WARPS)) == 1
    assert timeline.read(np.zeros_like(found), MATH_WARPS) == []


def test_a_full_log_is_an_error() -> None:
    found = words(logs(0))
    found[0, 0, 0, -1] = word(1, "TAKEN", 0)
    with pytest.raises(ValueError, match="full"):
        timeline.read(found, MATH_WARPS)


@pytest.mark.parametrize("name", ["out.json", "out.json.gz"])
def test_file_is_the_trace_event_format(name: str, tmp_path: Path) -> None:
    launches = timeline.read(words(logs(5), launches=2), MATH_WARPS)
    trace_events.write(tmp_path / name, launches, first_layer=4, attention_bytes=1000)
    raw = (tmp_path / name).read_bytes()
    events = json.loads(gzip.decompress(raw) if name.endswith("gz") else raw)["traceEvents"]
    assert {e["ph"] for e in events} == {"M", "X", "C"}
    slices = [e for e in events if e["ph"] == "X"]
    layers = [e for e in slices if e["name"] in ("layer 4", "layer 5")]
    assert [e["args"]["HBM bytes"] for e in layers] == [1000 + CTAS * 2560] * 2
    assert any(e["name"] == "o proj" and e["args"].get("HBM bytes") == CTAS * 2048 for e in slices)
    by_track: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for event in slices:
        assert event["dur"] >= 0
        by_track.setdefault((event["pid"], event["tid"]), []).append((event["ts"], event["ts"] + event["dur"]))
    for track in by_track.values():  # slices of a track nest, or do not touch
        for a_start, a_end in track:
            for b_start, b_end in track:
                assert not (a_start < b_start - 1e-9 and b_start < a_end - 1e-9 and a_end < b_end - 1e-9)


def test_counters_add_up_to_the_bytes(tmp_path: Path) -> None:
    launches = timeline.read(words(logs(0)), MATH_WARPS)
    found = list(trace_events.events(launches, 0, 0))
    rates = [e["args"]["GB/s"] for e in found if e["ph"] == "C" and "GB/s" in e["args"]]
    assert sum(rates) * 1000 == pytest.approx(CTAS * 2560)  # bins of 1 us
    ahead = [e["args"]["MB"] for e in found if e["ph"] == "C" and "MB" in e["args"]]
    assert max(ahead) > 0
    assert ahead[-1] == pytest.approx(0)


def test_picture_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    (launch,) = timeline.read(words(logs(0)), MATH_WARPS)
    picture.draw(tmp_path / "out.png", launch, "title")
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.skipif(find_nvcc().path is None, reason="needs nvcc")
def test_marks_cost_nothing_without_a_trace(tmp_path: Path) -> None:
    """The same PTX as from sources whose marks are empty."""
    instance = Instance.for_config(tiny_config(2), nvfp4=True, fp8_cache=True, row_cap=8, sms=132)
    (tmp_path / "instance.h").write_text(instance.header())
    shutil.copytree(source_directory(), tmp_path / "csrc")
    trace = tmp_path / "csrc" / "layer" / "trace.cuh"
    found = [ptx(tmp_path)]
    trace.write_text(
        '#pragma once\n#include "instance.h"\n#include "instr/clock.cuh"\n#include "instr/memory.cuh"\n'
        "using protocol::Point;\n"
        "DEVICE void mark(const Params&, Point, uint32_t = 0) {}\nDEVICE void begin_trace() {}\n"
    )
    found.append(ptx(tmp_path))
    assert found[0] == found[1]
    assert "layer_kernel" in found[0]


def ptx(folder: Path) -> str:
    """Code of step.cu without comments."""
    command = [str(find_nvcc().path), "-std=c++17", "-O3", "-arch=compute_90a", "-ptx", f"-I{folder}"]
    command += [f"-I{folder / 'csrc'}", str(folder / "csrc" / "step.cu"), "-o", str(folder / "out.ptx")]
    subprocess.run(command, check=True, capture_output=True)
    return "\n".join(line for line in (folder / "out.ptx").read_text().splitlines() if not line.startswith("//"))
