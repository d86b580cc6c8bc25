"""Compiles an instance of the kernels, once per machine: a content-addressed cache that many processes may share."""

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from sgl_muse_mega.errors import UserError
from sgl_muse_mega.megakernel.compiled import Compiled
from sgl_muse_mega.megakernel.inspection import KernelResources, read_report, resource_faults
from sgl_muse_mega.toolchain import cache_directory, find_nvcc

HOPPER = "sm_90a"
ARCHITECTURES = (HOPPER, "sm_103a")
FOLDERS = {"server.cu": ("server", "instr")}
"""Of csrc, those that a file's kernels include from; others include from `_STEP_FOLDERS`."""
_STEP_FOLDERS = ("layer", "decode", "draft", "step", "instr")
COMPILER = "13.0"  # the release that the kernels are tuned for

Progress = Callable[[str], None]


def quiet(message: str) -> None:
    del message


@dataclass(frozen=True, slots=True)
class Artifact:
    """A compiled instance: a cubin with the compiler's report."""

    path: Path
    report: str
    seconds: float  # 0 when it was in the cache

    def resources(self) -> list[KernelResources]:
        """Per kernel, from ptxas -v."""
        return read_report(self.report)

    def check(self, instance: Compiled) -> None:
        """Raises UserError when the kernels of this instance must not be loaded."""
        faults = resource_faults(instance, self.resources())
        if faults:
            found = "; ".join(faults)
            raise UserError(
                f"The compiled kernels are refused: {found}. Use nvcc {COMPILER}, which they are tuned for."
            )


def source_directory() -> Path:
    """The device code: `csrc` of the installed package or of the checkout."""
    package = Path(__file__).parent.parent
    for candidate in (package / "csrc", package.parent / "csrc"):
        if (candidate / "step.cu").is_file():
            return candidate
    raise UserError(f"The device code is missing beside {package}; install sgl-muse-mega again.")


def build(
    instance: Compiled, target: str = HOPPER, progress: Progress = quiet, defines: Sequence[str] = ()
) -> Artifact:
    """Returns the compiled instance from the cache, compiling it when it is not there.

    target: an architecture for nvcc ("sm_90a", "sm_103a"). defines: macros, "NAME" or "NAME=VALUE".
    Of several processes that ask at the same time one compiles and the others wait. A file that was damaged is
    compiled again.
    Raises UserError without a compiler, when compilation fails, or when the cache folder cannot be written.
    """
    compiler = _compiler()
    sources = _sources(instance.source)
    flags = [*_flags(target), *(f"-D{define}" for define in defines)]
    version = _run([str(compiler), "--version"], "The compiler does not run").strip()
    parts = _key_parts(sources, [*flags, target], version, instance)
    key = _digest_of("".join(parts.values()))[:32]
    folder = cache_directory()
    found = _cached(folder, key)
    if found:
        return found
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(folder / f"{key}.lock"):
            found = _cached(folder, key)
            if found:
                return found
            why = _set_aside_damaged(folder, key) or _difference(folder, parts)
            progress(f"Compiling the layer kernel for {target} ({instance.describe()}){why}")
            artifact = _compile(compiler, flags, target, instance, folder, key)
            (folder / f"{key}.json").write_text(json.dumps(parts))
            return artifact
    except OSError as error:
        raise UserError(
            f"The kernel cache {folder} cannot be written ({error.strerror}); set SGL_MUSE_MEGA_CACHE to a folder "
            "of yours, or build on a machine that can write it."
        ) from error


def build_all(instances: Iterable[Compiled]) -> None:
    """Compiles those that are not in the cache for the GPUs that the kernels run on, side by side."""
    with ThreadPoolExecutor() as pool:
        list(pool.map(build, instances))


