"""benchmark/stock_layer.py beside a rival whose numbers are known."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmark"))
import stock_layer

RUN_ENGINE = """
import argparse, json, pathlib
ap = argparse.ArgumentParser()
for name in ("dir", "spec", "new", "prompt", "width", "acc", "profile"):
    ap.add_argument("--" + name, default="")
a = ap.parse_args()
layers, rows = map(int, a.dir.split("_")[-2:])
assert (rows > 1) == (a.spec == "1")
for rep in range(3):
    print("rep", rep, "decode 1 s -> %.3f ms per step (steps=4)" % (5 + layers * (0.3 if rows > 1 else 0.12)))
if a.profile:
    steps = 12 if rows > 1 else 48
    names = ["_fwd_kernel"] if rows > 1 else ["_fwd_grouped_kernel_stage1", "_fwd_kernel_stage2"]
    events = [{"cat": "kernel", "name": n, "ts": i, "dur": 20.0} for i in range(layers * steps) for n in names]
    events += [{"cat": "kernel", "name": "_fwd_kernel", "ts": i, "dur": 400.0} for i in range(5)]
    events += [{"cat": "kernel", "name": "gemm", "ts": i, "dur": 100.0} for i in range(layers * steps)]
    events += [{"cat": "cpu_op", "name": "_fwd_kernel", "ts": 0, "dur": 1e6}]
    (pathlib.Path(a.profile) / "x.trace.json").write_text(json.dumps({"traceEvents": events}))
"""


@pytest.fixture
def stock(tmp_path: Path) -> Path:
    (tmp_path / "device.sh").write_text("")
    (tmp_path / "make_models.py").write_text("import sys; assert len(sys.argv) == 8")
    (tmp_path / "run_engine.py").write_text(RUN_ENGINE)
    return tmp_path


class FakeSession:
    """Ours: 150 us at 8 rows, 60 at one."""

    descriptions = {"this": {"gpu": "a GPU"}}  # noqa: RUF012

    def __init__(self, specs: list[Any], workload: dict[str, Any]) -> None:
        self.turns = 0

    def __enter__(self) -> "FakeSession":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def ask(self, question: str, **arguments: Any) -> dict[str, Any]:
        if question == "load":
            return {"this": {"experts": [[14] * 8], "bytes": [8 * 558_000_000]}}
        us = 8 * {8: 150.0, 1: 60.0}[arguments["rows"]]
        return {"this": {"chain_us": [us + 20.0] * 12, "embed_us": [20.0] * 12}}


def test_layers_attention_and_ratios(
    stock: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(stock_layer, "Session", FakeSession)
    monkeypatch.setattr(stock_layer.preflight, "need_gpus", lambda _count: None)
    out = stock / "out.json"
    monkeypatch.setattr(sys, "argv", ["stock_layer.py", "--stock", str(stock), "--rounds", "1", "--json", str(out)])
    assert stock_layer.main() == 0
    eight, one = json.loads(out.read_text())["ratios"]
    assert eight["stock_us"] == pytest.approx([300] * 3)
    assert eight["attention_us"] == pytest.approx(20)
    assert eight["ratio"] == pytest.approx([2.0] * 3)
    assert eight["ratio_without_attention"] == pytest.approx([280 / 150] * 3)
    assert one["stock_us"] == pytest.approx([120] * 3)
    assert one["attention_us"] == pytest.approx(40)  # two kernels of a decode; the draft's five are no layer's
    assert one["ratio"] == pytest.approx([2.0] * 3)
    assert len(eight["ours_us"]) == 3 * 12  # a turn before each of stock's two processes with these rows, and one after
    assert set(stock_layer.figures([eight, one])) == {
        "layer.t1.ratio_stock", "layer.t8.ratio_stock", "layer.t8.ratio_stock_without_attention",
    }  # fmt: skip
    assert "300.0 (300.0..300.0)" in capsys.readouterr().out


def test_a_rival_that_fails_later_keeps_what_there_was(
    stock: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(stock_layer, "Session", FakeSession)
    monkeypatch.setattr(stock_layer.preflight, "need_gpus", lambda _count: None)
    (stock / "run_engine.py").write_text(RUN_ENGINE.replace("for rep", "assert rows > 1\nfor rep", 1))
    out = stock / "out.json"
    monkeypatch.setattr(sys, "argv", ["stock_layer.py", "--stock", str(stock), "--rounds", "1", "--json", str(out)])
    assert stock_layer.main() == 1
    assert [found["rows"] for found in json.loads(out.read_text())["ratios"]] == [8]
    assert "error: " in capsys.readouterr().err


def test_a_rival_that_prints_nothing_is_an_error(stock: Path) -> None:
    (stock / "run_engine.py").write_text("print('ready')")
    with pytest.raises(RuntimeError, match="no step time"):
        stock_layer.run_stock(stock, 8, 14, False, 30.0)
