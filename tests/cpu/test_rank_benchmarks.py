"""The benchmarks over several ranks at tiny sizes on the emulator, and what they do with a rank that fails."""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sgl_muse_mega.errors import UserError

BENCHMARK = Path(__file__).parents[2] / "benchmark"
sys.path.insert(0, str(BENCHMARK))

import exchange_check  # noqa: E402
import full_size  # noqa: E402
import full_size_report  # noqa: E402
import full_size_scaling  # noqa: E402
import preflight  # noqa: E402
import rank_workers  # noqa: E402
import step_ranks  # noqa: E402
import stock_step  # noqa: E402

ENGINE = """
import sys
print("arguments", *sys.argv[1:])
for rep in range(3):
    print(f"rep {rep} decode 1.2 s for 256 tokens -> {80000 + rep}.000 ms per step (steps=64), 213.3 tok/s", flush=True)
"""


def rival(folder: Path, after: str) -> Path:
    """A rival whose engine prints what the real one does, and then does `after`."""
    (folder / "device.sh").write_text("")
    (folder / "make_models.py").write_text("import sys; print('shape', *sys.argv[2:])")
    (folder / "run_engine.py").write_text(ENGINE + after)
    return folder


def test_full_size_dry_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, stock = tmp_path / "full.json", rival(tmp_path, "print('PROF  9600.0 us  60 x  160.00 us  _fwd_kernel')")
    given = ["--dry-run", "--ranks", "2", "--rows", "3", "--repeats", "1", "--steps", "3", "--context", "16"]
    assert full_size.main([*given, "--json", str(path), "--stock", str(stock), "--timeout", "900"]) == 0
    content = json.loads(path.read_text())
    (case,) = content["cases"]
    assert set(full_size_report.PARTS) | {"layers, loop-back", "draft", "embedding"} == set(case["parts"])
    assert len(case["ranks"]) == 2
    assert [len(rank["experts"]) for rank in case["ranks"]] == [3, 3]
    assert case["ranks"][0]["tokens"] == case["ranks"][1]["tokens"]
    assert case["ranks"][0]["tokens"][1:] != [0, 0]  # drafts
    per_layer = list(zip(*(rank["experts"] for rank in case["ranks"]), strict=True))
    assert case["experts"]["busiest"] == pytest.approx(sum(map(max, per_layer)) / 3)
    assert case["experts"]["max"] == max(map(max, per_layer))
    assert case["bytes"] > 3 * case["nvfp4_layer_bytes"]
    assert set(case["tokens_per_second"]) == {"1.0", "3.0", "3.88", "4.19", "5.37"}
    assert [(answer["equal"], answer["steps"]) for answer in content["equal"]] == [(True, 3)] * 2
    assert [entry["after"] for entry in content["memory_gb"][0]][:3] == ["draft's share", "layer 0", "layer 2"]
    assert content["environment"]["gpu"] == "cpu"
    assert content["stock"]["ms"] == [80000.0, 80001.0, 80002.0]
    assert content["stock"]["attention_ms"] == pytest.approx(0.8)  # 9.6 ms over 48 / 4 steps
    assert "shape 3 256 8 128 16 8" in content["stock"]["tail"]
    assert '--prompt 16 --width 8 --acc 4.0 --tp 2 --extra {"mem_fraction_static": 0.95}' in content["stock"]["tail"]
    printed = capsys.readouterr().out
    for line in (
        "GB held",
        "model made in",
        "3 rows: ",
        "exchanges",
        "busiest",
        "of roof",
        "tokens per second",
        "host",
    ):
        assert line.replace("exchanges", "changes") in printed
    assert "bits of all ranks after 3 of 3 steps: equal" in printed
    assert "stock: 80000.000, 80001.000, 80002.000 ms per step" in printed


def test_full_size_keeps_what_there_is_time_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, stock = tmp_path / "full.json", rival(tmp_path, "")
    given = ["--dry-run", "--ranks", "1", "--rows", "2", "--repeats", "1", "--steps", "1", "--context", "16"]
    assert full_size.main([*given, "--json", str(path), "--stock", str(stock), "--timeout", "20"]) == 1
    content = json.loads(path.read_text())
    assert content["cases"] == []
    assert "not enough" in content["stock"]["left_out"]
    assert "not measured: 2 rows" in capsys.readouterr().out


