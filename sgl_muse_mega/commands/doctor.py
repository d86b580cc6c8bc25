"""`sgl-muse-mega doctor`: what this machine has for building and running the kernels, one line each."""

import itertools
import os
import platform
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from rich.console import Console
from rich.text import Text

from sgl_muse_mega import toolchain
from sgl_muse_mega.results import driver_version

CAPABILITIES = ((9, 0), (10, 0), (10, 3))
SUPPORTED_SGLANG = "0.5.23"
CUDA_BINDINGS_MAJOR = "13"
WHEELS = "pip install 'sgl-muse-mega[compile]'"


@dataclass(frozen=True, slots=True)
class Check:
    name: str
    ok: bool
    found: str  # what there is, and if that is not ok, what to do


def run() -> int:
    """Print every check; the exit code is always 0, because a machine without a GPU is nothing wrong."""
    console = Console(soft_wrap=True, highlight=False)
    for check in checks():
        mark = Text("ok", style="green") if check.ok else Text("--", style="yellow")
        console.print(Text.assemble(mark, f"  {check.name:<19} {check.found}"))
    return 0


def checks() -> Iterator[Check]:
    """Python, torch, GPUs, driver, compilers, packages, peer access and the cache folder, in this order."""
    yield _at_least("Python", platform.python_version(), "3.11")
    cuda = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU only"
    yield _at_least("torch", torch.__version__, "2.11", f", {cuda}")
    yield from _gpus()
    driver = driver_version()
    yield Check("driver", driver is not None, driver or "nvidia-smi does not answer; a GPU needs the NVIDIA driver")
    yield _nvcc()
    disassembler = toolchain.find_nvdisasm()
    found = f"{disassembler.path} (from {disassembler.source})"
    missing = f"{disassembler.source}; only build's look at the instructions needs it"
    yield Check("nvdisasm", disassembler.path is not None, found if disassembler.path else missing)
    compiler = toolchain.find_host_compiler()
    yield Check("C++ compiler", compiler is not None, str(compiler or "no CXX, g++ or c++; nvcc needs one"))
    bindings = toolchain.installed_version("cuda-bindings")
    ok = bindings is not None and bindings.split(".")[0] == CUDA_BINDINGS_MAJOR
    wanted = f"; {CUDA_BINDINGS_MAJOR}.x is needed: pip install 'sgl-muse-mega[cuda]'"
    yield Check("cuda-bindings", ok, (bindings or "not installed") + ("" if ok else wanted))
    sglang = toolchain.installed_version("sglang")
    ok = sglang == SUPPORTED_SGLANG
    wanted = f"; the plugin needs {SUPPORTED_SGLANG}, the other commands need none"
    yield Check("SGLang", ok, (sglang or "not installed") + ("" if ok else wanted))
    yield _peer_access()
    yield _cache()


def _at_least(name: str, version: str, lowest: str, more: str = "") -> Check:
    def numbers(text: str) -> tuple[int, ...]:
        return tuple(int(part) for part in re.findall(r"\d+", text)[:2])

    ok = numbers(version) >= numbers(lowest)
    return Check(name, ok, f"{version}{more}" + ("" if ok else f"; {lowest} or newer is needed"))


def _gpus() -> Iterator[Check]:
    devices = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    if not devices:
        reason = "torch is built for the CPU only"
        if torch.version.cuda:
            visible = os.environ.get("CUDA_VISIBLE_DEVICES")
            reason = "torch finds none" + ("" if visible is None else f"; CUDA_VISIBLE_DEVICES is {visible!r}")
        yield Check("GPU", False, f"{reason}; the reference backend runs on the CPU")
        yield Check("compute capability", False, "no GPU")
        yield Check("SM count", False, "no GPU")
        return
    yield Check("GPU", True, ", ".join(f"{count} x {name}" for name, count in Counter(d.name for d in devices).items()))
    found = sorted({(device.major, device.minor) for device in devices})
    ok = all(capability in CAPABILITIES for capability in found)
    supported = ", ".join(f"{major}.{minor}" for major, minor in CAPABILITIES)
    text = ", ".join(f"{major}.{minor}" for major, minor in found)
    yield Check("compute capability", ok, text + ("" if ok else f"; the kernels are for {supported}"))
    counts = sorted({device.multi_processor_count for device in devices})
    yield Check("SM count", True, ", ".join(map(str, counts)))


def _nvcc() -> Check:
    nvcc = toolchain.find_nvcc()
    if nvcc.path is None:
        return Check("nvcc", False, f"{nvcc.source}; install the CUDA toolkit, set CUDA_HOME to it, or {WHEELS}")
    release = toolchain.nvcc_release(nvcc.path)
    if release is None:
        return Check("nvcc", False, f"{nvcc.path} (from {nvcc.source}) does not run; install the CUDA toolkit again")
    return Check("nvcc", True, f"{release}, {nvcc.path} (from {nvcc.source})")


def _peer_access() -> Check:
    count = torch.cuda.device_count()
    if count < 2:
        return Check("peer access", False, f"{count} GPU visible; only runs over several GPUs need it")
    pairs = itertools.permutations(range(count), 2)
    blocked = [f"{a}-{b}" for a, b in pairs if not torch.cuda.can_device_access_peer(a, b)]
    if blocked:
        return Check("peer access", False, f"none between GPUs {', '.join(blocked)}; see nvidia-smi topo -p2p r")
    return Check("peer access", True, f"between all {count} GPUs")


def _cache() -> Check:
    directory = toolchain.cache_directory()
    existing = next(folder for folder in (directory, *directory.absolute().parents) if folder.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        return Check("cache folder", False, f"{directory} cannot be written; set SGL_MUSE_MEGA_CACHE to a folder")
    return Check("cache folder", True, f"{directory}" + ("" if directory.exists() else ", not made yet"))
