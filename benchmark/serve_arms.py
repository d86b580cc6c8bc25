"""Starts and asks the servers of `serve_check.py`: processes of their own, several on one GPU, asked one at a time."""

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
PROMISED = {  # by SGLANG_MUSE_MEGA_STEP
    "target": ("NVIDIA megakernel: active",),
    "full": ("NVIDIA megakernel: active", "steps of one request, greedy or sampled, run whole"),
}


class ArmError(RuntimeError):
    """A server that did not start or answer, with the end of its log."""


def stock_environment(folder: Path) -> dict[str, str]:
    """The environment that the rival's device.sh makes."""
    script = "set -a; . ./device.sh > /dev/null && env -0"
    base = {**os.environ, "STOCK_DIR": str(folder)}
    done = subprocess.run(["bash", "-c", script], cwd=folder, env=base, capture_output=True, check=True)
    pairs = (entry.split("=", 1) for entry in done.stdout.decode().split("\0") if "=" in entry)
    return dict(pairs)


def install(folder: Path) -> None:
    """Makes this checkout and the weights' plugin look installed: SGLang finds plugins through entry points."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    entries = project["entry-points"]["sglang.srt.plugins"]
    _distribution(folder, project["name"], project["version"], entries)
    _distribution(folder, "serve-check-weights", "0.0", {"serve_check_weights": "serve_weights:register"})


def _distribution(folder: Path, name: str, version: str, entries: dict[str, str]) -> None:
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    lines = ["[sglang.srt.plugins]", *(f"{key} = {value}" for key, value in entries.items())]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n")


class Arm:
    """One server; `start` returns at once, `ready` waits."""

    def __init__(
        self,
        name: str,
        arguments: dict[str, Any],
        environment: dict[str, str],
        logs: Path,
        promised: Sequence[str] = (),
    ) -> None:
        """promised: what the log must say once the server is up, lest another path is measured than was asked for."""
        self.name, self._promised = name, promised
        self.log = logs / f"{name}.log"
        self._buffer = b""
        file = Path(tempfile.mkstemp(suffix=".json")[1])
        file.write_text(json.dumps(arguments))
        reading, writing = os.pipe()
        command = [sys.executable, str(ROOT / "benchmark" / "serve_arm.py"), str(writing), str(file)]
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                command, env=environment, stdin=subprocess.PIPE, stdout=log, stderr=subprocess.STDOUT,
                pass_fds=[writing], start_new_session=True,
            )  # fmt: skip
        os.close(writing)
        self._replies = reading

    def ready(self, timeout: float) -> float:
        """Seconds the engine took to start. Raises ArmError."""
        seconds = float(self._reply(timeout)["ready"])
        missing = [promise for promise in self._promised if not self.lines(promise)]
        if missing:
            raise ArmError(f"{self.name} is up and its log does not say {missing}:\n{self.tail()}")
        return seconds

    def ask(self, operation: str, timeout: float = 240.0, **options: Any) -> Any:
        """Raises ArmError when the server fails or takes longer."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"op": operation, **options}).encode() + b"\n")
            self._process.stdin.flush()
        except OSError:
            raise ArmError(f"{self.name} ended before it was asked for {operation}:\n{self.tail()}") from None
        reply = self._reply(timeout)
        if "error" in reply:
            raise ArmError(f"{self.name}: {operation} failed: {reply['error']}\n{self.tail()}")
        return reply["result"]

    def _reply(self, timeout: float) -> dict[str, Any]:
        deadline = time.monotonic() + timeout
        while b"\n" not in self._buffer:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([self._replies], [], [], min(left, 1.0))[0]:
                if left <= 0 or self._process.poll() is not None:
                    state = "took too long" if left <= 0 else f"ended with {self._process.returncode}"
                    raise ArmError(f"{self.name} {state}:\n{self.tail()}")
                continue
            chunk = os.read(self._replies, 1 << 20)
            if not chunk:
                raise ArmError(f"{self.name} ended:\n{self.tail()}")
            self._buffer += chunk
        line, _, self._buffer = self._buffer.partition(b"\n")
        found: dict[str, Any] = json.loads(line)
        return found

    def tail(self, lines: int = 40) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def lines(self, part: str) -> list[str]:
        """Lines of the log with `part` in them."""
        return [line for line in self.log.read_text(errors="replace").splitlines() if part in line]

    def stop(self) -> None:
        """Ends the server and everything it started, and waits until its GPU memory is free again."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()


class Servers:
    """Starts arms with a common environment and ends them all."""

    def __init__(self, stock: Path, work: Path, logs: Path) -> None:
        site = work / "site"
        site.mkdir()
        install(site)
        self._base = stock_environment(stock)
        # The Rust core of the prefix cache is built for another PyTorch than some machines have, and fails on the first
        # prompt; the Python one keeps the same tree.
        self._base.setdefault("SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND", "python")
        paths = [str(site), str(ROOT), str(ROOT / "benchmark"), self._base.get("PYTHONPATH", "")]
        self._base["PYTHONPATH"] = ":".join(filter(None, paths))
        self._logs = logs
        self.arms: list[Arm] = []

    def start(self, name: str, arguments: dict[str, Any], step: str | None = None, weights: bool = False) -> Arm:
        """step: SGLANG_MUSE_MEGA_STEP of a server with the plugin; None: stock."""
        environment = dict(self._base)
        ports = 31000 + os.getpid() % 64 * 256  # another program's servers may start at the same time
        arguments = arguments | {"port": ports + 32 * len(self.arms)}
        if step is not None:
            environment["SGLANG_MUSE_MEGA_EXPERIMENTAL_TP"] = "1"  # heard with several GPUs alone
            arguments["enable_nvidia_megakernel"] = True
            environment["SGLANG_MUSE_MEGA_STEP"] = step
        if weights:
            environment["SERVE_CHECK_WEIGHTS"] = "1"
        arm = Arm(name, arguments, environment, self._logs, PROMISED.get(step or "", ()))
        self.arms.append(arm)
        return arm

    def stop(self, *arms: Arm) -> None:
        for arm in arms or self.arms:
            arm.stop()


def common(**changes: Any) -> dict[str, Any]:
    return {
        "attention_backend": "triton", "sampling_backend": "pytorch", "grammar_backend": "none",
        "skip_tokenizer_init": True, "enable_multimodal": False, "disable_prefill_cuda_graph": True,
        "mem_fraction_static": 0.93, "max_total_tokens": 16384, "log_level": "info",
    } | changes  # fmt: skip


def speculative(draft: str) -> dict[str, Any]:
    return {
        "speculative_algorithm": "DFLASH", "speculative_draft_model_path": draft, "speculative_num_draft_tokens": 8,
        "speculative_draft_kv_cache_dtype": "bfloat16",
    }  # fmt: skip