def test_a_rival_that_fails_late_keeps_its_times(tmp_path: Path) -> None:
    found = stock_step.run_stock(rival(tmp_path, "raise SystemExit('no profile')"), 4.0, 256, True, 60.0)
    assert found["ms"] == [80000.0, 80001.0, 80002.0]
    assert "no profile" in found["problem"]
    (tmp_path / "run_engine.py").write_text("import time; time.sleep(60)")
    with pytest.raises(RuntimeError, match="took more than 2 s"):
        stock_step.run_stock(tmp_path, 4.0, 256, True, 2.0)


def measured(ranks: int, layers: int, us: float) -> dict[str, Any]:
    """A file of full_size.py whose NVFP4 layers take `us` and read 1 GB on the busiest rank, everything else 1 ms."""
    between, other = layers - 2, ("draft", "draft head", "target head", "accept", "draft context")
    upto = {"embedding": 10.0, "to first layer": 110.0, "to last but one": 110.0 + between * us}
    upto |= {"layers": 260.0 + between * us, "layers, loop-back": 255.0 + between * us}
    one = {
        "rows": 8, "step_us": [between * us + 1000.0] * 3, "gap_us": [0.0], "experts": [20] * layers,
        "experts_loop_back": [18] * layers, "layer_bytes": [0, *[10**9] * between, 0], "other_bytes": 0,
        "us": {name: [time] for name, time in (upto | dict.fromkeys(other, 100.0)).items()},
    }  # fmt: skip
    less = {**one, "layer_bytes": [0] * layers, "experts": [10] * layers}
    found = rank_workers.Found([[("case", case)] for case in [one, less][:ranks]])
    content = full_size_report.report(found, ranks=len(found.told), layers=layers, context=1, rows=(8,), steps=0)
    parts = content["cases"][0]["parts"]
    assert [round(1e3 * parts[name]) for name in ("first layer", "last layer", "exchanges")] == [100, 150, 5]
    return {**content, "sizes": {"ranks": ranks, "layers": layers, "experts": 256}}


