"""Our layer beside stock SGLang's, at the shapes of one rank of four, in turns on the same GPU.

    python benchmark/stock_layer.py --stock FOLDER --json stock-layer.json --save

FOLDER is that of `stock_step.py`. Stock's layer is a difference: (step of a model of 26 layers - step of one of 14)
/ 12, with 64 experts top-2 (the rank's work), the whole draft at T = 8 (DFLASH verify) and no draft at T = 1 (plain
decode). Both models keep the GPU busy, so what a step has beside its target layers cancels. The time of stock's
attention kernels in a layer is the median of those that a profile of the larger model shows once per layer and step.

Ours runs in a process that stays, one number of rows after the other: a turn before each of stock's processes with
these rows and one after the last. The file is written after each number of rows, and a rival that fails keeps those
before.
"""

import argparse
import gzip
import itertools
import json
import shlex
import statistics
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import preflight
from stock_step import ATTENTION, call, call_stock, step_ms

from sgl_muse_mega.commands.layer.measured import Case
from sgl_muse_mega.commands.layer.session import ArmSpec, Session

SIZES = (26, 14)  # layers of stock's models
CONTEXT, TOKENS, ACCEPT_LENGTH = 1024, 256, 4.0
PROFILED_TOKENS = 48
ARM = "this"


def run_stock(folder: Path, rows: int, layers: int, profile: bool, timeout: float) -> dict[str, Any]:
    """ms per step of every repeat; with a profile, also us of the attention kernels in a layer."""
    model = f"/tmp/stock_layer_{layers}_{rows}"
    engine = f"python3 run_engine.py --dir {model} --spec {int(rows > 1)} --new {TOKENS} --prompt {CONTEXT}"
    engine += f" --width {rows} --acc {ACCEPT_LENGTH}"
    with tempfile.TemporaryDirectory() as traces:
        if profile:
            engine += f" --profile {shlex.quote(traces)}"
        models = f"python3 make_models.py {model} {layers} 64 2 32 4 {max(rows, 2)}"
        output = call_stock(f"{models} && {engine}", folder, timeout)
        found: dict[str, Any] = {"rows": rows, "layers": layers, "ms": step_ms(output)}
        if profile:
            per_step = ACCEPT_LENGTH if rows > 1 else 1.0
            found["attention"] = attention_us(read_kernels(Path(traces)), layers * PROFILED_TOKENS / per_step)
    return found


def read_kernels(folder: Path) -> list[tuple[float, float, str]]:
    """(start us, us, name) of every kernel in the profile's trace, in order."""
    files = sorted(folder.rglob("*trace.json*"))
    if not files:
        raise RuntimeError("Stock SGLang left no profile.")
    raw = files[0].read_bytes()
    events = json.loads(gzip.decompress(raw) if files[0].suffix == ".gz" else raw)["traceEvents"]
    return sorted((e["ts"], e["dur"], e["name"]) for e in events if e.get("cat") == "kernel")


def attention_us(kernels: Iterable[tuple[float, float, str]], launches: float) -> dict[str, float]:
    """Median us of each attention kernel that runs about once per layer and step (`launches` in all): the draft's and
    the prompt's are fewer, and do not move the median."""
    durations: dict[str, list[float]] = {}
    for _, us, name in kernels:
        if name.strip() in ATTENTION:
            durations.setdefault(name.strip(), []).append(us)
    return {name: statistics.median(all_us) for name, all_us in durations.items() if len(all_us) > 0.8 * launches}


def stock_layers(runs: list[dict[str, Any]], rows: int) -> list[float]:
    """us of stock's layer: every repeat of the larger model against the same repeat of the smaller one."""
    large, small = ([ms for run in runs if (run["rows"], run["layers"]) == (rows, size) for ms in run["ms"]]
                    for size in SIZES)  # fmt: skip
    return [(a - b) / (SIZES[0] - SIZES[1]) * 1e3 for a, b in zip(large, small, strict=True)]


def ratios(runs: list[dict[str, Any]], case: Case) -> dict[str, Any]:
    """Stock's layer, the same without its attention kernels, and both over our median."""
    layer = stock_layers(runs, case.rows)
    attention = sum(next(r["attention"] for r in runs if r["rows"] == case.rows and "attention" in r).values())
    ours = statistics.median(case.us)
    return {
        "rows": case.rows, "stock_us": layer, "attention_us": attention, "ours_us": case.us,
        "ratio": [us / ours for us in layer], "ratio_without_attention": [(us - attention) / ours for us in layer],
    }  # fmt: skip


