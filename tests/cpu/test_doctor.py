import os
import stat
import sys
from pathlib import Path

import pytest
import torch

from sgl_muse_mega import toolchain
from sgl_muse_mega.commands import doctor
from sgl_muse_mega.commands.doctor import Check

LINES = [
    *("Python", "torch", "GPU", "compute capability", "SM count", "driver", "nvcc", "nvdisasm", "C++ compiler"),
    *("cuda-bindings", "SGLang", "peer access", "cache folder"),
]


def program(path: Path, output: str) -> Path:
    """An executable that prints `output`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\necho '{output}'\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


@pytest.fixture
def bare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with nothing on PATH, no CUDA variables and its own cache folder."""
    for name in ("CUDA_HOME", "CXX", "SGL_MUSE_MEGA_CACHE", "SGLANG_MUSE_MEGA_CACHE", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(toolchain, "_WHEELS", ("no-such-wheel",))
    monkeypatch.setattr(toolchain, "_DISASSEMBLER_WHEEL", "no-such-wheel")
    return tmp_path


def checked(name: str) -> Check:
    return {check.name: check for check in doctor.checks()}[name]


def test_one_line_each_on_a_bare_machine(bare: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor.run() == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line[4:].split("  ")[0] for line in lines] == LINES
    assert all(line.startswith(("ok  ", "--  ")) for line in lines)
    assert "nvcc" not in os.listdir(bare)


@pytest.mark.parametrize(
    ("value", "ok", "words"),
    [
        ("{root}/cuda", True, "(from CUDA_HOME)"),
        (":{root}/cuda", True, "(from CUDA_HOME, which is ':{root}/cuda')"),
        ("{root}/nowhere:{root}/cuda", True, "(from CUDA_HOME, which is '{root}/nowhere:{root}/cuda')"),
        ("{root}/nowhere", False, "CUDA_HOME is '{root}/nowhere', with no bin/nvcc, none on PATH"),
        ("", False, "CUDA_HOME is set but empty, none on PATH"),
        (":", False, "CUDA_HOME is set but empty, none on PATH"),
    ],
)
def test_nvcc_from_cuda_home(bare: Path, monkeypatch: pytest.MonkeyPatch, value: str, ok: bool, words: str) -> None:
    nvcc = program(bare / "cuda" / "bin" / "nvcc", "Cuda compilation tools, release 13.0, V13.0.88")
    monkeypatch.setenv("CUDA_HOME", value.format(root=bare))
    check = checked("nvcc")
    assert check.ok is ok
    assert check.found.startswith(f"13.0, {nvcc}") is ok
    assert words.format(root=bare) in check.found


def test_nvcc_from_path_when_cuda_home_is_empty(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program(bare / "bin" / "nvcc", "release 12.9, V12.9.1")
    assert checked("nvcc").found == f"12.9, {bare}/bin/nvcc (from PATH)"
    monkeypatch.setenv("CUDA_HOME", "")
    assert "PATH; CUDA_HOME is set but empty" in checked("nvcc").found


def distribution(root: Path, monkeypatch: pytest.MonkeyPatch, name: str, version: str, files: tuple[str, ...]) -> None:
    """Installs metadata of a distribution into a folder on sys.path."""
    site = root / f"site-{name}"
    info = site / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (info / "RECORD").write_text("".join(f"{file},,\n" for file in files))
    monkeypatch.syspath_prepend(str(site))


def test_nvcc_from_the_wheel(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toolchain, "_WHEELS", ("some-nvcc",))
    distribution(bare, monkeypatch, "some-nvcc", "13.0.88", ("nvidia/cu13/bin/nvcc", "nvidia/cu13/bin/ptxas"))
    assert not checked("nvcc").ok
    nvcc = program(bare / "site-some-nvcc" / "nvidia" / "cu13" / "bin" / "nvcc", "release 13.0, V13.0.88")
    assert checked("nvcc").found == f"13.0, {nvcc} (from wheel some-nvcc)"


def test_the_disassembler_of_nvccs_folder_goes_before_path_and_wheel(
    bare: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not checked("nvdisasm").ok
    monkeypatch.setattr(toolchain, "_DISASSEMBLER_WHEEL", "some-nvdisasm")
    distribution(bare, monkeypatch, "some-nvdisasm", "13.5.37", ("nvidia/cu13/bin/nvdisasm",))
    wheel = program(bare / "site-some-nvdisasm" / "nvidia" / "cu13" / "bin" / "nvdisasm", "")
    assert checked("nvdisasm").found == f"{wheel} (from wheel some-nvdisasm)"
    on_path = program(bare / "bin" / "nvdisasm", "")
    assert checked("nvdisasm").found == f"{on_path} (from PATH)"
    program(bare / "cuda" / "bin" / "nvcc", "release 13.0, V13.0.88")
    monkeypatch.setenv("CUDA_HOME", str(bare / "cuda"))
    assert checked("nvdisasm").found == f"{on_path} (from PATH)"
    beside = program(bare / "cuda" / "bin" / "nvdisasm", "")
    assert checked("nvdisasm").found == f"{beside} (from the folder of nvcc)"


def test_nvcc_that_does_not_run(bare: Path) -> None:
    program(bare / "bin" / "nvcc", "cannot find cicc")
    check = checked("nvcc")
    assert not check.ok
    assert "does not run" in check.found
    (bare / "bin" / "nvcc").write_text("not a program")
    assert checked("nvcc").found == check.found


@pytest.mark.parametrize(("version", "ok"), [("0.5.23", True), ("0.5.22", False), ("0.5.23rc1", False)])
def test_sglang_is_looked_up_and_not_imported(
    bare: Path, monkeypatch: pytest.MonkeyPatch, version: str, ok: bool
) -> None:
    distribution(bare, monkeypatch, "sglang", version, ("sglang/__init__.py",))
    (bare / "site-sglang" / "sglang").mkdir()
    (bare / "site-sglang" / "sglang" / "__init__.py").write_text("raise RuntimeError('imported')\n")
    check = checked("SGLang")
    assert check.ok is ok
    assert check.found.startswith(version)
    assert ok or "0.5.23" in check.found
    assert "sglang" not in sys.modules


@pytest.mark.parametrize(("version", "ok"), [("13.0.3", True), ("12.9.2", False)])
def test_cuda_bindings(bare: Path, monkeypatch: pytest.MonkeyPatch, version: str, ok: bool) -> None:
    distribution(bare, monkeypatch, "cuda-bindings", version, ())
    assert checked("cuda-bindings").ok is ok


def test_host_compiler_and_driver(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not checked("C++ compiler").ok
    assert not checked("driver").ok
    program(bare / "bin" / "c++", "")
    program(bare / "bin" / "nvidia-smi", "580.95.05")
    assert checked("C++ compiler").found == f"{bare}/bin/c++"
    assert checked("driver").found == "580.95.05"
    program(bare / "bin" / "g++", "")
    assert checked("C++ compiler").found == f"{bare}/bin/g++"
    monkeypatch.setenv("CXX", str(bare / "bin" / "c++"))
    assert checked("C++ compiler").found == f"{bare}/bin/c++"


def test_cache_folder(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert checked("cache folder") == Check("cache folder", True, f"{bare}/cache/sglang/sgl_muse_mega, not made yet")
    assert not (bare / "cache").exists()
    monkeypatch.setenv("SGL_MUSE_MEGA_CACHE", str(bare))
    assert checked("cache folder").found == str(bare)
    monkeypatch.setenv("SGLANG_MUSE_MEGA_CACHE", str(bare / "renamed"))  # as SGLang asks for
    assert checked("cache folder").found == str(bare)
    monkeypatch.delenv("SGL_MUSE_MEGA_CACHE")
    assert checked("cache folder").found == f"{bare}/renamed, not made yet"
    (bare / "file").touch()
    monkeypatch.setenv("SGL_MUSE_MEGA_CACHE", str(bare / "file" / "below"))
    assert not checked("cache folder").ok


class Device:
    def __init__(self, name: str, major: int, minor: int, multi_processor_count: int) -> None:
        self.name, self.major, self.minor, self.multi_processor_count = name, major, minor, multi_processor_count


def test_gpus_and_peers(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    devices = [Device("H200", 9, 0, 132)] * 3
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(devices))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: devices[index])
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda a, b: {a, b} != {0, 2})
    assert checked("GPU") == Check("GPU", True, "3 x H200")
    assert checked("compute capability") == Check("compute capability", True, "9.0")
    assert checked("SM count").found == "132"
    assert not checked("peer access").ok
    assert "0-2, 2-0" in checked("peer access").found
    devices = [Device("H200", 9, 0, 132), Device("A100", 8, 0, 108)]
    assert checked("peer access") == Check("peer access", True, "between all 2 GPUs")
    assert not checked("compute capability").ok
    assert "8.0, 9.0; the kernels are for 9.0, 10.0, 10.3" in checked("compute capability").found


def test_hidden_gpus_are_explained(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert "CUDA_VISIBLE_DEVICES is ''" in checked("GPU").found
