"""The kernel cache: hits, damage, interruption, many processes, folders that cannot be written, spills."""

import json
import os
import shutil
import stat
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from sgl_muse_mega import toolchain
from sgl_muse_mega.commands import build as command
from sgl_muse_mega.errors import UserError
from sgl_muse_mega.megakernel import build as build_module
from sgl_muse_mega.megakernel.build import Artifact, build, build_all
from sgl_muse_mega.megakernel.inspection import EXPECTED
from sgl_muse_mega.megakernel.instance import Instance
from sgl_muse_mega.megakernel.random_step import tiny_config

REPORT = """\
ptxas info    : Compiling entry function '{name}' for 'sm_90a'
ptxas info    : Function properties for {name}
    {stack} bytes stack frame, {spill} bytes spill stores, {spill} bytes spill loads
ptxas info    : Used 96 registers, used 3 barriers
"""


INSTRUCTIONS = (
    *("ACQBULK", "PREEXIT", "REDG.E.ADD.STRONG.GPU", "LDG.E.STRONG.GPU", "UBLKCP.S.G", "SYNCS.PHASECHK"),
    *("HMMA.16816.F32.BF16", "LDS.128", "LDG.E.128"),
)


def report(stack: int = 0, spill: int = 0, of: str = "layer_kernel") -> str:
    """Of all kernels; `of` has the stack and the spills."""
    return "".join(
        REPORT.format(name=name, stack=stack * (name == of), spill=spill * (name == of)) for name in EXPECTED
    )


def listing(*without: str, target: str = "sm_90a") -> str:
    """All kernels, each with every instruction that is asked of any, but those named."""
    lines = [f"        .target {target}"]
    for name in EXPECTED:
        lines.append(f'        .section .text.{name},"ax"')
        lines += [f"        /*0000*/    {text} ;" for text in INSTRUCTIONS if text not in without]
    return "\n".join(lines)


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An nvcc that counts its runs in `runs` and writes a few bytes, with a disassembler that prints `listing`.

    The cache is a fresh folder.
    """
    home = tmp_path / "cuda"
    (home / "bin").mkdir(parents=True)
    nvcc = home / "bin" / "nvcc"
    nvcc.write_text(
        "#!/bin/sh\n"
        'if [ "$1" = "--version" ]; then cat "$0.version"; exit 0; fi\n'
        'if [ -f "$0.fails" ]; then echo "error: no such thing" >&2; exit 2; fi\n'
        'echo run >> "$0.runs"\n'
        'while [ "$1" != "-o" ]; do shift; done\n'
        'sleep 0.2; echo cubin > "$2"\n'
        'cat "$0.report" >&2\n'
    )
    nvcc.chmod(nvcc.stat().st_mode | stat.S_IXUSR)
    Path(f"{nvcc}.version").write_text("Cuda compilation tools, release 13.0\n")
    Path(f"{nvcc}.report").write_text(report())
    nvdisasm = nvcc.with_name("nvdisasm")
    nvdisasm.write_text('#!/bin/sh\ncat "$0.listing"\n')
    nvdisasm.chmod(nvcc.stat().st_mode)
    Path(f"{nvdisasm}.listing").write_text(listing())
    monkeypatch.setenv("CUDA_HOME", str(home))
    monkeypatch.setenv("SGL_MUSE_MEGA_CACHE", str(tmp_path / "cache"))
    return nvcc


def instance(row_cap: int = 8) -> Instance:
    return Instance.for_config(tiny_config(), nvfp4=True, fp8_cache=False, row_cap=row_cap, sms=132)


def runs(compiler: Path) -> int:
    path = Path(f"{compiler}.runs")
    return len(path.read_text().splitlines()) if path.exists() else 0


def test_second_build_comes_from_the_cache(compiler: Path) -> None:
    first, second = build(instance()), build(instance())
    assert (first.path, first.resources()) == (second.path, second.resources())
    assert first.path.read_text() == "cubin\n"
    assert runs(compiler) == 1
    assert second.seconds == 0


def test_sizes_architecture_macros_and_compiler_make_different_entries(compiler: Path) -> None:
    paths = {build(instance(8)).path, build(instance(16)).path, build(instance(8), "sm_103a").path}
    paths |= {build(instance(8), defines=(define,)).path for define in ("DEPTH=3", "DEPTH=4", "DEPTH")}
    Path(f"{compiler}.version").write_text("Cuda compilation tools, release 13.1\n")
    paths.add(build(instance(8)).path)
    assert len(paths) == 7


def test_several_are_built_together(compiler: Path) -> None:
    build_all([instance(8), instance(16), instance(8)])
    assert runs(compiler) == 2
    assert build(instance(16)).seconds == 0


def test_a_truncated_file_is_compiled_again(compiler: Path) -> None:
    artifact = build(instance())
    artifact.path.write_text("cub")
    assert build(instance()).path.read_text() == "cubin\n"
    assert runs(compiler) == 2


def test_the_log_says_why_something_is_compiled_again(
    compiler: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another toolkit, another version of the sources, other sizes, a damaged file; nothing at the very first."""
    said: list[str] = []

    def compiled_because() -> str:
        count = len(said)
        artifact = build(instance(), progress=said.append)
        assert artifact.path.read_text() == "cubin\n"
        return said[-1].rpartition(instance().describe() + ")")[2] if len(said) > count else "cached"

    assert compiled_because() == ""
    Path(f"{compiler}.version").write_text("Cuda compilation tools, release 13.1\n")
    assert compiled_because() == "; the cache has it with other compiler"
    sources = tmp_path / "csrc"
    shutil.copytree(build_module.source_directory(), sources)
    monkeypatch.setattr(build_module, "source_directory", lambda: sources)
    assert compiled_because() == "cached"
    header = sorted((sources / "layer").rglob("*.cuh"))[0]
    header.write_text(header.read_text() + "// as of another version\n")
    assert compiled_because() == "; the cache has it with other sources"
    assert compiled_because() == "cached"
    binary = build(instance()).path
    binary.write_text("cub")
    assert compiled_because() == f"; the cached file was damaged and lies in {binary.stem}.damaged"
    assert binary.with_suffix(".damaged").read_text() == "cub"
    assert compiled_because() == "cached"
    (binary.parent / "broken.json").write_text("{")
    build(instance(16), progress=said.append)
    assert said[-1].endswith("; the cache has it with other sizes")


