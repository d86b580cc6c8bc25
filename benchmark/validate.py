"""All checks of the target's kernels on one GPU, each in a process of its own with a time limit; a table at the end.

    python benchmark/validate.py --json validation.json [--only soak,memcheck]

What each check covers stands in its own program. Exit status 1 when any fails.
"""

import argparse
import itertools
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import preflight
import torch
from layer_check import model

from sgl_muse_mega import results
from sgl_muse_mega.megakernel.accept_instance import AcceptInstance
from sgl_muse_mega.megakernel.build import build_all
from sgl_muse_mega.megakernel.draft_instance import DraftInstance
from sgl_muse_mega.megakernel.instance import Instance
from sgl_muse_mega.megakernel.server_instance import ServerInstance

ROOT = Path(__file__).parents[1]
MODELS = ("tiny", "tiny-bf16", "odd", "odd-bf16", "full", "full-bf16")
NAMES = (*Instance.kernels, *DraftInstance.kernels, *AcceptInstance.kernels, *ServerInstance.kernels)
# API errors are left out: cuda-bindings asks the driver for functions that an older driver does not have.
SANITIZER = " ".join(
    (
        "compute-sanitizer --error-exitcode 9 --report-api-errors no --print-limit 20",
        *(f"--kernel-name kne={name}" for name in NAMES),
    )
)
STAGES = "python benchmark/layer_check.py --sizes"
# name: (seconds allowed, command)
CHECKS: dict[str, tuple[int, str]] = {
    "stages tiny": (180, f"{STAGES} tiny,tiny-bf16 --rows 1-16 --contexts 0,1,63,64,65,300"),
    "stages odd": (180, f"{STAGES} odd,odd-bf16 --rows 1-16 --contexts 0,1,63,64,65,300"),
    "stages full": (240, f"{STAGES} full,full-bf16 --rows 1,8,16 --contexts 1,63,64,65,2047,2048,2049,8192"),
    "stages brief": (180, f"{STAGES} tiny,tiny-bf16,odd,odd-bf16 --rows 1,3,8,9,16 --contexts 0,63,65,300"),
    "stages full brief": (180, f"{STAGES} full,full-bf16 --rows 1,8,16 --contexts 65,2047,2049,8192 --kv fp8"),
    "routing": (
        120, "python benchmark/layer_check.py --sizes tiny,full --routing ties,crowd --rows 1,8,16 --contexts 65"
    ),
    "invariance bf16": (90, "python benchmark/replay_check.py invariance --kv bf16"),
    "invariance fp8": (90, "python benchmark/replay_check.py invariance --kv fp8"),
    "invariance full": (120, "python benchmark/replay_check.py invariance --sizes full --kv fp8 --contexts 2040"),
    "states": (60, "python benchmark/replay_check.py write {scratch}/states.pt"),
    "soak": (120, "python benchmark/replay_check.py soak {scratch}/states.pt --replays 20000"),
    "deadline": (60, "python tests/gpu/missed_deadline.py"),
    "memcheck": (90, f"{SANITIZER} --tool memcheck python benchmark/sanitize.py"),
    "synccheck": (60, f"{SANITIZER} --tool synccheck python benchmark/sanitize.py"),
    "racecheck": (200, f"{SANITIZER} --tool racecheck python benchmark/sanitize.py --define EVERY_LANE_ARRIVES"),
}  # fmt: skip
KEPT_LINES = 60  # at both ends


def compile_all() -> None:
    """Compiles what the stage checks will load, side by side: one after the other they take longer than the checks."""
    instances = []
    for name, fp8_cache, row_cap in itertools.product(MODELS, (False, True), (8, 16)):
        config, local_experts = model(name)
        instances.append(
            Instance.for_config(
                config, nvfp4=config.nvfp4_experts(0), fp8_cache=fp8_cache, row_cap=row_cap,
                sms=torch.cuda.get_device_properties(0).multi_processor_count,
                local_experts=local_experts or config.num_local_experts,
            )
        )  # fmt: skip
    build_all(instances)


def run(command: str, seconds: int, scratch: str) -> dict[str, object]:
    """One check: status (124 past its time), seconds, and the end of what it printed."""
    words = [sys.executable if word == "python" else word for word in shlex.split(command.format(scratch=scratch))]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    start = time.monotonic()
    try:
        done = subprocess.run(
            words, cwd=ROOT, env=environment, text=True, timeout=seconds, check=False,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        status, output = done.returncode, done.stdout
    except FileNotFoundError as error:
        status, output = 127, str(error)
    except subprocess.TimeoutExpired as error:
        status, output = 124, (error.output or b"").decode(errors="replace")
    lines = [line for line in output.splitlines() if line.strip()]
    return {
        "command": command, "status": status, "seconds": round(time.monotonic() - start, 1),
        "output": lines if len(lines) <= 2 * KEPT_LINES else [*lines[:KEPT_LINES], "...", *lines[-KEPT_LINES:]],
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--only", help="names of checks, by commas; all but the brief ones when left out")
    arguments = parser.parse_args()
    names = arguments.only.split(",") if arguments.only else [name for name in CHECKS if "brief" not in name]
    preflight.need_known("--only", names, tuple(CHECKS))
    preflight.need_room_for(arguments.json)
    preflight.need_gpus(1)
    environment = results.environment(torch.cuda.get_device_name()) | {"command": shlex.join(["python", *sys.argv])}
    checks = {}
    compile_all()
    with tempfile.TemporaryDirectory() as scratch:
        for name in names:
            seconds, command = CHECKS[name]
            checks[name] = run(command, seconds, scratch)
            arguments.json.write_text(json.dumps({"environment": environment, "checks": checks}, indent=1))
    for name, check in checks.items():
        told = [line for line in check["output"] if not line.startswith("  ")][-1:] or [""]
        status = "ok" if check["status"] == 0 else str(check["status"])
        print(f"{name:16s} {status:>4} {check['seconds']:6.1f} s  {told[0][:110]}")
    return int(any(check["status"] != 0 for check in checks.values()))


if __name__ == "__main__":
    sys.exit(preflight.guarded(main))