def measure(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """What there is after each number of rows: `gpu`, `cases` (ours), `runs` (stock's), `ratios`, all repeats."""
    rows_of = sorted(arguments.rows, reverse=True)
    workload = {
        "rows": rows_of, "layers": 8, "context": CONTEXT + TOKENS // 2, "nvfp4": True, "kv": "bf16", "draws": 4,
        "seed": 1, "ranks": arguments.ranks, "emulated": False,
    }  # fmt: skip
    runs: list[dict[str, Any]] = []
    cases: list[Case] = []
    with Session([ArmSpec(ARM)], workload) as session:
        for rows in rows_of:
            case = Case(ARM, rows, 8, **session.ask("load", rows=rows)[ARM])
            for number, size in itertools.product(range(arguments.rounds), SIZES):
                case.add(session.ask("times", rows=rows, repeats=12, first_draw=0)[ARM])
                profile = number == 0 and size == SIZES[0]
                runs.append(run_stock(arguments.stock.resolve(), rows, size, profile, arguments.timeout))
                steps = ", ".join(f"{ms:.2f}" for ms in runs[-1]["ms"])
                print(f"stock, T = {rows}, {size} layers: {steps} ms per step", flush=True)
            case.add(session.ask("times", rows=rows, repeats=12, first_draw=0)[ARM])
            cases.append(case)
            yield {
                "gpu": session.descriptions[ARM]["gpu"], "context": workload["context"], "ranks": arguments.ranks,
                "runs": runs, "cases": [each.content() for each in cases],
                "ratios": [ratios(runs, each) for each in cases],
            }  # fmt: skip


def figures(found: list[dict[str, Any]]) -> dict[str, Any]:
    from sgl_muse_mega.results import Figure

    named = {f"layer.t{r['rows']}.ratio_stock": Figure.of(r["ratio"], "ratio") for r in found if r["rows"] in (1, 8)}
    for r in found:
        if r["rows"] == 8:
            named["layer.t8.ratio_stock_without_attention"] = Figure.of(r["ratio_without_attention"], "ratio")
    return named


def report(found: list[dict[str, Any]]) -> None:
    print(f"{'rows':>4}  {'stock us':<24}{'ours us':<24}{'ratio':<24}{'without attention'}")
    for r in found:
        cells = [
            f"{statistics.median(v):.{digits}f} ({min(v):.{digits}f}..{max(v):.{digits}f})"
            for v, digits in ((r["stock_us"], 1), (r["ours_us"], 1), (r["ratio"], 2), (r["ratio_without_attention"], 2))
        ]
        print(f"{r['rows']:>4}  " + "".join(f"{cell:<24}" for cell in cells).rstrip())
        print(f"      stock's attention kernels: {r['attention_us']:.1f} us of its layer")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stock", type=Path, required=True, help="folder of the rival's scripts and packages")
    parser.add_argument("--rows", type=lambda text: [int(part) for part in text.split(",")], default=[8, 1])
    parser.add_argument("--ranks", type=int, default=4, help="of our layer: 1 has no exchange and whole projections")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--timeout", type=float, default=400.0, help="seconds of one of stock's processes")
    parser.add_argument("--keep-cache", type=Path, help="file for what stock compiled, to be its next cache.tar.xz")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--save", action="store_true", help="write the results and the named figures")
    arguments = parser.parse_args()
    preflight.need_rival(arguments.stock, "run_engine.py")
    preflight.need_room_for(arguments.json, arguments.save)
    preflight.need_gpus(1)
    found: dict[str, Any] = {}
    failed = False
    try:
        for found in measure(arguments):
            report(found["ratios"][-1:])
            if arguments.json:
                arguments.json.write_text(json.dumps(found, indent=1))
    except RuntimeError as error:
        failed = True
        print(f"error: {error}", file=sys.stderr)
    if arguments.save and found:
        from sgl_muse_mega import results

        environment = results.environment(found["gpu"], ("python", "benchmark/stock_layer.py"))
        print(results.save("stock_layer", environment, found, figures(found["ratios"])))
    if arguments.keep_cache:
        target = shlex.quote(str(arguments.keep_cache.resolve()))
        call(["bash", "-c", f". ./device.sh && save_cache {target}"], arguments.stock.resolve(), arguments.timeout)
    return int(failed)


if __name__ == "__main__":
    sys.exit(preflight.guarded(main))