def _compile(compiler: Path, flags: list[str], target: str, instance: Compiled, folder: Path, key: str) -> Artifact:
    start = time.monotonic()
    source = source_directory()
    with tempfile.TemporaryDirectory(dir=folder, prefix=f"{key}.") as temporary:
        work = Path(temporary)
        (work / "instance.h").write_text(instance.header())
        output = work / "output"
        includes = [f"-I{work}", f"-I{source}"]
        command = [str(compiler), *flags, *includes, str(source / instance.source), "-o", str(output)]
        report = _run(command, "The kernels do not compile")
        seconds = time.monotonic() - start
        (work / "report").write_text(f"{_digest(output)}\n{seconds:.1f}\n{report}")
        # The report names the digest of the finished output, so it goes last: an interrupted build is never a hit.
        os.replace(output, folder / f"{key}.bin")
        os.replace(work / "report", folder / f"{key}.txt")
    return Artifact(folder / f"{key}.bin", report, seconds)


def _set_aside_damaged(folder: Path, key: str) -> str:
    """Moves a binary that is not what its report says out of the way; what to say of it, or ""."""
    binary = folder / f"{key}.bin"
    if not binary.is_file():
        return ""
    os.replace(binary, folder / f"{key}.damaged")
    return f"; the cached file was damaged and lies in {key}.damaged"


def _difference(folder: Path, parts: dict[str, str]) -> str:
    """What the nearest cached build of the same kernels has otherwise, or "" where there is none."""
    nearest: list[str] | None = None
    for path in folder.glob("*.json"):
        try:
            other = json.loads(path.read_text())
        except ValueError:
            continue
        if isinstance(other, dict) and other.get("kernels") == parts["kernels"]:
            differing = [name for name, value in parts.items() if other.get(name) != value]
            if nearest is None or len(differing) < len(nearest):
                nearest = differing
    return f"; the cache has it with other {', '.join(nearest)}" if nearest else ""


def _cached(folder: Path, key: str) -> Artifact | None:
    binary, report = folder / f"{key}.bin", folder / f"{key}.txt"
    if not (binary.is_file() and report.is_file()):
        return None
    lines = report.read_text(errors="replace").split("\n", 2)
    if len(lines) < 3 or lines[0] != _digest(binary):
        return None
    return Artifact(binary, lines[2], 0.0)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Holds an advisory lock that the system releases when this process ends, however it ends."""
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _compiler() -> Path:
    nvcc = find_nvcc()
    if nvcc.path is None:
        raise UserError(
            f"The kernels are compiled at first use and nvcc was not found ({nvcc.source}); install the CUDA toolkit "
            f"{COMPILER} or `pip install 'sgl-muse-mega[compile]'`, or set CUDA_HOME."
        )
    return nvcc.path


def _flags(target: str) -> list[str]:
    number = target.removeprefix("sm_")
    return ["-std=c++17", "-O3", f"-gencode=arch=compute_{number},code={target}", "-Xptxas", "-v", "-cubin"]


def _sources(main: str) -> list[Path]:
    source = source_directory()
    files = [source / main]
    for folder in (source / name for name in FOLDERS.get(main, _STEP_FOLDERS)):
        files += sorted(p for p in folder.rglob("*") if p.suffix in {".cuh", ".h"})
    return files


def _key_parts(sources: list[Path], flags: list[str], version: str, instance: Compiled) -> dict[str, str]:
    """Everything that a binary follows from; the names are for people."""
    content = hashlib.sha256()
    for path in sources:
        content.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return {
        "kernels": instance.source,
        "flags": " ".join(flags),
        "compiler": version,
        "sizes": _digest_of(instance.header()),
        "sources": content.hexdigest(),
    }


def _digest_of(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _run(command: list[str], failure: str) -> str:
    environment = dict(os.environ)
    # The nvcc wheel has no wrapper that finds its own tools when only the program is on PATH.
    environment["PATH"] = os.pathsep.join([str(Path(command[0]).parent), environment.get("PATH", "")])
    result = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    text = result.stdout + result.stderr
    if result.returncode != 0:
        shown = "\n".join(text.strip().splitlines()[:40])
        raise UserError(f"{failure}: `{shutil.which(command[0]) or command[0]}` said:\n{shown}")
    return text
