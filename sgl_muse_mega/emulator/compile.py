"""Compiles the emulated machine, and instances of the kernels against it, with the host's C++ compiler."""

import hashlib
import os
import subprocess
import tempfile
from pathlib import Path

from sgl_muse_mega.errors import UserError
from sgl_muse_mega.megakernel.build import source_directory
from sgl_muse_mega.toolchain import cache_directory, find_host_compiler

_FLAGS = ("-std=c++20", "-O2", "-fPIC", "-shared", "-U_FORTIFY_SOURCE", "-Wno-unknown-pragmas")
# Instances differ in constants only, so their functions have equal names: none may be visible outside its library.
_KERNEL_FLAGS = ("-fvisibility=hidden", "-fno-gnu-unique")
_SOURCE_SUFFIXES = {".cuh", ".cu", ".h", ".cpp"}


def compile_machine() -> Path:
    """The emulated machine: csrc/emulator. Raises UserError without a working compiler."""
    folder = source_directory() / "emulator"
    sources = sorted(folder.glob("*.cpp"))
    return _cached(_FLAGS, sources, [folder], {})


def compile_kernels(header: str, sources: Path | None = None, main: str = "step.cu") -> Path:
    """The kernels of `main` with `header` as instance.h.

    sources: the folder that stands for csrc (a test's own kernels, or a changed copy); the emulator's headers always
    come from csrc/emulator. Raises UserError without a working compiler or when the kernels do not compile.
    """
    folder = sources or source_directory()
    emulator = source_directory() / "emulator"
    return _cached((*_FLAGS, *_KERNEL_FLAGS), [folder / main], [emulator, folder], {"instance.h": header})


def _cached(flags: tuple[str, ...], inputs: list[Path], includes: list[Path], generated: dict[str, str]) -> Path:
    compiler = find_host_compiler()
    if compiler is None:
        raise UserError("The emulator needs a C++ compiler and none was found; install g++ or set CXX.")
    version = subprocess.run([str(compiler), "--version"], capture_output=True, text=True, check=True).stdout
    digest = hashlib.sha256("\0".join((*flags, version, *generated.values())).encode())
    for path in inputs + [p for folder in includes for p in sorted(folder.rglob("*")) if p.suffix in _SOURCE_SUFFIXES]:
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    cache = cache_directory()
    found = cache / f"emulator-{digest.hexdigest()[:32]}.so"
    if found.is_file():
        return found
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache, prefix="emulator-") as temporary:
            work = Path(temporary)
            for name, text in generated.items():
                (work / name).write_text(text)
            command = [str(compiler), *flags, f"-I{includes[0]}", f"-I{work}", *(f"-I{i}" for i in includes[1:])]
            command += ["-x", "c++", *map(str, inputs), "-o", str(work / "output.so")]
            result = subprocess.run(command, capture_output=True, text=True, check=False)
            if result.returncode != 0:
                shown = "\n".join(result.stderr.strip().splitlines()[:40])
                raise UserError(f"The kernels do not compile for the emulator: {compiler} said:\n{shown}")
            # Several processes may compile the same sources; each puts a whole file in place.
            os.replace(work / "output.so", found)
    except OSError as error:
        raise UserError(
            f"The kernel cache {cache} cannot be written ({error.strerror}); set SGL_MUSE_MEGA_CACHE to a folder of yours."
        ) from error
    return found
