"""Checks every stage of the kernels against the reference on this machine, and prints one line per case.

python benchmark/layer_check.py --sizes tiny --rows 1-16 --contexts 0,63,64,65 --kv bf16,fp8 --json out.json
"""

import argparse
import itertools
import json
import shlex
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from sgl_muse_mega import results
from sgl_muse_mega.config import TargetConfig
from sgl_muse_mega.emulator.machine import Schedule
from sgl_muse_mega.emulator.stepper import Emulator
from sgl_muse_mega.megakernel import stage_check
from sgl_muse_mega.megakernel.machine import Machine
from sgl_muse_mega.megakernel.mailbox import LoopBack
from sgl_muse_mega.megakernel.random_step import EXPERTS, HEADS, RandomStep, random_weights, spark_config, tiny_config
from sgl_muse_mega.megakernel.weights import KernelWeights


def model(name: str, ranks: int = 1) -> tuple[TargetConfig, int | None]:
    """Configuration of a named case and how many experts live here (None: all, or an even share); "-bf16" means BF16
    experts. One rank has the heads of one of four where the size is full."""
    kind, _, experts = name.partition("-")
    nvfp4 = experts != "bf16"
    if kind == "tiny":
        return tiny_config(nvfp4=nvfp4), None
    if kind == "odd":
        config = tiny_config(
            nvfp4=nvfp4, hidden_size=320, num_attention_heads=6, num_key_value_heads=3, moe_hidden_size=192,
            moe_intermediate_size=320, num_local_experts=20, num_experts_per_tok=5, vocab_size=777,
        )  # fmt: skip
        return config, None
    if ranks > 1:
        return spark_config(2, nvfp4=nvfp4, heads=HEADS), EXPERTS // ranks
    return spark_config(2, nvfp4=nvfp4), 64 if nvfp4 else 32


def rerouted(weights: KernelWeights, routing: str, first_expert: int) -> KernelWeights:
    """The model with special routing: "ties" makes experts 2i and 2i + 1 score alike, "crowd" sends every row to one
    local expert; "random" leaves it as it is."""
    layers = []
    for layer in weights.layers:
        router, bias = layer.router.clone(), layer.router_bias.clone()
        if routing == "ties":
            router[1::2], bias[1::2] = router[::2], bias[::2]
        elif routing == "crowd":
            bias[first_expert + 1] += 10
        layers.append(replace(layer, router=router, router_bias=bias))
    return replace(weights, layers=tuple(layers))


def check_tie_order(ids: list[list[int]]) -> None:
    """Of two experts that score alike, the lower id comes first, and right before the other (F4)."""
    for row in ids:
        for place, expert in enumerate(row):
            if expert % 2 and (place == 0 or row[place - 1] != expert - 1):
                raise AssertionError(f"expert {expert} was taken before {expert - 1}, which scores the same: {row}")


def check_case(
    case: RandomStep, rows: int, length: int, seed: int, routing: str = "random"
) -> list[tuple[str, stage_check.StageResult]]:
    """One whole step over poisoned buffers, all stages."""
    step, caches = case.step, case.caches
    case.fill(length, seed)
    step.activations.poison()
    if isinstance(step.machine, Emulator):
        step.machine.attach(step, caches)
    step.launch_embed(rows)
    step.machine.synchronize()
    results = [("embed", r) for r in stage_check.embed_results(step, rows, caches)]
    for index in range(len(step.weights.layers)):
        check = stage_check.LayerCheck(step, index, rows, caches)
        step.launch_layer(index, rows)
        step.machine.synchronize()
        results += [(f"layer {index}", r) for r in check.run()]
        ids = step.activations.route_ids[:rows].tolist()
        if routing == "ties":
            check_tie_order(ids)
        if routing == "crowd":
            expert = step.weights.layers[index].first_expert + 1
            assert all(expert in row for row in ids), "a row missed the expert that all rows go to"
    step.launch_head(rows)
    step.machine.synchronize()
    return results + [("head", r) for r in stage_check.head_results(step, rows)]


def numbers(text: str) -> list[int]:
    """ "1-3,8" -> [1, 2, 3, 8]."""
    found: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        found += range(int(first), int(last or first) + 1)
    return found


