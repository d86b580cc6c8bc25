"""Clocks, power and temperature of this machine's GPUs while something runs: one nvidia-smi that keeps printing."""

import shutil
import statistics
import subprocess
import threading
from collections import defaultdict
from typing import Any

FIELDS = ("index", "name", "clocks.sm", "clocks.mem", "power.draw", "temperature.gpu", "clocks_throttle_reasons.active")
UNITS = {"clocks.sm": "MHz", "clocks.mem": "MHz", "power.draw": "W", "temperature.gpu": "C"}
IDLE = 1  # the throttle reason of a GPU with nothing to do


class GpuState:
    """Samples between `with` and its end; `result` says what was seen, or why nothing was."""

    def __init__(self, interval_ms: int = 1000, program: str = "nvidia-smi") -> None:
        self._command = [
            program, f"--query-gpu={','.join(FIELDS)}", "--format=csv,noheader,nounits", f"--loop-ms={interval_ms}"
        ]  # fmt: skip
        self._process: subprocess.Popen[str] | None = None
        self._rows: list[list[str]] = []
        self._other: list[str] = []

    def __enter__(self) -> "GpuState":
        if shutil.which(self._command[0]):
            self._process = subprocess.Popen(
                self._command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
            )
            self._reader = threading.Thread(target=self._read, daemon=True)
            self._reader.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._process:
            self._process.terminate()
            self._process.wait()
            self._reader.join()

    def _read(self) -> None:
        assert self._process is not None
        assert self._process.stdout is not None
        for line in self._process.stdout:
            parts = [part.strip() for part in line.split(",")]
            if len(parts) == len(FIELDS):
                self._rows.append(parts)
            else:
                self._other.append(line.strip())

    def result(self) -> dict[str, Any]:
        """Per GPU: median, min and max of each number, samples, and reasons for lower clocks seen (bits as the driver
        names them); {"missing": why} without a sample."""
        if self._process is None:
            return {"missing": f"{self._command[0]} is not on this machine"}
        if not self._rows:
            return {"missing": f"{self._command[0]} said: {' '.join(self._other)[:300] or 'nothing'}"}
        by_gpu: dict[str, list[list[str]]] = defaultdict(list)
        for row in self._rows:
            by_gpu[row[0]].append(row)
        return {f"gpu{index}": _gpu(rows) for index, rows in sorted(by_gpu.items())}


def _gpu(rows: list[list[str]]) -> dict[str, Any]:
    found: dict[str, Any] = {"name": rows[0][1], "samples": len(rows)}
    for place, name in enumerate(FIELDS):
        if name in UNITS:
            values = [float(row[place]) for row in rows if row[place].replace(".", "", 1).isdigit()]
            if values:
                spread = {"median": statistics.median(values), "min": min(values), "max": max(values)}
                found[name] = spread | {"unit": UNITS[name]}
    active = {int(row[-1], 16) & ~IDLE for row in rows if row[-1].startswith("0x")}
    found["throttle_reasons"] = [f"0x{bits:x}" for bits in sorted(active) if bits]
    return found
