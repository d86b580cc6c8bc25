"""serve_ab.sh with servers that only play: order, waiting, and that nothing is left behind."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmark"))

import serve_http

ROOT = Path(__file__).parents[2]
PROGRAMS = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])  # python3 is this one

SERVER = """
import json, os, signal, subprocess, sys, time
sys.path.insert(0, {tests!r})
from gsm8k_server import FakeServer
words = sys.argv[1:]
how = {how!r}
if how == "hangs":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
rank = subprocess.Popen(["sleep", "300"])
with open({record!r}, "a") as file:
    file.write(json.dumps([words, os.getpid(), rank.pid, os.environ.get("SGLANG_MUSE_MEGA_STEP")]) + "\\n")
if how == "dies" and "--plugin" in words:
    rank.kill()
    sys.exit("no GPU is visible")
if how in ("hangs", "waits"):
    time.sleep(300)
print("NVIDIA megakernel: active" if "--plugin" in words else "stock", flush=True)
FakeServer(port=int(words[words.index("--port") + 1]), environment={{}})
time.sleep(300)
"""


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def run(tmp_path: Path, how: str, *more: str, port: int | None = None) -> Any:
    """Exit status, output, the servers' (words, pid, rank's pid, step) and the folder of results."""
    record, server = tmp_path / "servers", tmp_path / "server.py"
    record.touch()
    server.write_text(SERVER.format(tests=str(Path(__file__).parent), record=str(record), how=how))
    data = tmp_path / "test.jsonl"
    data.write_text(json.dumps({"question": "Add 1 and 2 .", "answer": "#### 3"}))
    bench = ["--", "--data", str(data), "--runs", "1", "--warmup", "0"]
    command = ["bash", str(ROOT / "benchmark" / "serve_ab.sh"), "--out", str(tmp_path / "out"), "--model", "real"]
    command += ["--port", str(port or free_port()), *more, *bench]
    environment = {**os.environ, "SERVE_AB_SERVER": f"{sys.executable} {server}", "PATH": PROGRAMS}
    environment["SGLANG_MUSE_MEGA_EXPERIMENTAL_TP"] = "1"
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    servers = [json.loads(line) for line in record.read_text().splitlines()]
    return SimpleNamespace(
        status=done.returncode, text=done.stdout + done.stderr, servers=servers, out=tmp_path / "out"
    )


def gone(pid: int) -> bool:
    """Whether a process has ended; one that nobody has waited for has."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0]
    except FileNotFoundError:
        return True
    return state in "ZX"


def left(servers: list[Any]) -> list[int]:
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        alive = [pid for _, server, rank, _ in servers for pid in (server, rank) if not gone(pid)]
        if not alive:
            return []
        time.sleep(0.05)
    return alive


def test_both_servers_one_after_the_other(tmp_path: Path) -> None:
    found = run(tmp_path, "answers", "--draft", "drafts", "--step", "target")
    assert found.status == 0, found.text
    words = [words for words, *_ in found.servers]
    assert [("--plugin" in w, "drafts" in w, "--random" in w) for w in words] == [
        (False, True, False), (True, True, False)
    ]  # fmt: skip
    assert [step for *_, step in found.servers] == [None, "target"]
    assert left(found.servers) == []
    compared = json.loads((found.out / "compare.json").read_text())
    assert compared["equal_texts"] == compared["texts"] == 1
    assert "plugin over stock" in found.text
    assert "NVIDIA megakernel: active" in found.text


def test_a_server_that_ends(tmp_path: Path) -> None:
    found = run(tmp_path, "dies", "--tp", "2")
    assert [step for *_, step in found.servers] == [None, "full"]
    assert all(words[words.index("--tp") + 1] == "2" for words, *_ in found.servers)
    assert found.status == 1
    assert "plugin-1 ended before it was up" in found.text
    assert "no GPU is visible" in found.text  # its log
    assert left(found.servers) == []


def test_a_server_that_never_comes_up(tmp_path: Path) -> None:
    found = run(tmp_path, "hangs", "--timeout", "2")
    assert found.status == 1
    assert "stock-1 was not up after 2 s" in found.text
    assert len(found.servers) == 1
    assert left(found.servers) == []


def test_somebody_elses_server_is_not_measured(tmp_path: Path) -> None:
    from gsm8k_server import FakeServer

    other = FakeServer()
    try:
        found = run(tmp_path, "answers", port=int(other.url.rpartition(":")[2]))
    finally:
        other.close()
    assert found.status == 1
    assert "something answers on port" in found.text
    assert found.servers == []


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--out"], "--out needs a value"),
        (["--x"], "unknown option --x"),
        (["--out", "o"], "give --model, or --stock"),
        (["--out", "o", "--model", "m", "--tp", "2"], "set SGLANG_MUSE_MEGA_EXPERIMENTAL_TP=1"),
        (["--out", "o", "--model", "m", "--tp", "x"], "--tp needs a number, not 'x'"),
        (["--out", "o", "--stock", "absent"], "absent is not the rival's folder"),
    ],
)
def test_wrong_use(words: list[str], said: str, tmp_path: Path) -> None:
    command = ["bash", str(ROOT / "benchmark" / "serve_ab.sh"), *words]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert said in done.stderr
    assert done.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_help() -> None:
    command = ["bash", str(ROOT / "benchmark" / "serve_ab.sh"), "--help"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0
    assert done.stdout.startswith("Stock SGLang and SGLang with the plugin")
    assert "--out DIR" in done.stdout
    assert "set -euo" not in done.stdout


def test_server_arguments() -> None:
    words = ["--model", "m", "--draft", "d", "--port", "1", "--random", "--plugin", "--width", "4"]
    random = serve_http.arguments(serve_http.parse(words))
    assert (random["host"], random["port"], random["load_format"]) == ("127.0.0.1", 1, "dummy")
    assert (random["speculative_num_draft_tokens"], random["enable_nvidia_megakernel"]) == (4, True)
    assert random["enable_multimodal"] is False  # the command line has no way to say this
    real = serve_http.arguments(
        serve_http.parse(["--model", "m", "--port", "1", "--tp", "4", "--extra", '{"tp_size": 2}'])
    )
    assert (real["tp_size"], real["ep_size"]) == (2, 4)
    assert not {"load_format", "speculative_algorithm", "enable_nvidia_megakernel"} & set(real)


def test_ends_its_server_when_it_is_ended(tmp_path: Path) -> None:
    """The script is told to end while it waits."""
    record, server = tmp_path / "servers", tmp_path / "server.py"
    server.write_text(SERVER.format(tests=str(Path(__file__).parent), record=str(record), how="waits"))
    environment = {**os.environ, "SERVE_AB_SERVER": f"{sys.executable} {server}", "PATH": PROGRAMS}
    script = str(ROOT / "benchmark" / "serve_ab.sh")
    command = ["bash", script, "--out", str(tmp_path / "out"), "--model", "real", "--port", str(free_port())]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 30
    while not (record.exists() and record.read_text()) and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    assert process.wait(40) == 143
    assert left([json.loads(line) for line in record.read_text().splitlines()]) == []