def check_model(machine: Machine, sizes: str, routing: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """All cases of one model; prints the failing ones and returns, per stage, the worst of all comparisons."""
    ranks = arguments.ranks
    rank = 1 if ranks > 1 else 0
    config, local_experts = model(sizes, ranks)
    weights = random_weights(
        config, arguments.seed, machine.device, first_expert=local_experts or 0, local_experts=local_experts,
        rank=rank, ranks=ranks, field_order=arguments.field_order,
    )  # fmt: skip
    weights = rerouted(weights, routing, weights.layers[0].first_expert)
    stages: dict[str, dict[str, Any]] = {}
    comparisons = failures = 0
    for kv_dtype, row_cap in itertools.product(arguments.kv.split(","), (8, 16)):
        wanted = [rows for rows in arguments.rows if (rows <= 8) == (row_cap == 8)]
        if not wanted:
            continue
        case = RandomStep.create(
            config, weights, machine, row_cap=row_cap, max_context=max(arguments.contexts), kv_dtype=kv_dtype,
            mail=LoopBack(ranks, rank) if ranks > 1 else None,
        )  # fmt: skip
        for rows, length in itertools.product(wanted, arguments.contexts):
            start = time.monotonic()
            found = check_case(case, rows, length, arguments.seed + 31 * rows + length, routing)
            bad = [(where, r) for where, r in found if not r.passed]
            failures += bool(bad)
            comparisons += len(found)
            for _, r in found:
                stage = stages.setdefault(r.name, {"cosine": 1.0, "relative_rms": 0.0, "comparisons": 0})
                stage["comparisons"] += 1
                stage["cosine"] = r.cosine if not r.cosine >= stage["cosine"] else stage["cosine"]
                stage["relative_rms"] = max(stage["relative_rms"], r.relative_rms)
            if bad:
                shown = "; ".join(f"{w} {b.name} cosine {b.cosine:.6f}" for w, b in bad[:4])
                print(f"FAIL {kv_dtype} rows {rows} context {length}: {shown}", flush=True)
            elif time.monotonic() - start > 5:
                print(f"ok   {kv_dtype} rows {rows} context {length}", flush=True)
    print(
        f"{sizes}, {routing}: {comparisons} stage comparisons, {failures} failing cases; worst per stage:", flush=True
    )
    for name, stage in stages.items():
        print(f"  {name:30s} cosine {stage['cosine']:.7f}  relative rms {stage['relative_rms']:.2e}")
    return {
        "sizes": sizes, "ranks": ranks, "routing": routing, "rows": arguments.rows, "contexts": arguments.contexts,
        "caches": arguments.kv.split(","), "comparisons": comparisons, "failures": failures, "stages": stages,
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--machine", choices=("cuda", "emulator"), default="cuda")
    parser.add_argument("--sizes", default="tiny", help="tiny, odd, full, with -bf16 for BF16 experts; by commas")
    parser.add_argument("--rows", type=numbers, default=numbers("1-16"))
    parser.add_argument("--contexts", type=numbers, default=numbers("0,63,64,65,300"))
    parser.add_argument("--kv", default="bf16,fp8")
    parser.add_argument("--routing", default="random", help="random, ties, crowd; by commas")
    parser.add_argument("--ranks", type=int, default=1, help="one rank of so many, which exchanges with itself")
    parser.add_argument("--field-order", action="store_true", help="NVFP4 words in field order instead of Marlin's")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--deadline", type=float, default=5.0, help="seconds a kernel may wait; more under a sanitizer")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if arguments.machine == "cuda":
        from sgl_muse_mega.megakernel.cuda import CudaMachine

        machine: Machine = CudaMachine(deadline_seconds=arguments.deadline)
        gpu = torch.cuda.get_device_name(machine.device)
    else:
        machine, gpu = Emulator(schedule=Schedule(seed=arguments.seed)), None
    torch.backends.cuda.matmul.allow_tf32 = False
    runs = [
        check_model(machine, sizes, routing, arguments)
        for sizes, routing in itertools.product(arguments.sizes.split(","), arguments.routing.split(","))
    ]
    if arguments.json:
        environment = results.environment(gpu) | {"command": shlex.join(["python", *sys.argv])}
        arguments.json.write_text(json.dumps({"environment": environment, "runs": runs}, indent=1))
    return int(any(run["failures"] for run in runs))


if __name__ == "__main__":
    sys.exit(main())