def test_nothing_is_written_beside_the_sources(compiler: Path) -> None:
    package = build_module.source_directory().parent / "sgl_muse_mega"

    def files() -> set[Path]:
        found = [*build_module.source_directory().rglob("*"), *package.rglob("*")]
        return {path for path in found if "__pycache__" not in path.parts}

    before = files()
    build(instance())
    assert files() == before


def test_a_build_without_its_report_is_no_hit(compiler: Path) -> None:
    """What a process leaves that was killed between the two files."""
    artifact = build(instance())
    artifact.path.with_suffix(".txt").unlink()
    build(instance())
    assert runs(compiler) == 2


@pytest.mark.parametrize("content", [b"", b"cut", b"\xff\xfe\n1.0\nreport"])
def test_a_damaged_report_is_no_hit(compiler: Path, content: bytes) -> None:
    build(instance()).path.with_suffix(".txt").write_bytes(content)
    assert build(instance()).report == build(instance()).report
    assert runs(compiler) == 2


def test_of_many_that_ask_at_once_one_compiles(compiler: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        paths = {a.path for a in pool.map(lambda _: build(instance()), range(8))}
    assert len(paths) == 1
    assert runs(compiler) == 1


def test_ranks_of_a_server_compile_once_and_outlive_one_that_is_killed(compiler: Path, tmp_path: Path) -> None:
    """Processes with a cold cache: the one that compiles is killed, another goes on."""
    program = (
        "from test_build import build, instance\n"
        "print(build(instance()).path.read_text(), end='')"
    )  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    slow = compiler.read_text().replace("sleep 0.2", f"while [ -f {tmp_path}/hold ]; do sleep 0.05; done")
    compiler.write_text(slow)
    (tmp_path / "hold").write_text("")

    def start() -> "subprocess.Popen[str]":
        return subprocess.Popen([sys.executable, "-c", program], env=environment, stdout=subprocess.PIPE, text=True)

    def compiling(count: int) -> None:
        deadline = time.monotonic() + 60
        while runs(compiler) < count and time.monotonic() < deadline:
            time.sleep(0.05)
        assert runs(compiler) == count

    ranks = [start()]
    compiling(1)
    ranks.append(start())
    ranks[0].kill()
    compiling(2)
    (tmp_path / "hold").unlink()
    assert [rank.communicate(timeout=60)[0] for rank in ranks] == ["", "cubin\n"]
    assert runs(compiler) == 2
    assert build(instance()).seconds == 0  # a second start compiles nothing


def test_a_folder_that_cannot_be_written_is_named(
    compiler: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("SGL_MUSE_MEGA_CACHE", str(blocked / "cache"))
    with pytest.raises(UserError, match="SGL_MUSE_MEGA_CACHE"):
        build(instance())


def test_compile_errors_are_shown_and_leave_nothing_behind(compiler: Path, tmp_path: Path) -> None:
    Path(f"{compiler}.fails").write_text("")
    with pytest.raises(UserError, match="no such thing"):
        build(instance())
    assert {p.suffix for p in (tmp_path / "cache").iterdir()} == {".lock"}
    os.unlink(f"{compiler}.fails")
    build(instance())


def test_without_a_compiler_the_sentence_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("SGL_MUSE_MEGA_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("sgl_muse_mega.toolchain._in_wheel", lambda *_: None)
    with pytest.raises(UserError, match="nvidia-cuda-nvcc"):
        build(instance())


def test_spills_and_stack_are_refused(tmp_path: Path) -> None:
    clean = Artifact(tmp_path, report(), 1.0)
    clean.check(instance())
    assert {(r.name, r.registers) for r in clean.resources()} == {(name, 96) for name in EXPECTED}
    for stack, spill in ((0, 4), (8, 0)):
        with pytest.raises(UserError, match="layer_kernel keeps registers in local memory"):
            Artifact(tmp_path, report(stack, spill), 1.0).check(instance())


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A target folder with nothing but its configuration."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(tiny_config().to_hf()))
    return folder


def test_the_command_reports_every_kernel_and_refuses_spills(
    compiler: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.run(model, kv_cache_dtype="fp8") == 0
    printed = capsys.readouterr().out
    # two row capacities of the target's kernels and of the accept rule's; no draft was given
    assert [printed.count(f"{name} {rows} ") > 0 for name in ("NVFP4 fp8", "accept") for rows in (8, 16)] == [True] * 4
    assert "draft 8" not in printed
    assert "All gates hold" in printed
    Path(f"{compiler}.report").write_text(report(stack=16, spill=8))
    assert command.run(model, kv_cache_dtype="bf16") == 1
    printed = capsys.readouterr().out
    assert "Refused: layer_kernel keeps registers in local memory (8 B stored, 16 B stack)." in printed
    assert "All gates hold" not in printed


def test_the_command_compiles_the_bundled_pair_with_its_draft(
    compiler: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.run(None, kv_cache_dtype="fp8") == 0
    printed = capsys.readouterr().out
    assert all(
        f"{name} {rows} " in printed for name in ("BF16 fp8", "NVFP4 fp8", "draft", "accept") for rows in (8, 16)
    )


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (listing("UBLKCP.S.G"), "layer_kernel holds no bulk copy."),
        (listing("HMMA.16816.F32.BF16"), "draft_block_kernel holds no tensor-core product."),
        (listing() + "\n        /*0010*/    @P0 STL [R1], R0 ;", "1 accesses to local memory"),
        (listing(target="sm_103a"), "the machine code is for sm_103a, not for sm_90a."),
    ],
)
def test_the_command_refuses_machine_code(
    compiler: Path, capsys: pytest.CaptureFixture[str], text: str, words: str
) -> None:
    Path(f"{compiler.with_name('nvdisasm')}.listing").write_text(text)
    assert command.run(None, kv_cache_dtype="bf16") == 1
    assert words in capsys.readouterr().out


def test_the_command_says_what_was_not_inspected_or_run(
    compiler: Path, model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    Path(f"{compiler.with_name('nvdisasm')}.listing").write_text(listing(target="sm_103a"))
    assert command.run(model, target="sm_103a", kv_cache_dtype="bf16") == 0
    assert "have never run on such a GPU" in " ".join(capsys.readouterr().out.split())
    compiler.with_name("nvdisasm").unlink()
    monkeypatch.setattr(toolchain, "_DISASSEMBLER_WHEEL", "no-such-wheel")
    monkeypatch.setattr(toolchain.shutil, "which", lambda name: None)
    assert command.run(model, kv_cache_dtype="bf16") == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "The instructions were not inspected" in printed
    assert "All gates hold" not in printed
    assert "never run" not in printed


def test_the_command_refuses_what_it_cannot_build(compiler: Path, model: Path) -> None:
    with pytest.raises(UserError, match="int4"):
        command.run(model, kv_cache_dtype="int4")
    with pytest.raises(UserError, match="'sm_80'; --arch can be sm_90a or sm_103a"):
        command.run(model, target="sm_80")
    with pytest.raises(UserError, match="16 experts do not divide among 3 ranks"):
        command.run(model, ranks=3)
    for sms in (0, -1, 1320):
        with pytest.raises(UserError, match=f"1 to 1024 SMs, {sms} were asked for"):
            command.run(model, sms=sms)
