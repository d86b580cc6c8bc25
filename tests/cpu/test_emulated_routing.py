"""Special routings on the emulator: exact ties of the router, and an expert that every row goes to."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("routing", ["ties", "crowd"])
def test_every_stage_with_special_routing(routing: str) -> None:
    arguments = ["--machine", "emulator", "--routing", routing, "--rows", "16", "--contexts", "30", "--kv", "bf16"]
    result = subprocess.run(
        [sys.executable, str(ROOT / "benchmark" / "layer_check.py"), *arguments],
        capture_output=True, text=True, env=os.environ | {"PYTHONPATH": str(ROOT)}, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-2000:]
