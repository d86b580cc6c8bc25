"""Step times of servers with and without the plugin, in turns, on one GPU (part `time` of serve_check.py)."""

import argparse
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import stock_models
from serve_arms import Arm, ArmError, common, speculative
from stock_step import ATTENTION

Say = Callable[[str], None]

# layers, experts, experts per token, heads, KV heads, width: on every GPU what one rank of four has
SHAPES = {1: "14 64 2 32 4 8", 2: "14 128 4 64 8 8", 4: "14 256 8 128 16 8"}
PROMPT, NEW = 1024, 192
BOUNDS = {"w8.full": 1.7, "w8.target": 1.7, "t1": 1.8}
STEPS = {"w8.full": "full", "w8.target": "target", "t1": "target"}


def check(
    servers: Any,
    stock: Path,
    work: Path,
    options: argparse.Namespace,
    record: dict[str, Any],
    say: Say,
) -> None:
    """Fills the record. Two servers at a time are on the GPU (up to 100 GB), and only one of them works."""
    models = work / "models"
    stock_models.make(stock, models, SHAPES[options.tp])
    plain = common(
        model_path=str(models / "target"), load_format="dummy", context_length=8192, max_running_requests=1,
        cuda_graph_bs_decode=[1], disable_radix_cache=True, chunked_prefill_size=2048, page_size=64,
        tp_size=options.tp, ep_size=options.tp,
    )  # fmt: skip
    dflash = plain | speculative(str(models / "draft"))
    prompt = [(i * 7919) % 200000 for i in range(PROMPT)]
    record |= {"ms": {}, "steps": {}, "ratio": {}, "plugin_profiles": {}}
    rivals: dict[bool, Arm] = {}
    pairs = options.pairs.split(",")
    for pair in pairs:
        single = pair == "t1"
        arguments = plain if single else dflash
        started = []
        if single not in rivals:
            for rival in rivals.values():
                rival.stop()
            rivals = {single: servers.start("stock-t1" if single else "stock-w8", arguments, weights=True)}
            started.append(rivals[single])
        ours = servers.start(f"{pair}-plugin", arguments, STEPS[pair], weights=True)
        try:
            for arm in (*started, ours):
                say(f"{arm.name} is up, its engine took {arm.ready(options.timeout):.0f} s")
            say(turns(pair, rivals[single], ours, prompt, options.rounds, record))
            found = ours.ask("profile", prompt=prompt, new=48, folder=str(work / ours.name))
            record["plugin_profiles"][pair] = found
            say(f"{ours.name}: the GPU does nothing in {found['idle']:.1%} of its steps")
            ours.stop()
            if not single and "attention_ms" not in record:
                record |= attention(rivals[single], prompt, work)
        except ArmError as error:  # the other pairs have servers of their own
            say(f"FAIL {error}")
            record["failed"].append(pair if pair not in record["ms"] else "profile")
        ours.stop()
    if "attention_ms" in record:
        for pair in (name for name in record["ms"] if name != "t1"):
            both = zip(record["ms"][pair]["stock"], record["ms"][pair]["plugin"], strict=True)
            record["ratio"][f"{pair}.without_attention"] = [(a - record["attention_ms"]) / b for a, b in both]
    medians = {name: round(statistics.median(values), 3) for name, values in record["ratio"].items()}
    say(f"stock's attention kernels {record.get('attention_ms')} ms per step; ratios {json.dumps(medians)}")


def turns(pair: str, theirs: Arm, ours: Arm, prompt: list[int], rounds: int, record: dict[str, Any]) -> str:
    """Both servers in turns; a line with the outcome."""
    times: dict[str, list[float]] = {"stock": [], "plugin": []}
    for arm in (theirs, ours):
        arm.ask("step_time", prompt=prompt, new=32)
    for _ in range(rounds):
        for label, arm in (("stock", theirs), ("plugin", ours)):
            found = arm.ask("step_time", prompt=prompt, new=NEW)
            times[label].append(found["ms"])
            record["steps"].setdefault(arm.name, []).append(found["steps"])
    ratios = [a / b for a, b in zip(times["stock"], times["plugin"], strict=True)]
    record["ms"][pair], record["ratio"][pair] = times, ratios
    stock_ms, ours_ms = (statistics.median(times[label]) for label in ("stock", "plugin"))
    ratio = statistics.median(ratios)
    if ratio < BOUNDS[pair]:
        record["failed"].append(pair)
    spread = f"{ratio:.3f} ({min(ratios):.3f}..{max(ratios):.3f}), wanted {BOUNDS[pair]}"
    mark = "ok  " if ratio >= BOUNDS[pair] else "FAIL"
    return f"{mark} {pair:<10} stock {stock_ms:.3f} ms, plugin {ours_ms:.3f} ms, ratio {spread}"


def attention(stock: Arm, prompt: list[int], work: Path) -> dict[str, Any]:
    """ms per step of stock's attention kernels; that profile also holds one prefill's, which errs on stock's side."""
    kernels = stock.ask("profile", prompt=prompt, new=48, folder=str(work / "trace"))
    steps, idle = kernels.pop("steps"), kernels.pop("idle")
    spent = sum(us for name, us in kernels.items() if name.strip() in ATTENTION) / steps / 1e3
    return {"kernels": kernels, "profiled_steps": steps, "stock_idle": idle, "attention_ms": spent}
