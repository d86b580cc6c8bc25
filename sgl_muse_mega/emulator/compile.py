"""Compiles the emulated machine, and instances of the kernels against it, with the host's C++ compiler."""

import hashlib
import os
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from sgl_muse_mega.errors import UserError
from sgl_muse_mega.megakernel.build import Progress, quiet, source_directory
from sgl_muse_mega.toolchain import cache_directory, find_host_compiler

_FLAGS = ("-std=c++20", "-O2", "-fPIC", "-shared", "-U_FORTIFY_SOURCE", "-Wno-unknown-pragmas")
# Instances differ in constants only, so their functions have equal names: none may be visible outside its library.
_KERNEL_FLAGS = ("-fvisibility=hidden", "-fno-gnu-unique")


def compile_machine() -> Path:
    """The emulated machine: csrc/emulator. Raises UserError without a working compiler."""
    folder = source_directory() / "emulator"
    files = {path.name: path.read_text() for path in sorted(folder.iterdir()) if path.suffix in {".cpp", ".h"}}
    return _compiled(_FLAGS, files, [name for name in files if name.endswith(".cpp")], quiet)


def compile_kernels(
    header: str,
    sources: Path | None = None,
    main: str = "step.cu",
    progress: Progress = quiet,
    defines: Sequence[str] = (),
) -> Path:
    """The kernels of `main` with `header` as instance.h and the macros `defines`, as those of `megakernel.build`.

    sources: the folder that stands for csrc (a test's own kernels, or a changed copy). A file of csrc/emulator that has
    the same path there, such as instr/mma.cuh, takes its place. Raises UserError without a working compiler or when the
    kernels do not compile.
    """
    csrc = source_directory()
    folder, emulator = sources or csrc, csrc / "emulator"
    files = _texts(folder, skip=folder / "emulator") | _texts(emulator) | {"instance.h": header}
    flags = (*_FLAGS, *_KERNEL_FLAGS, *(f"-D{define}" for define in defines))
    return _compiled(flags, files, [main], progress)


def _texts(folder: Path, skip: Path | None = None) -> dict[str, str]:
    """Headers and kernels below a folder, by relative path."""
    paths = sorted(p for p in folder.rglob("*") if p.suffix in {".cuh", ".cu", ".h"})
    return {str(p.relative_to(folder)): p.read_text() for p in paths if skip is None or skip not in p.parents}


def _compiled(flags: tuple[str, ...], files: dict[str, str], inputs: list[str], progress: Progress) -> Path:
    compiler = find_host_compiler()
    if compiler is None:
        raise UserError("The emulator needs a C++ compiler and none was found; install g++ or set CXX.")
    asked = subprocess.run([str(compiler), "--version"], capture_output=True, text=True, check=False)
    if asked.returncode != 0:
        raise UserError(f"The C++ compiler {compiler} does not run; install g++, or set CXX to one that does.")
    version = asked.stdout
    key = hashlib.sha256("\0".join((*flags, version, *inputs, *files, *files.values())).encode()).hexdigest()[:32]
    cache = cache_directory()
    found = cache / f"emulator-{key}.so"
    if found.is_file():
        return found
    progress(f"Compiling {inputs[0]} for the emulator")
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache, prefix="emulator-") as temporary:
            work = Path(temporary)
            for name, text in files.items():
                (work / name).parent.mkdir(parents=True, exist_ok=True)
                (work / name).write_text(text)
            command = [str(compiler), *flags, f"-I{work}", "-x", "c++", *(str(work / i) for i in inputs)]
            command += ["-o", str(work / "output.so")]
            result = subprocess.run(command, capture_output=True, text=True, check=False)
            if result.returncode != 0:
                shown = "\n".join(result.stderr.strip().splitlines()[:40])
                raise UserError(f"The kernels do not compile for the emulator: {compiler} said:\n{shown}")
            # Several processes may compile the same sources; each puts a whole file in place.
            os.replace(work / "output.so", found)
    except OSError as error:
        raise UserError(
            f"The kernel cache {cache} cannot be written ({error.strerror}); set SGL_MUSE_MEGA_CACHE to a folder of "
            "yours."
        ) from error
    return found
