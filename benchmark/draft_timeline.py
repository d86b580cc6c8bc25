"""Where the time of the draft's block launch goes, at the real sizes, on random weights.

    python benchmark/draft_timeline.py --json draft.json

The launch is timed in a graph of its own; then once more with a trace, for a table of its phases: us from the moment
the last CTA had passed the phase before to the moment the last CTA had passed this one, median over the layers that
the logs hold completely.
"""

import argparse
import dataclasses
import json
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from sgl_muse_mega import results
from sgl_muse_mega.checkpoint.random_weights import random_draft
from sgl_muse_mega.commands.bench_step import spark_draft
from sgl_muse_mega.commands.roof import ROOF_GB_S
from sgl_muse_mega.commands.step_times import timed_replays
from sgl_muse_mega.config import DraftConfig
from sgl_muse_mega.megakernel.build import build_all
from sgl_muse_mega.megakernel.cuda import CudaMachine
from sgl_muse_mega.megakernel.decode_request import request_words
from sgl_muse_mega.megakernel.draft_instance import DraftInstance, TargetEnds
from sgl_muse_mega.megakernel.draft_protocol import POINTS
from sgl_muse_mega.megakernel.draft_scratch import DecodeState
from sgl_muse_mega.megakernel.draft_step import DraftStep
from sgl_muse_mega.megakernel.draft_weights import KernelDraft, prepare_draft
from sgl_muse_mega.megakernel.instance import row_cap_of
from sgl_muse_mega.megakernel.random_step import VOCABULARY, spark_config
from sgl_muse_mega.megakernel.scratch import StepInputs
from sgl_muse_mega.speculative.sampling import SamplingParams

CONTEXT = 2048


@dataclasses.dataclass
class Block:
    """A draft over a random context, ready to be launched."""

    step: DraftStep
    rows: int

    @classmethod
    def build(
        cls, machine: CudaMachine, config: DraftConfig, weights: KernelDraft, ends: TargetEnds, rows: int, trace: bool
    ) -> "Block":
        device, row_cap = machine.device, row_cap_of(rows)
        inputs = StepInputs.allocate(row_cap, CONTEXT + row_cap, device)
        inputs.token_ids.fill_(5)
        inputs.length.fill_(CONTEXT)
        taps = torch.zeros(
            row_cap, len(config.target_layer_ids), config.hidden_size, dtype=torch.bfloat16, device=device
        )
        state = DecodeState.allocate(row_cap, device)
        words = request_words(SamplingParams(), max_new_tokens=1, max_context=CONTEXT)
        state.request.copy_(torch.tensor(words))
        step = DraftStep(config, weights, machine, inputs, taps, state, target=ends, trace=trace)
        shape = (CONTEXT + row_cap + 1, config.num_key_value_heads, config.head_dim)
        step.use_caches(
            [
                tuple(torch.randn(shape, device=device).to(torch.bfloat16) for _ in range(2))  # type: ignore[misc]
                for _ in weights.layers
            ]
        )
        step.pages.copy_(torch.arange(1, len(step.pages) + 1))
        return cls(step, rows)

    def timed(self, launch: Callable[[int], None], repeats: int) -> list[float]:
        """us of replays of a graph of one launch."""
        launch(self.rows)
        self.step.machine.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            launch(self.rows)
        return timed_replays(graph, repeats)

    def timeline(self) -> dict[str, float]:
        """us of every phase of a layer."""
        for _ in range(3):
            self.step.trace.zero_()
            self.step.launch_block(self.rows)
            self.step.machine.synchronize()
        return phases(self.step.trace[:, 0].cpu().tolist())


def phases(logs: list[list[int]]) -> dict[str, float]:
    """logs: of math warp 0 of every CTA (csrc/layer/trace.cuh); marks of the draft have the layer as their value."""
    passed: dict[tuple[int, str], list[int]] = defaultdict(list)
    for log in logs:
        for word in log:
            word &= 2**64 - 1
            point, layer = word >> 16 & 0xFF, word & 0xFFFF
            if 0 < point <= len(POINTS):
                passed[layer, POINTS[point - 1]].append(word >> 24)
    last = {key: max(times) for key, times in passed.items() if len(times) == len(logs)}
    names = [name for name in POINTS if name not in ("START", "INPUTS_READY")]
    found: dict[str, list[float]] = defaultdict(list)
    for layer in sorted({layer for layer, _ in last}):
        for before, name in zip(["INPUTS_READY", *names], names, strict=False):
            if (layer, before) in last and (layer, name) in last:
                found[name].append((last[layer, name] - last[layer, before]) / 1e3)
    return {name: statistics.median(values) for name, values in found.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=40)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    begin = time.monotonic()
    machine = CudaMachine()
    target = spark_config(14, vocab_size=VOCABULARY)
    config, ends = spark_draft(target), TargetEnds.of(target)
    row_cap = row_cap_of(arguments.rows)
    plain = DraftInstance.for_config(config, ends, row_cap=row_cap, sms=machine.sms)
    build_all([plain, dataclasses.replace(plain, trace=True)])
    shape = (config.vocab_size, config.hidden_size)
    generator = torch.Generator(machine.device).manual_seed(1)
    table = torch.randn(shape, generator=generator, device=machine.device, dtype=torch.bfloat16)
    weights = prepare_draft(config, random_draft(config, 1, machine.device), table, table)
    block = Block.build(machine, config, weights, ends, arguments.rows, False)
    parts = {
        "block": block.timed(block.step.launch_block, arguments.repeats),
        "head": block.timed(block.step.launch_head, arguments.repeats),
        "context": block.timed(block.step.launch_context, arguments.repeats),
    }
    timeline = Block.build(machine, config, weights, ends, arguments.rows, True).timeline()
    environment = results.environment(torch.cuda.get_device_name(), ("python", "benchmark/draft_timeline.py"))
    record: dict[str, Any] = {"environment": environment, "us": parts, "phases_us": timeline}
    if arguments.json:
        arguments.json.write_text(json.dumps(record))
    size = sum(t.numel() * 2 for layer in weights.layers for t in (getattr(layer, n) for n in layer.__slots__))
    for name, us in parts.items():
        fraction = f", {size / statistics.median(us) / ROOF_GB_S / 1e3:.3f} of the roof" if name == "block" else ""
        print(f"{name:<10}{statistics.median(us):8.1f} us ({min(us):.1f}..{max(us):.1f}){fraction}")
    print("; ".join(f"{name} {us:.1f}" for name, us in timeline.items()))
    print(f"a layer {sum(timeline.values()):.1f} us; {time.monotonic() - begin:.0f} s in all")
    return 0


if __name__ == "__main__":
    sys.exit(main())
