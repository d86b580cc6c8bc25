"""Finds what compiling the kernels needs on this machine, and where the results are kept."""

import importlib.metadata
import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

_WHEELS = ("nvidia-cuda-nvcc", "nvidia-cuda-nvcc-cu12")
_DISASSEMBLER_WHEEL = "nvidia-cuda-nvdisasm"


@dataclass(frozen=True, slots=True)
class Tool:
    """A program of the CUDA toolkit, or why there is none."""

    path: Path | None
    source: str  # where it was found, or every place that was searched


def find_nvcc() -> Tool:
    """Search CUDA_HOME, then PATH, then the nvcc wheel; the first that holds an executable wins.

    CUDA_HOME may be a list with empty entries, as `CUDA_HOME=$CUDA_HOME:/usr/local/cuda` leaves behind when it was not
    set; an empty value counts as unset. No path is ever made from an empty part.
    """
    searched = []
    value = os.environ.get("CUDA_HOME")
    if value is None:
        searched.append("CUDA_HOME is not set")
    else:
        entries = [entry for entry in value.split(os.pathsep) if entry.strip()]
        for entry in entries:
            candidate = Path(entry) / "bin" / "nvcc"
            if _executable(candidate):
                return Tool(candidate, "CUDA_HOME" if value == entry else f"CUDA_HOME, which is {value!r}")
        searched.append(f"CUDA_HOME is {value!r}, with no bin/nvcc" if entries else "CUDA_HOME is set but empty")
    on_path = shutil.which("nvcc")
    if on_path:
        return Tool(Path(on_path), f"PATH; {searched[0]}" if value is not None else "PATH")
    searched.append("none on PATH")
    for name in _WHEELS:
        found = _in_wheel(name, "nvcc")
        if found:
            return Tool(found, f"wheel {name}; {searched[0]}" if value is not None else f"wheel {name}")
    searched.append(f"no wheel {' or '.join(_WHEELS)}")
    return Tool(None, ", ".join(searched))


def nvcc_release(nvcc: Path) -> str | None:
    """The release that it says it is of, such as 13.0; None when it does not run."""
    try:
        done = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=False)
    except OSError:  # not a program
        return None
    release = None if done.returncode else re.search(r"release ([\d.]+)", done.stdout)
    return release[1] if release else None


def find_nvdisasm() -> Tool:
    """The disassembler beside nvcc, else on PATH, else of its wheel."""
    nvcc = find_nvcc().path
    if nvcc and _executable(nvcc.with_name("nvdisasm")):
        return Tool(nvcc.with_name("nvdisasm"), "the folder of nvcc")
    on_path = shutil.which("nvdisasm")
    if on_path:
        return Tool(Path(on_path), "PATH")
    found = _in_wheel(_DISASSEMBLER_WHEEL, "nvdisasm")
    if found:
        return Tool(found, f"wheel {_DISASSEMBLER_WHEEL}")
    return Tool(None, f"none beside nvcc or on PATH, no wheel {_DISASSEMBLER_WHEEL}")


def find_host_compiler() -> Path | None:
    """The C++ compiler that nvcc will call: CXX if it is set, else g++ or c++ on PATH."""
    for name in (os.environ.get("CXX") or "", "g++", "c++"):
        found = shutil.which(name) if name else None
        if found:
            return Path(found)
    return None


def cache_directory() -> Path:
    """Folder for compiled kernels, which need not exist yet: SGL_MUSE_MEGA_CACHE, or ours in SGLang's.

    SGLang copies every SGL_ variable to an SGLANG_ one and asks people to rename theirs, so that name counts, too.
    """
    chosen = os.environ.get("SGL_MUSE_MEGA_CACHE") or os.environ.get("SGLANG_MUSE_MEGA_CACHE")
    if chosen:
        return Path(chosen).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "sglang" / "sgl_muse_mega"


def installed_version(distribution: str) -> str | None:
    """The version of an installed distribution, without importing it."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _in_wheel(distribution: str, program: str) -> Path | None:
    try:
        files = importlib.metadata.files(distribution) or []
    except importlib.metadata.PackageNotFoundError:
        return None
    for file in files:
        if file.parts[-2:] == ("bin", program):
            path = Path(str(file.locate()))
            if _executable(path):
                return path
    return None


def _executable(path: Path) -> bool:
    return path.is_file() and os.access(path, os.X_OK)
