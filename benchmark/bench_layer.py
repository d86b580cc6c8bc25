"""Times a chain of full-size layers (one rank of four, all projections whole) in one graph, beside the memory roof.

    python benchmark/bench_layer.py --rows 1,8,16 --save

Bytes are what the launch must read: the dense weights, the router and the distinct local experts it was routed to.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

from sgl_muse_mega.megakernel.cuda import CudaMachine
from sgl_muse_mega.megakernel.random_step import RandomStep, random_weights, spark_config

ROOF_GB_S = 4615.0  # measured stream of one H200, docs/measured-facts.md
EXPERT_BYTES = {True: 3 * 4096 * 4096 * 9 // 16, False: 3 * 4096 * 4096 * 2}


def dense_bytes(case: RandomStep, index: int) -> int:
    """Weights a launch reads whatever the routing: its layer after q, k, v, and the next layer's q, k, v, gate."""
    layer = case.step.weights.layers[index]
    tensors = [layer.o_proj, layer.router, layer.pre_expert_proj, layer.post_expert_proj]
    if index + 1 < len(case.step.weights.layers):
        tensors.append(case.step.weights.layers[index + 1].qkv)
    return sum(t.numel() * t.element_size() for t in tensors)


def distinct_experts(case: RandomStep, rows: int) -> list[int]:
    """Local experts each layer reads, by running the launches one by one."""
    step, counts = case.step, []
    step.launch_embed(rows)
    for index, layer in enumerate(step.weights.layers):
        step.launch_layer(index, rows)
        step.machine.synchronize()
        ids = step.activations.route_ids[:rows] - layer.first_expert
        counts.append(int(ids[(ids >= 0) & (ids < layer.down.shape[0])].unique().numel()))
    return counts


def time_layers(case: RandomStep, rows: int, repeats: int) -> list[float]:
    """Microseconds per layer of `repeats` replays of the chain."""
    step, layers = case.step, len(case.step.weights.layers)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step.launch_embed(rows)
        for index in range(layers):
            step.launch_layer(index, rows)
    embed = torch.cuda.CUDAGraph()
    with torch.cuda.graph(embed):
        step.launch_embed(rows)

    def run(g: torch.cuda.CUDAGraph) -> float:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        g.replay()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) * 1e3

    for _ in range(3):
        run(graph), run(embed)
    return [(run(graph) - run(embed)) / layers for _ in range(repeats)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", default="1,8,16")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--bf16-experts", action="store_true")
    parser.add_argument("--kv", default="fp8")
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--save", type=Path, help="folder for the JSON of this run")
    arguments = parser.parse_args()
    machine = CudaMachine()
    nvfp4 = not arguments.bf16_experts
    config = spark_config(arguments.layers, nvfp4=nvfp4)
    weights = random_weights(config, arguments.seed, machine.device, first_expert=64, local_experts=64)
    properties = torch.cuda.get_device_properties(machine.device)
    driver = subprocess.run(
        ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
        capture_output=True,
        text=True,
        check=False,
    ).stdout.strip()
    record: dict[str, Any] = {
        "date": time.strftime("%Y-%m-%d %H:%M"), "gpu": properties.name, "driver": driver, "torch": torch.__version__,
        "command": " ".join(sys.argv), "layers": arguments.layers, "context": arguments.context, "kv": arguments.kv,
        "experts": "nvfp4" if nvfp4 else "bf16", "seed": arguments.seed, "roof_gb_s": ROOF_GB_S, "cases": [],
    }  # fmt: skip
    print(f"{properties.name}, driver {driver}, {arguments.layers} layers, context {arguments.context}")
    print("rows  us/layer (min..max)     MB   experts   GB/s  of roof")
    for rows in (int(r) for r in arguments.rows.split(",")):
        case = RandomStep.create(
            config,
            weights,
            machine,
            row_cap=8 if rows <= 8 else 16,
            max_context=arguments.context,
            kv_dtype=arguments.kv,
        )
        case.fill(arguments.context, arguments.seed)
        experts = distinct_experts(case, rows)
        total = sum(dense_bytes(case, i) for i in range(arguments.layers)) + sum(experts) * EXPERT_BYTES[nvfp4]
        times = time_layers(case, rows, arguments.repeats)
        machine.synchronize()
        median = statistics.median(times)
        megabytes = total / arguments.layers / 1e6
        speed = megabytes / median * 1e3
        record["cases"].append(
            {"rows": rows, "us": times, "median_us": median, "mb_per_layer": megabytes, "distinct_experts": experts,
             "gb_s": speed, "fraction": speed / ROOF_GB_S}
        )  # fmt: skip
        mean = statistics.mean(experts)
        spread, part = f"({min(times):.1f}..{max(times):.1f})", speed / ROOF_GB_S
        print(
            f"{rows:4d}  {median:7.1f} {spread:18s} {megabytes:6.0f}  {mean:6.1f}  {speed:6.0f}  {part:.3f}",
            flush=True,
        )
        del case
    if arguments.save:
        arguments.save.mkdir(parents=True, exist_ok=True)
        name = f"layer-{time.strftime('%Y%m%d-%H%M')}-{'nvfp4' if nvfp4 else 'bf16'}-h200.json"
        (arguments.save / name).write_text(json.dumps(record, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
