"""`bench layer`: variants, what turns add up to, the gates, and a whole run on the emulator."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from sgl_muse_mega.commands import bench_layer
from sgl_muse_mega.commands.layer.measured import Case
from sgl_muse_mega.commands.layer.session import ArmSpec, Session
from sgl_muse_mega.commands.roof import ROOF_GB_S
from sgl_muse_mega.errors import UserError


def options(**changes: Any) -> bench_layer.Options:
    values: dict[str, Any] = {
        "rows": (1,), "layers": 1, "context": 20, "bf16_experts": False, "kv": "fp8", "variants": (), "turns": 2,
        "repeats": 1, "draws": 1, "seed": 3, "check": True, "dry_run": True, "save": False,
    }  # fmt: skip
    return bench_layer.Options(**(values | changes))


def test_a_variant_names_fields_and_macros() -> None:
    spec = ArmSpec.parse("deep:math_warps=12,DEPTH=3,trace=true,AHEAD")
    assert spec.name == "deep"
    assert spec.tuning == {"math_warps": 12, "trace": True, "defines": ["DEPTH=3", "AHEAD"]}
    assert ArmSpec.parse("again").tuning == {}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (":math_warps=12", "no name"),
        ("x:math_warps=many", "number"),
        ("x:3=4", "neither"),
        ("x@/nowhere", "no checkout"),
    ],
)
def test_a_bad_variant_is_refused_with_the_reason(text: str, words: str) -> None:
    with pytest.raises(UserError, match=words):
        ArmSpec.parse(text)


def test_rows_outside_the_kernels_are_refused() -> None:
    assert bench_layer.numbers("1,4,16") == (1, 4, 16)
    for text in ("0", "17", "a", "1,,2"):
        with pytest.raises(UserError, match="1 to 16"):
            bench_layer.numbers(text)


def case(arm: str, rows: int, us: float) -> Case:
    """Two layers, two draws of 100 and 300 MB a layer, `us` a layer behind an embedding of 7 us."""
    made = Case(arm, rows, 2, [[1, 3], [5, 7]], [200_000_000, 600_000_000])
    made.add({"chain_us": [2 * us + 7, 2 * us + 7], "embed_us": [7, 7]})
    return made


def test_a_repeat_is_held_against_the_bytes_of_its_own_draw() -> None:
    made = case("this", 8, 100.0)
    assert made.us == pytest.approx([100, 100])
    assert made.speeds == pytest.approx([1000, 3000])
    assert made.fractions == pytest.approx([1000 / ROOF_GB_S, 3000 / ROOF_GB_S])
    assert (made.megabytes, made.mean_experts) == (200, 4)


def test_ratios_are_above_one_where_an_arm_is_faster() -> None:
    assert case("b", 8, 80.0).ratios_to(case("a", 8, 100.0)) == pytest.approx([1.25])


def test_stock_stands_beside(tmp_path: Path) -> None:
    file = tmp_path / "stock.json"
    file.write_text(json.dumps({"ratios": [{"rows": 8, "stock_us": [280.0, 300.0, 290.0]}]}))
    stock = bench_layer.read_stock(file)
    assert stock == {8: 290.0}
    console = Console(width=200)
    with console.capture() as capture:
        console.print(bench_layer.table([case("this", 8, 145.0)], stock))
    assert capture.get().split()[-2:] == ["290.0", "2.00"]
    file.write_text("[]")
    with pytest.raises(UserError, match=r"stock_layer\.py"):
        bench_layer.read_stock(file)


def test_figures_need_a_long_chain_at_the_context_of_the_table() -> None:
    full = options(rows=(1, 8), layers=8, context=2048, dry_run=False)
    cases = [case("this", 1, 60.0), case("this", 8, 140.0), case("other", 8, 1.0)]
    found = bench_layer.figures(full, cases)
    assert set(found) == {"layer.t1.us", "layer.t1.fraction", "layer.t8.us", "layer.t8.fraction"}
    assert found["layer.t8.us"].median == pytest.approx(140)
    bf16 = options(rows=(8,), layers=8, context=2048, dry_run=False, bf16_experts=True)
    assert set(bench_layer.figures(bf16, cases)) == {"layer.bf16.t8.fraction"}
    beside = bench_layer.figures(full, [*cases, case(bench_layer.CONTROL, 8, 210.0)])
    assert beside["layer.t8.ratio_pdl_control"].median == pytest.approx(1.5)
    for changes in ({"ranks": 1}, {"layers": 7}, {"context": 1024}, {"dry_run": True}):
        changed = options(**{"rows": (1, 8), "layers": 8, "context": 2048, "dry_run": False} | changes)
        assert bench_layer.figures(changed, cases) == {}


def test_the_figure_of_long_attention_is_that_of_the_full_layers() -> None:
    def layer(size: int, us: float) -> list[dict[str, Any]]:
        return [
            {"name": "INPUTS_READY", "bytes": 0, "first_start": 0.0, "last_end": 1.0},
            {"name": "ATTENTION", "bytes": size, "first_start": 1.0, "last_end": 1.0 + us},
        ]

    long = options(rows=(1, 8), layers=8, turns=3, context=131072, dry_run=False, trace=Path("trace.json"))
    phases = [layer(1 << 20, 5.0), layer(1 << 26, 60.0), layer(1 << 20, 5.0), layer(1 << 26, 80.0)]
    (figure,) = bench_layer.attention_figure(long, phases).values()
    assert (figure.max, figure.n) == (pytest.approx((1 << 26) / 60.0 / 4615e3), 2)
    for changed in (replace(long, context=2048), replace(long, rows=(1,)), replace(long, trace_arm="other")):
        assert bench_layer.attention_figure(changed, phases) == {}
    assert bench_layer.attention_figure(long, []) == {}


@pytest.mark.parametrize(
    ("harm", "words"),
    [
        ({"finite": False}, "not finite"),
        ({"row_alone": False}, "depend on the other rows"),
        ({"after": "other"}, "other bits after"),
        ({"failed": ["A8 o_proj"]}, "A8 o_proj"),
        ({}, ""),
    ],
)
def test_each_gate_names_what_is_wrong(harm: dict[str, Any], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    bits = {"digest": "same", "finite": True, "row_alone": True}
    bits |= {key: value for key, value in harm.items() if key in bits}
    stages = {"compared": 20, "failed": harm.get("failed", []), "worst": "F2", "cosine": 0.99999, "relative_rms": 1e-4}
    before = {"bits": {"8": {"this": bits}}, "stages": {"8": {"this": stages}}}
    after = {"8": {"this": bits | {"digest": harm.get("after", "same")}}}
    wrong = bench_layer.verdicts(Console(soft_wrap=True), options(), before, after)
    assert wrong == bool(harm)
    assert words in capsys.readouterr().out


def test_whole_run_on_the_emulator(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Two arms, one of which cannot be built: the other's figures are there, and the exit code tells. The trace
    finds the bytes that the table counts."""
    monkeypatch.setattr("sgl_muse_mega.results.results_directory", lambda: tmp_path)
    trace = tmp_path / "trace.json"
    assert bench_layer.run(options(variants=("broken:FOO,math_warps=3",), save=True, trace=trace, ranks=2)) == 1
    shown = capfd.readouterr().out
    assert "broken failed" in shown
    (file,) = tmp_path.glob("layer-*.json")
    content = json.loads(file.read_text())
    assert [c["arm"] for c in content["cases"]] == ["this"]
    ((experts,),) = content["cases"][0]["distinct_experts"]
    assert 0 <= experts <= 4  # a row's, of this rank
    assert content["checks"]["stages"]["1"]["this"]["failed"] == []
    assert not (tmp_path / "figures.json").exists()
    (phases,) = content["phases"]
    weights = sum(phase["bytes"] for phase in phases if phase["name"] != "ATTENTION")
    assert [weights] == content["cases"][0]["bytes"]
    names = {event["name"] for event in json.loads(trace.read_text())["traceEvents"]}
    assert {"layer 0", "gate up", "wait: ring full", "weights taken up, GB/s"} <= names


def test_two_arms_of_one_name_are_refused() -> None:
    with pytest.raises(UserError, match="same name"):
        Session([ArmSpec("a"), ArmSpec("a")], {})


def test_an_arm_to_trace_must_be_one_of_those_that_run() -> None:
    with pytest.raises(UserError, match="no arm 'nobody' to trace; name one of this, staged"):
        bench_layer.run(options(variants=("staged:staged_split=128",), trace_arm="nobody"))
