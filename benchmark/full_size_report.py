"""The tables of `full_size.py`: of every part the slowest rank's time, of every layer the busiest rank's bytes."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from rank_workers import Found

from sgl_muse_mega.commands.roof import ROOF_GB_S

ACCEPT_LENGTHS = (1.0, 3.0, 3.88, 4.19, 5.37)
PARTS = (
    "draft layers", "draft head", "layers", "first layer", "NVFP4 layer", "last layer", "exchanges", "target head",
    "accept", "draft context",
)  # fmt: skip
GOAL_MS, GOAL_LENGTH = 12.0, 5.37


def roof_ms(size: float) -> float:
    """How long the measured stream of one GPU takes for so many bytes."""
    return size / (ROOF_GB_S * 1e6)


def join(of_ranks: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One number of rows from what every rank measured.

    parts: ms; "layers" all of them with the embedding, "NVFP4 layer" the mean of those, "exchanges" what layers take
    beyond the same in loop-back, waiting for the busiest rank and other experts included. bytes: of every layer the
    busiest rank's, for all wait for it; of the rest the largest.
    """
    slowest = max(of_ranks, key=lambda case: statistics.median(case["step_us"]))
    names = {name for case in of_ranks for name in case["us"]}
    us = {name: max((case["us"][name] for case in of_ranks), key=statistics.median) for name in names}
    parts = {name: statistics.median(repeats) / 1e3 for name, repeats in us.items()}
    experts = list(zip(*(case["experts"] for case in of_ranks), strict=True))  # [layer][rank]
    sizes = [max(layer) for layer in zip(*(case["layer_bytes"] for case in of_ranks), strict=True)]
    between = len(sizes) - 2
    first, but_last = parts.pop("to first layer"), parts.pop("to last but one")
    parts["first layer"] = first - parts["embedding"]
    parts["NVFP4 layer"] = (but_last - first) / between
    parts["last layer"] = parts["layers"] - but_last
    parts["exchanges"] = parts["layers"] - parts.get("layers, loop-back", parts["layers"])
    if "draft" in parts:
        parts["draft layers"] = parts["draft"] - parts["draft head"]
    ms = statistics.median(slowest["step_us"]) / 1e3
    gap = statistics.median(slowest["gap_us"] or [0.0]) / 1e3
    size = sum(sizes) + max(case["other_bytes"] for case in of_ranks)
    back = [count for case in of_ranks for count in case["experts_loop_back"]]
    return {
        "rows": slowest["rows"], "ms": ms, "gap_ms": gap, "parts": parts, "step_us": slowest["step_us"],
        "experts": {
            "mean": statistics.mean(count for layer in experts for count in layer),
            "busiest": statistics.mean(map(max, experts)),
            "max": max(map(max, experts)),
            "loop_back": statistics.mean(back) if back else None,
        },
        "bytes": size, "nvfp4_layer_bytes": statistics.mean(sizes[1:-1]), "roof": roof_ms(size) / ms,
        "tokens_per_second": {str(n): n / (ms + gap) * 1e3 for n in ACCEPT_LENGTHS}, "ranks": list(of_ranks),
    }  # fmt: skip


def row(cells: Sequence[object], width: int = 9) -> str:
    texts = ["-" if c is None else f"{c:.3f}" if isinstance(c, float) else str(c) for c in cells]
    return "".join(f"{text:>{width}}" for text in texts)


def report(found: Found, *, ranks: int, layers: int, context: int, rows: Sequence[int], steps: int) -> dict[str, Any]:
    """Prints the tables and returns what goes into the file."""
    by_rank = found.of("case")
    cases = [join([rank[index] for rank in by_rank]) for index in range(min(map(len, by_rank)))]
    print(f"{ranks} ranks, {layers} layers, context {context}: ms, medians of the slowest rank")
    heads = ["draft", "draft", "all", "first", "NVFP4", "last", "ex-", "target", "accept", "draft"]
    print(row(["rows", "step", "host", *heads]))
    print(row(["", "", "", "layers", "head", "layers", "layer", "layer", "layer", "changes", "head", "", "context"]))
    for case in cases:
        print(row([case["rows"], case["ms"], case["gap_ms"], *(case["parts"].get(name) for name in PARTS)]))
    print(
        "experts of a layer on one rank: mean, the busiest rank's mean, the largest, mean in loop-back; the step's roof"
    )
    print(row(["rows", "mean", "busiest", "max", "loop", "GB", "roof ms", "of roof"]))
    for case in cases:
        e, size = case["experts"], case["bytes"]
        numbers = [e["mean"], e["busiest"], e["max"], e["loop_back"], size / 1e9, roof_ms(size), case["roof"]]
        print(row([case["rows"], *numbers]))
    print("tokens per second by accept length")
    print(row(["rows", *map(str, ACCEPT_LENGTHS)]))
    for case in cases:
        print(row([case["rows"], *(f"{rate:.1f}" for rate in case["tokens_per_second"].values())]))
    equal = [answer for rank in found.of("equal") for answer in rank]
    done = min((answer["steps"] for answer in equal), default=0)
    same = len(equal) == ranks and all(answer["equal"] for answer in equal)
    print(f"bits of all ranks after {done} of {steps} steps: {'equal' if same else 'NOT SHOWN'}")
    missing = [count for count in rows if count not in [case["rows"] for case in cases]]
    if missing:
        print(f"not measured: {', '.join(map(str, missing))} rows")
    print("problems:", "; ".join(found.problems) or "none")
    return {
        "failed": bool(found.problems or missing) or not same or done < steps, "problems": found.problems,
        "cases": cases, "equal": equal, "memory_gb": found.of("memory"), "built_s": found.of("built"),
    }  # fmt: skip


def against_goal(case: Mapping[str, Any]) -> str:
    rate = case["tokens_per_second"][str(GOAL_LENGTH)]
    met = "met" if case["ms"] <= GOAL_MS else "MISSED"
    return (
        f"{case['rows']} rows: {case['ms']:.3f} ms per step, goal {GOAL_MS} {met}; {rate:.1f} tokens/s at accept "
        f"length {GOAL_LENGTH}"
    )


def against_stock(case: Mapping[str, Any] | None, stock: dict[str, Any]) -> None:
    """Adds the ratios stock / ours to what the rival's run gave, and prints both."""
    ms = stock["ms"]
    print(f"stock: {', '.join(f'{each:.3f}' for each in ms)} ms per step")
    if case is None:
        return
    own = case["ms"] + case["gap_ms"]
    stock["ratio"] = [each / own for each in ms]
    print(f"stock / ours: {statistics.median(stock['ratio']):.3f} ({own:.3f} ms with the host's gap)")
    if "attention_ms" in stock:
        stock["ratio_without_attention"] = [(each - stock["attention_ms"]) / own for each in ms]
        median = statistics.median(stock["ratio_without_attention"])
        print(f"stock without its attention kernels' {stock['attention_ms']:.3f} ms / ours: {median:.3f}")
