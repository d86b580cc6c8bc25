"""Bit equality: of a row in any company, and of graph replays with a fresh process.

python benchmark/replay_check.py invariance --sizes tiny
python benchmark/replay_check.py write states.pt && python benchmark/replay_check.py soak states.pt --replays 20000
"""

import argparse
import random
import sys
import time
from pathlib import Path

import torch
from layer_check import model
from torch import Tensor

from sgl_muse_mega.megakernel.cuda import CudaMachine
from sgl_muse_mega.megakernel.graph import StepGraphs
from sgl_muse_mega.megakernel.random_step import RandomStep, random_weights

ROWS = 16


def pair(name: str, seed: int, max_context: int, kv_dtype: str) -> tuple[RandomStep, RandomStep]:
    """Steps with 8 and with 16 rows over the same weights and caches."""
    machine = CudaMachine()
    config, local = model(name)
    weights = random_weights(config, seed, machine.device, first_expert=local or 0, local_experts=local)
    wide = RandomStep.create(config, weights, machine, row_cap=16, max_context=max_context, kv_dtype=kv_dtype)
    narrow = RandomStep.create(config, weights, machine, row_cap=8, max_context=max_context, kv_dtype=kv_dtype)
    narrow = RandomStep(narrow.step, wide.caches, narrow.sequence)
    narrow.step.use_caches(wide.caches)
    return narrow, wide


def bits(case: RandomStep, rows: int) -> Tensor:
    """Everything the step says about its rows, as integers: logits, stream and taps."""
    step = case.step
    parts = [step.activations.logits[:rows], step.activations.stream[:rows], step.taps[:rows].flatten(1).float()]
    return torch.cat([part.view(torch.int32) for part in parts], dim=1)


def invariance(name: str, kv_dtype: str, lengths: list[int]) -> int:
    """16 tokens one by one against every stretch of 1..16 of them in one step, and against steps of 16 rows of which
    the first ones alone count. Returns the number of unequal rows."""
    narrow, wide = pair(name, 1, max(lengths), kv_dtype)
    unequal, compared = 0, 0
    for length in lengths:
        wide.fill(length, length + 5)
        alone = []
        for row in range(ROWS):
            narrow.seek(row, wide)
            narrow.step.launch(1)
            alone.append(bits(narrow, 1)[0].clone())
        single = torch.stack(alone)
        for rows in range(1, ROWS + 1):
            for case in (narrow, wide) if rows <= 8 else (wide,):
                for first in range(ROWS - rows + 1):
                    case.seek(first, wide)
                    case.step.activations.poison()
                    case.step.launch(rows)
                    same = (bits(case, rows) == single[first : first + rows]).all(dim=1)
                    unequal += int((~same).sum())
                    compared += rows
        unequal += unequal_live_rows(wide, single)
        compared += ROWS * (ROWS - 1) // 2
    wide.step.machine.synchronize()
    print(f"invariance {name} {kv_dtype}: {compared} rows in steps of 1..16 rows, {unequal} differ from the row alone")
    return unequal


def unequal_live_rows(wide: RandomStep, single: Tensor) -> int:
    """Of steps of 16 rows of which the first 1..15 count; single: the bits of the rows alone."""
    unequal = 0
    for live in range(1, ROWS):
        wide.seek(0, wide)
        wide.step.activations.poison()
        wide.step.inputs.live.fill_(live)
        wide.step.launch(ROWS)
        unequal += int((bits(wide, live) != single[:live]).any(dim=1).sum())
    wide.step.inputs.live.fill_(ROWS)
    return unequal


def states(count: int, max_context: int) -> list[tuple[int, int]]:
    """(context, rows) of each random state."""
    source = random.Random(7)
    return [(source.randrange(max_context + 1), source.randrange(1, ROWS + 1)) for _ in range(count)]


class Replays:
    """Random states over one fixed cache: contexts of any length, rows written to slots of their own."""

    def __init__(self, name: str, max_context: int) -> None:
        self.narrow, self.wide = pair(name, 3, max_context, "fp8")
        self.wide.fill(max_context, 11)
        self.graphs = {8: StepGraphs(self.narrow.step), 16: StepGraphs(self.wide.step)}
        self.max_context = max_context
        for case in (self.narrow, self.wide):
            case.seek(0, self.wide)
        self.tokens = self.wide.sequence.tokens.to(self.wide.step.machine.device)

    def run(self, length: int, rows: int, *, graph: bool) -> Tensor:
        """The step of one state; bits of its rows."""
        case, cap = (self.narrow, 8) if rows <= 8 else (self.wide, 16)
        inputs = case.step.inputs
        inputs.length.fill_(length)
        torch.arange(length, length + cap, out=inputs.positions)
        # tokens depend on the state, so that equal results cannot come from a state before
        inputs.token_ids.copy_((self.tokens[:cap] * 31 + length) % case.step.config.vocab_size)
        if graph:
            self.graphs[cap].replay(rows)
        else:
            case.step.launch(rows)
        return bits(case, rows)


def soak(path: Path, name: str, count: int, replays: int, max_context: int) -> int:
    """Random order of the states, random pauses; every replay must give the bits of the fresh process."""
    runs = Replays(name, max_context)
    device = runs.wide.step.machine.device
    expected = [t.to(device) for t in torch.load(path)]
    wrong = torch.zeros(1, dtype=torch.int64, device=device)
    source = random.Random(13)
    cases = states(count, max_context)
    start = time.monotonic()
    for _ in range(replays):
        pick = source.randrange(count)
        wrong += (runs.run(*cases[pick], graph=True) != expected[pick]).any()
        if source.random() < 0.01:
            torch.cuda.synchronize()
            time.sleep(source.random() * 2e-3)
    runs.wide.step.machine.synchronize()
    print(f"soak {name}: {replays} replays of {count} states, {int(wrong)} unequal, {time.monotonic() - start:.1f} s")
    return int(wrong)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("invariance", "write", "soak"))
    parser.add_argument("file", type=Path, nargs="?")
    parser.add_argument("--sizes", default="tiny")
    parser.add_argument("--kv", default="bf16")
    parser.add_argument("--contexts", default="0,60,120,1000")
    parser.add_argument("--states", type=int, default=64)
    parser.add_argument("--replays", type=int, default=20000)
    arguments = parser.parse_args()
    if arguments.what == "invariance":
        return int(invariance(arguments.sizes, arguments.kv, [int(c) for c in arguments.contexts.split(",")]) > 0)
    if arguments.what == "write":
        runs = Replays(arguments.sizes, 1024)
        torch.save([runs.run(*s, graph=False).cpu() for s in states(arguments.states, 1024)], arguments.file)
        runs.wide.step.machine.synchronize()
        return 0
    return int(soak(arguments.file, arguments.sizes, arguments.states, arguments.replays, 1024) > 0)


if __name__ == "__main__":
    sys.exit(main())
