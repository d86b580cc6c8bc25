"""The benchmarks over several ranks at tiny sizes on the emulator, and what they do with a rank that fails."""

import json
import sys
from pathlib import Path

import pytest

from sgl_muse_mega.errors import UserError

BENCHMARK = Path(__file__).parents[2] / "benchmark"
sys.path.insert(0, str(BENCHMARK))

import full_size  # noqa: E402
import rank_workers  # noqa: E402
import step_ranks  # noqa: E402


def test_full_size_dry_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "full.json"
    given = ["--dry-run", "--ranks", "2", "--rows", "3", "--repeats", "1", "--steps", "1", "--context", "16"]
    assert full_size.main([*given, "--json", str(path)]) == 0
    content = json.loads(path.read_text())
    (case,) = content["cases"]
    assert {"draft", "layers", "layers, loop-back", "NVFP4 layer", "last layer"} <= set(case["us"])
    assert len(case["ranks"]) == 2
    assert len(case["distinct_experts"]) == 3
    assert set(case["tokens_per_second"]) == {"1.0", "3.0", "3.88", "4.19", "5.37"}
    assert [answer["equal"] for answer in content["equal"]] == [True, True]
    assert [entry["after"] for entry in content["memory_gb"][0]][:3] == ["draft's share", "layer 0", "layer 2"]
    assert content["environment"]["gpu"] == "cpu"
    assert "bits of all ranks after 1 steps: equal" in capsys.readouterr().out


def test_texts_are_judged(capsys: pytest.CaptureFixture[str]) -> None:
    def found(second: list[tuple[int, str, list[object]]], *rows: dict[str, object]) -> rank_workers.Found:
        first = [(1, "greedy", [((5,), 0)])]
        told = [[("steps", s) for s in steps] for steps in (first, second)]
        told[0] += [("text", row) for row in rows]
        return rank_workers.Found(told)

    same = [(1, "greedy", [((5,), 0)])]
    row: dict[str, object] = {"line": 1, "kind": "greedy", "same": False, "tokens": 3, "at": 2}
    assert not step_ranks.judge_texts(found(same, {**row, "same": True}))["failed"]
    assert not step_ranks.judge_texts(found(same, {**row, "gap": 0.001}))["failed"]
    assert step_ranks.judge_texts(found(same, {**row, "gap": 0.5}))["failed"]
    assert step_ranks.judge_texts(found(same, row))["failed"]
    assert step_ranks.judge_texts(found([(1, "greedy", [((6,), 0)])], {**row, "same": True}))["failed"]
    assert "problem 1 from token 2, gap of logits 0.5" in capsys.readouterr().out


def fails(machine: object, place: object, options: object, tell: rank_workers.Tell) -> None:
    """On a machine without a GPU a rank does not even come here."""
    raise UserError("on purpose")


def test_a_rank_that_fails_ends_the_run() -> None:
    found = rank_workers.run_on_gpus(fails, None, 1, seconds=120)
    assert len(found.problems) == 1
    assert found.problems[0].startswith("rank 0: ")
    assert found.told == [[]]
