"""Runs every kernel on small models, for compute-sanitizer; every layer stage is compared with the reference besides.

    compute-sanitizer --tool memcheck python benchmark/sanitize.py
    compute-sanitizer --tool synccheck python benchmark/sanitize.py
    compute-sanitizer --tool racecheck --kernel-name kne=layer_kernel \\
        python benchmark/sanitize.py --define EVERY_LANE_ARRIVES

Racecheck does not see that the accesses of a warp's lanes come before the meeting of the warp, and so before the
arrival of one lane that stands for all; with EVERY_LANE_ARRIVES (csrc/layer/ring.cuh) each lane arrives for itself.
Filter by name (benchmark/validate.py does): the tools are slow on PyTorch's kernels.
"""

import argparse
import sys
from typing import Any

from layer_check import check_case

from sgl_muse_mega.checkpoint import tiny
from sgl_muse_mega.checkpoint.draft import load_draft
from sgl_muse_mega.checkpoint.target import load_target
from sgl_muse_mega.commands.text import Text
from sgl_muse_mega.config import load_draft_config, load_target_config
from sgl_muse_mega.megakernel.cuda import CudaMachine
from sgl_muse_mega.megakernel.decode_backend import decode_backend
from sgl_muse_mega.megakernel.instance import row_cap_of
from sgl_muse_mega.megakernel.random_step import RandomStep, random_weights, tiny_config
from sgl_muse_mega.speculative.generate import generate
from sgl_muse_mega.speculative.sampling import SamplingParams

DEADLINE_SECONDS = 120.0  # the tools slow kernels down a hundredfold


def check_layers(machine: CudaMachine) -> int:
    """Stages that differ from the reference, over both expert types, both caches and both row capacities."""
    failures = 0
    for nvfp4, kv_dtype, rows in ((True, "bf16", 3), (True, "fp8", 16), (False, "bf16", 8)):
        config = tiny_config(nvfp4=nvfp4)
        weights = random_weights(config, 1, machine.device)
        case = RandomStep.create(config, weights, machine, row_cap=row_cap_of(rows), max_context=70, kv_dtype=kv_dtype)
        bad = [result.name for _, result in check_case(case, rows, 65, rows) if not result.passed]
        print(f"layers: nvfp4 {nvfp4}, {kv_dtype} cache, {rows} rows: {len(bad)} stages differ {bad[:3]}", flush=True)
        failures += len(bad)
    return failures


def decode(machine: CudaMachine, tokens: int) -> None:
    """Whole steps of the bundled pair: draft, selector, verify, accept, cache update; greedy and sampled."""
    config, draft_config = load_target_config(tiny.target_directory()), load_draft_config(tiny.draft_directory())
    options: dict[str, Any] = {"machine": machine, "width": 8, "max_context": 128}
    backend = decode_backend(
        config,
        load_target(tiny.target_directory(), config),
        draft_config,
        load_draft(tiny.draft_directory(), draft_config),
        **options,
    )
    ids = Text(tiny.target_directory()).encode("How many days are in 12 weeks?", raw=False)
    for params in (SamplingParams(), SamplingParams(temperature=1.0, top_p=0.9, top_k=50, seed=1)):
        events = generate(backend, ids, params, width=8, max_new_tokens=tokens, stop_ids=())
        print(f"decode: temperature {params.temperature}: {sum(len(e.tokens) for e in events)} tokens", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--define", action="append", default=[], help="macro for every kernel")
    parser.add_argument("--tokens", type=int, default=12)
    parser.add_argument("--part", choices=("layers", "decode", "all"), default="all")
    arguments = parser.parse_args()
    machine = CudaMachine(deadline_seconds=DEADLINE_SECONDS, defines=arguments.define)
    failures = check_layers(machine) if arguments.part != "decode" else 0
    if arguments.part != "layers":
        decode(machine, arguments.tokens)
    machine.synchronize()
    return int(failures > 0)


if __name__ == "__main__":
    sys.exit(main())