def test_scaling(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = []
    for ranks, layers, us in ((1, 11, 800.0), (2, 29, 400.0), (4, 62, 200.0)):
        content = measured(ranks, layers, us)
        if ranks == 4:
            content["stock"] = {"ms": [26.0, 27.0, 25.0]}
        files.append(tmp_path / f"{ranks}.json")
        files[-1].write_text(json.dumps(content))
    found = [point for path in files for point in full_size_scaling.points(json.loads(path.read_text()))]
    assert [point.scaled_ms for point in found] == pytest.approx([49.0, 25.0, 13.0])
    roof = 60 / full_size_report.ROOF_GB_S * 1e3
    assert [point.scaled_roof_ms for point in found] == pytest.approx([roof] * 3)
    capsys.readouterr()
    plot = tmp_path / "plot.svg"
    assert full_size_scaling.main([*map(str, files), "--plot", str(plot)]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    times = ["13.000", "200.0", "216.7", "13.000", f"{roof:.3f}", "1.000", "3.769", "413.1"]
    assert lines[-1] == ["8", "4", "62", *times, "26.000", "2.000"]
    assert "of 62 layers" in plot.read_text()


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


def waits(_machine: object, place: Any, *_: object) -> None:
    if place.rank == 0:
        os._exit(7)
    time.sleep(60)


def test_a_rank_that_is_gone_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a word from it, and long before the others' own deadlines."""
    monkeypatch.setattr(rank_workers, "_process", silent)
    start = time.monotonic()
    found = rank_workers.run_on_gpus(waits, None, 2, seconds=120, deadline=0.5)
    assert found.problems == ["rank 0 ended with code 7"]
    assert time.monotonic() - start < 40


def silent(worker: Any, _options: Any, rank: int, *_: Any) -> None:
    worker(None, SimpleNamespace(rank=rank))


def test_a_rival_that_fails_costs_no_result(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = argparse.Namespace(stock=rival(tmp_path, ""), accept_length=4.0, ranks=2, layers=14)
    assert step_ranks.beside_stock(40000.0, given, 60.0)["ratio"] == pytest.approx([2.0, 2.0, 2.0], rel=1e-3)
    (tmp_path / "run_engine.py").write_text("raise SystemExit('no memory')")
    found = step_ranks.beside_stock(40000.0, given, 60.0)
    assert set(found) == {"stock"}
    assert "no memory" in found["stock"]["left_out"]
    assert "no memory" in capsys.readouterr().out


def test_rounds_before_one_that_fails_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(preflight, "need_gpus", lambda _count: None)
    monkeypatch.setattr(stock_step, "run_ours", lambda *_: {"ms": 40000.0, "step_us": [4e7], "gap_us": [0.0]})
    stock, path = rival(tmp_path, "import pathlib; pathlib.Path('run_engine.py').write_text('')"), tmp_path / "s.json"
    assert stock_step.main(["--stock", str(stock), "--rounds", "2", "--json", str(path)]) == 1
    content = json.loads(path.read_text())
    assert [entry["stock"]["ms"] for entry in content["rounds"]] == [[80000.0, 80001.0, 80002.0]]
    assert "printed no step time" in content["problem"]
    assert "error: round 2: Stock SGLang printed no step time" in capsys.readouterr().err


def test_the_exchange_check_keeps_the_rows_that_it_had(capsys: pytest.CaptureFixture[str]) -> None:
    def case(rows: int, us: float, equal: bool = True) -> tuple[str, Any]:
        times = {"loop_back": [100.0], "peers": [100.0 + us]}
        points = {name: [us] for name in exchange_check.POINTS}
        return "case", {"rows": rows, "us": times, "equal": equal, "points": points}

    def given(*rows: int) -> argparse.Namespace:
        return argparse.Namespace(rows=list(rows), replays=100, points=True)

    told = [[("gpu", "GPU 0"), case(8, 4.0), case(1, 2.0)], [("gpu", "GPU 1"), case(8, 8.0)]]
    found = exchange_check.table(rank_workers.Found(told, ["rank 1: out of memory"]), given(8, 1))
    printed = capsys.readouterr().out
    assert found["failed"]
    assert [len(rank["cases"]) for rank in found["ranks"]] == [2, 1]
    for line in ("2.00  equal in 100 replays", "not measured: 1 rows", "rank 1: out of memory"):
        assert line in printed
    assert exchange_check.named_figures(found) == {}
    whole = exchange_check.table(rank_workers.Found([told[0][:2], told[1]]), given(8))
    assert not whole["failed"]
    assert {figure.median for figure in exchange_check.named_figures(whole).values()} == {8.0}
    differs = rank_workers.Found([told[0][:2], [told[1][0], case(8, 1.0, equal=False)]])
    assert exchange_check.table(differs, given(8))["failed"]
    nothing = exchange_check.table(rank_workers.Found([[], []], ["rank 0: no GPU"]), given(8))
    assert nothing["failed"]
    assert nothing["ranks"][0] == {"rank": 0, "gpu": None, "cases": []}


@pytest.mark.parametrize(
    ("script", "words", "said"),
    [
        ("full_size.py", [], "needs 4 GPUs and torch finds 0"),
        ("full_size.py", ["--ranks", "3"], "1, 2, 4 or 8 ranks, 3 were asked for"),
        ("full_size.py", ["--rows", "8,17"], "1 to 16 rows"),
        ("full_size.py", ["--stock", "."], "it has no device.sh and no make_models.py and no run_engine.py"),
        ("full_size.py", ["--json", "absent/full.json"], "absent/full.json cannot be written"),
        ("stock_step.py", ["--stock", "absent"], "absent is not the rival's folder"),
        ("stock_layer.py", ["--stock", "rival"], "needs 1 GPU and torch finds 0"),
        ("validate.py", ["--json", "v.json", "--only", "soak,memchek"], "--only does not know 'memchek'"),
        ("validate.py", ["--json", "v.json"], "needs 1 GPU and torch finds 0"),
        ("step_ranks.py", [], "needs 2 GPUs and torch finds 0"),
        ("step_ranks.py", ["--stock", "absent"], "absent is not the rival's folder"),
        ("exchange_check.py", ["--failures", "2"], "needs 2 GPUs and torch finds 0"),
        ("exchange_check.py", ["--json", "."], "a file in a folder that there is"),
        ("serve_check.py", ["--stock", "rival", "--tp", "2"], "needs 2 GPUs and torch finds 0"),
        ("serve_check.py", ["--stock", "rival", "--parts", "texts"], "does not know 'texts'; it takes text, time"),
        ("serve_check.py", ["--stock", "rival", "--arms", "full,half"], "--arms does not know 'half'"),
        ("serve_check.py", ["--stock", "rival", "--pairs", "w8"], "--pairs does not know 'w8'"),
    ],
)
def test_a_run_that_cannot_end_well_does_not_begin(script: str, words: list[str], said: str, tmp_path: Path) -> None:
    (tmp_path / "rival").mkdir()
    rival(tmp_path / "rival", "")
    environment = {**os.environ, "PYTHONPATH": str(BENCHMARK.parent), "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, str(BENCHMARK / script), *words]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: ")
    assert said in done.stderr
    assert done.stderr.count("\n") == 1
