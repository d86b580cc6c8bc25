"""Results on disk: one file per measuring run, and the table of named figures that the README and the plots read."""

import json
import os
import platform
import re
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from sgl_muse_mega.errors import UserError
from sgl_muse_mega.toolchain import installed_version

_SOURCE = Path(__file__).parent.parent


@dataclass(frozen=True, slots=True)
class Figure:
    """One named number of a run: median, smallest and largest of its values, and how many observations they rest on."""

    median: float
    min: float
    max: float
    n: int
    unit: str

    @classmethod
    def of(cls, values: Sequence[float], unit: str, n: int | None = None) -> "Figure":
        """From repeats. `n` is given where each value already sums up several observations."""
        return cls(statistics.median(values), min(values), max(values), len(values) if n is None else n, unit)


def results_directory() -> Path:
    """benchmark/results of the source checkout, or of the working directory where there is no checkout."""
    root = _SOURCE if (_SOURCE / "pyproject.toml").is_file() else Path.cwd()
    return root / "benchmark" / "results"


def check_writable() -> None:
    """Raises UserError when `save` would fail: before a long run, not after it."""
    directory = results_directory()
    _read_figures(directory / "figures.json")
    existing = next(folder for folder in (directory, *directory.parents) if folder.exists())
    try:
        with tempfile.TemporaryFile(dir=existing):
            pass
    except OSError as error:
        raise _unwritable(directory, error) from None


def environment(gpu: str | None, program: Sequence[str] = ("sgl-muse-mega",)) -> dict[str, Any]:
    """Where and how a run was made; `gpu` names the device that did the work, None is the CPU. program: what was
    started, without its arguments."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "gpu": gpu or "cpu",
        "driver": driver_version() if gpu else None,
        "cpu": _cpu_name(),
        "cpu_count": os.cpu_count(),
        "python": platform.python_version(),
        "torch": installed_version("torch"),
        "commit": _commit(),
        "command": shlex.join([*program, *sys.argv[1:]]),
    }


def save(
    command: str, environment: Mapping[str, Any], content: Mapping[str, Any], figures: Mapping[str, Figure]
) -> Path:
    """Write <command>-<date>-<gpu>.json and enter the figures into figures.json; return the path of the first.

    Both files are replaced in one step each, so that a reader never sees half of one.
    Raises UserError if figures.json exists and is not a JSON object, or if the folder cannot be written.
    """
    directory = results_directory()
    stamp = re.sub(r"[^0-9T]+", "-", environment["date"].removesuffix("+00:00"))
    gpu = re.sub(r"[^a-z0-9]+", "-", environment["gpu"].lower()).strip("-")
    path = directory / f"{command}-{stamp}-{gpu}.json"
    table = _read_figures(directory / "figures.json")
    source = {name: environment[name] for name in ("gpu", "driver", "date", "commit", "command")}
    for name, figure in figures.items():
        numbers = {"median": figure.median, "min": figure.min, "max": figure.max, "n": figure.n, "unit": figure.unit}
        table[name] = {**numbers, **source, "file": path.name}
    try:
        directory.mkdir(parents=True, exist_ok=True)
        _replace(path, {"environment": dict(environment), **content})
        if figures:
            _replace(directory / "figures.json", dict(sorted(table.items())))
    except OSError as error:
        raise _unwritable(directory, error) from None
    return path


def _unwritable(directory: Path, error: OSError) -> UserError:
    return UserError(f"The results cannot be written to {directory}: {error}.")


def driver_version() -> str | None:
    """Version of the NVIDIA driver, or None without one."""
    query = ["--query-gpu=driver_version", "--format=csv,noheader"]
    lines = _output(["nvidia-smi", *query]) if shutil.which("nvidia-smi") else None
    return lines.splitlines()[0].strip() if lines else None


def _commit() -> str | None:
    """Commit of the source checkout; "+changes" if tracked files differ from it, results apart."""
    if not (_SOURCE / ".git").exists():
        return None
    commit = _output(["git", "-C", str(_SOURCE), "rev-parse", "HEAD"])
    ignore = ["--untracked-files=no", "--", ".", ":!benchmark/results"]
    changes = _output(["git", "-C", str(_SOURCE), "status", "--porcelain", *ignore])
    return f"{commit.strip()}+changes" if commit and changes else commit and commit.strip()


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    names = re.findall(r"^model name\s*: (.*)$", info.read_text(), re.MULTILINE) if info.is_file() else []
    return names[0] if names else platform.machine()


def _output(command: list[str]) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def _read_figures(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        table = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}.") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not JSON ({error}); repair or remove it before saving figures.") from None
    if not isinstance(table, dict):
        raise UserError(f"{path} is not a JSON object; repair or remove it before saving figures.")
    return table


def _replace(path: Path, content: object) -> None:
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        draft.write_text(json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False) + "\n", encoding="utf-8")
        os.replace(draft, path)
    finally:
        draft.unlink(missing_ok=True)
