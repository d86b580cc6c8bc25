"""The target's kernels on a GPU, through the check programs in benchmark/; each runs in a process of its own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper GPU"
    ),
]


def run(script: str, *arguments: str) -> str:
    """Output of a check program, which must succeed."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    result = subprocess.run(
        [sys.executable, str(ROOT / script), *arguments], capture_output=True, text=True, env=environment, check=False
    )
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-4000:]
    return result.stdout


@pytest.mark.parametrize("sizes", ["tiny", "tiny-bf16", "odd", "odd-bf16"])
def test_every_stage_of_small_models(sizes: str) -> None:
    run("benchmark/layer_check.py", "--sizes", sizes, "--rows", "1-16", "--contexts", "0,1,63,64,65,300")


@pytest.mark.parametrize("sizes", ["full", "full-bf16"])
def test_every_stage_at_full_size(sizes: str) -> None:
    contexts = "1,63,64,65,2047,2048,2049,8192"
    run("benchmark/layer_check.py", "--sizes", sizes, "--rows", "1,8,16", "--contexts", contexts)


@pytest.mark.parametrize("sizes", ["tiny", "full"])
@pytest.mark.parametrize("routing", ["ties", "crowd"])
def test_ties_of_the_router_and_an_expert_with_all_rows(routing: str, sizes: str) -> None:
    run("benchmark/layer_check.py", "--routing", routing, "--sizes", sizes, "--rows", "1,8,16", "--contexts", "65")


@pytest.mark.parametrize("kv_dtype", ["bf16", "fp8"])
def test_a_row_has_the_same_bits_in_any_company(kv_dtype: str) -> None:
    run("benchmark/replay_check.py", "invariance", "--kv", kv_dtype)


def test_a_row_has_the_same_bits_at_full_size() -> None:
    run("benchmark/replay_check.py", "invariance", "--sizes", "full", "--kv", "fp8", "--contexts", "2040")


def test_replays_equal_a_fresh_process(tmp_path: Path) -> None:
    states = str(tmp_path / "states.pt")
    run("benchmark/replay_check.py", "write", states)
    run("benchmark/replay_check.py", "soak", states, "--replays", "20000")


def test_decoding_with_and_without_draft_and_the_reference_agree() -> None:
    run("benchmark/decode_check.py", "--problems", "200")


def test_a_missed_deadline_becomes_a_sentence() -> None:
    sentence = run("tests/gpu/missed_deadline.py")
    assert "waited past the deadline for" in sentence  # for the counter, or for what should have followed it
    assert "expected" in sentence
