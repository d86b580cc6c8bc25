"""The kernels of csrc/server on a GPU: what they leave against the formulas of PyTorch, and how long they take.

    python benchmark/server_check.py --json server.json

Random tables, lengths and pages; every word that a step can read must be the formula's (tests/cpu/table_formulas.py).
The end of a step is replayed from a graph that is captured once, with another result's address every time. Times are of
graphs of 100 launches. Exit status 1 when anything differs. --emulator runs the comparison on a CPU.
"""

import argparse
import copy
import json
import random
import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from sgl_muse_mega import results
from sgl_muse_mega.emulator.stepper import Emulator
from sgl_muse_mega.megakernel.cuda import CudaMachine
from sgl_muse_mega.megakernel.draft_protocol import STATE
from sgl_muse_mega.megakernel.draft_scratch import DecodeState
from sgl_muse_mega.megakernel.machine import Machine
from sgl_muse_mega.megakernel.scratch import StepInputs
from sgl_muse_mega.serving.tables import AttentionTables, LiveTables

sys.path.append(str(Path(__file__).parents[1] / "tests" / "cpu"))
import table_formulas

WINDOW, LAUNCHES, REPEATS = 128, 100, 20


class Place:
    """A step's inputs and state on a machine, all of it of an earlier request."""

    def __init__(self, machine: Machine, cap: int, positions: int, chance: random.Random) -> None:
        self.machine, self.cap, self.positions, self.chance = machine, cap, positions, chance
        self.inputs = StepInputs.allocate(cap, positions, machine.device)
        self.state = DecodeState.allocate(cap, machine.device)
        for name in (f.name for f in fields(self.inputs)):
            tensor = getattr(self.inputs, name)
            tensor.copy_(torch.randint(0, 300, tensor.shape, generator=self.generator()))
        held = [(f"inputs.{f.name}", getattr(self.inputs, f.name), False, True) for f in fields(self.inputs)]
        held += [(f"state.{name}", getattr(self.state, name), False, True) for name in ("state", "path")]
        machine.declare(held)

    def generator(self) -> torch.Generator:
        return torch.Generator().manual_seed(self.chance.randrange(2**31))

    def slots(self, count: int) -> Tensor:
        return torch.randperm(count, generator=self.generator()) + 1

    def there(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.machine.device)

    def on_host(self) -> tuple[StepInputs, DecodeState]:
        names = [f.name for f in fields(self.inputs)]
        state = copy.copy(self.state)
        words = {f.name: getattr(self.state, f.name).cpu().clone() for f in fields(state)}
        return StepInputs(*(getattr(self.inputs, name).cpu().clone() for name in names)), DecodeState(**words)

    def differing(self, expected: StepInputs, seen: dict[str, slice]) -> list[str]:
        """Names of inputs that are not the formula's. seen: what of the pages is read."""
        self.machine.synchronize()
        found = []
        for name in (f.name for f in fields(expected)):
            part = seen.get(name, slice(None))
            if not torch.equal(getattr(self.inputs, name).cpu()[part], getattr(expected, name)[part]):
                found.append(name)
        return found


def whole_steps(place: Place, hybrid: bool, count: int) -> list[str]:
    """Beginnings and ends over one set of tables."""
    held = place.positions - place.chance.choice((0, 5, 30))
    requests = torch.stack([place.slots(held) for _ in range(3)]).to(torch.int32)
    mapping = torch.cat((torch.zeros(1, dtype=torch.int64), place.slots(held))) if hybrid else None
    tables = LiveTables(
        place.machine, place.inputs, place.state, window=WINDOW, req_to_token=place.there(requests),
        full_to_sliding=None if mapping is None else place.there(mapping),
    )  # fmt: skip
    replays: dict[tuple[bool, bool], Callable[[], None]] = {}
    found = []
    for _ in range(count):
        length = place.chance.choice((0, 1, WINDOW, place.positions - 2 * place.cap, None))
        length = place.chance.randrange(place.positions - 2 * place.cap) if length is None else length
        words = torch.tensor([place.chance.randrange(3)]), torch.tensor([length]), torch.tensor([length + 7])
        inputs, state = place.on_host()
        table_formulas.begin_step(
            inputs, state, *words, window=WINDOW, req_to_token=requests, full_to_sliding=mapping
        )  # fmt: skip
        result = place.there(torch.full((place.cap + 3,), -1))
        tables.launch_begin(*(place.there(word) for word in words), result)
        end = length + 2 * place.cap
        seen = {"full_pages": slice(0, end), "sliding_pages": slice(max(0, length - WINDOW), end)}
        found += [f"begin {name}" for name in place.differing(inputs, seen)]
        if place.state.state.any():
            found.append("begin state")
        committed = place.chance.randrange(1, place.cap + 1)
        place.inputs.token_ids.copy_(place.slots(place.cap))
        place.state.path.copy_(place.slots(place.cap) - 1)
        place.state.state[STATE.index("COMMITTED")] = committed
        inputs, state = place.on_host()
        expected = torch.full((place.cap + 3,), -1)
        kind = (place.chance.random() < 0.5, place.chance.random() < 0.5)
        table_formulas.end_step(inputs, state, expected, tree=kind[0], restore=kind[1])
        if kind not in replays:
            replays[kind] = captured(
                place.machine, lambda kind=kind: tables.launch_end(place.cap, tree=kind[0], restore=kind[1])
            )
        replays[kind]()
        found += [f"end {name}" for name in place.differing(inputs, {})]
        counts = [*range(committed), *range(place.cap, place.cap + 3)]
        if not torch.equal(result.cpu()[counts], expected[counts]):
            found.append("end result")
    return found


def forwards(place: Place, count: int) -> list[str]:
    """Beginnings of a target's forward behind page tables of some page size and behind Triton's lists."""
    found = []
    for _ in range(count):
        rows, page = place.chance.choice((1, place.cap)), place.chance.choice((1, 16, 64))
        length = place.chance.randrange(place.positions - place.cap)
        ids, slots, sliding = (place.slots(900)[:rows] for _ in range(3))
        positions = torch.arange(length, length + rows)
        near = min(length, WINDOW - 1)
        if place.chance.random() < 0.5:
            used = place.positions // page + 1
            tables = [place.slots(used).to(torch.int32)[None] for _ in range(2)]
            held = {"page_table": tables[0], "swa_page_table": tables[1]}
        else:
            page = 1
            held = {
                "kv_indices": place.slots(place.positions), "window_kv_indices": place.slots(place.positions),
                "kv_indptr": torch.tensor([0, length], dtype=torch.int32),
                "window_kv_indptr": torch.tensor([0, near], dtype=torch.int32),
            }  # fmt: skip
        held["swa_out_cache_loc"] = sliding
        inputs, _ = place.on_host()
        host = SimpleNamespace(**held)
        table_formulas.begin_forward(inputs, ids, positions, slots, host, window=WINDOW, page_size=page)
        attention = AttentionTables(place.machine, place.inputs, window=WINDOW, page_size=page)
        there = SimpleNamespace(**{name: place.there(tensor) for name, tensor in held.items()})
        attention.launch(place.there(ids), place.there(positions), place.there(slots), there)
        seen = {"full_pages": slice(0, length), "sliding_pages": slice(length - near, length)}
        found += [f"forward {name}" for name in place.differing(inputs, seen)]
    return found


def captured(machine: Machine, enqueue: Callable[[], None]) -> Callable[[], None]:
    """A replay of what `enqueue` enqueues; without a GPU `enqueue` itself."""
    if machine.device.type != "cuda":
        return enqueue
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        enqueue()
    return graph.replay


def times(machine: Machine, context: int, cap: int = 8) -> dict[str, float]:
    """us of each kernel at the end of a context, median over graphs of many launches."""
    place = Place(machine, cap, context + 3 * cap, random.Random(1))
    table = place.there(place.slots(context).to(torch.int32)[None])
    mapping = place.there(torch.arange(context + 1))
    tables = LiveTables(
        machine, place.inputs, place.state, window=WINDOW, req_to_token=table, full_to_sliding=mapping
    )  # fmt: skip
    row, length = place.there(torch.tensor([0])), place.there(torch.tensor([context - cap]))
    result = place.there(torch.zeros(cap + 3, dtype=torch.int64))
    attention = AttentionTables(machine, place.inputs, window=WINDOW, page_size=1)
    ids, lists = place.there(torch.arange(cap)), place.there(place.slots(context))
    ends = place.there(torch.tensor([0, context - cap, 0, WINDOW - 1], dtype=torch.int32))
    metadata = SimpleNamespace(
        kv_indices=lists, kv_indptr=ends[:2], window_kv_indices=lists, window_kv_indptr=ends[2:], swa_out_cache_loc=ids
    )
    positions = length + ids
    kernels: dict[str, Callable[[], None]] = {
        "begin": lambda: tables.launch_begin(row, length, row, result),
        "end": lambda: tables.launch_end(cap, tree=False, restore=False),
        "forward": lambda: attention.launch(ids, positions, ids, metadata),
    }
    return {name: us(machine, kernel) for name, kernel in kernels.items()}


def us(machine: Machine, kernel: Callable[[], None]) -> float:
    def many() -> None:
        for _ in range(LAUNCHES):
            kernel()

    kernel()
    machine.synchronize()
    replay, found = captured(machine, many), []
    for _ in range(REPEATS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        replay()
        end.record()
        machine.synchronize()
        found.append(start.elapsed_time(end) * 1e3 / LAUNCHES)
    return sorted(found)[len(found) // 2]


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=60, help="of every kind")
    parser.add_argument("--emulator", action="store_true")
    options = parser.parse_args(arguments)
    machine: Machine = Emulator(3) if options.emulator else CudaMachine(deadline_seconds=2.0)
    record: dict[str, Any] = {"differing": {}, "us": {}}
    for cap, positions in ((8, 300), (16, 300), (8, 5000)):
        chance = random.Random(cap + positions)
        for name, hybrid in (("hybrid", True), ("full", False)):
            place = Place(machine, cap, positions, chance)
            record["differing"][f"{cap} rows, {positions}, {name}"] = whole_steps(place, hybrid, options.steps)
        place = Place(machine, cap, positions, chance)
        record["differing"][f"{cap} rows, {positions}, forward"] = forwards(place, options.steps)
    gpu = None if options.emulator else torch.cuda.get_device_name()
    if gpu:
        record["us"] = {context: times(machine, context) for context in (2048, 65536, 1048576)}
    environment = results.environment(gpu, ("python", "benchmark/server_check.py"))
    options.json.write_text(json.dumps({"environment": environment, **record}))
    for case, found in record["differing"].items():
        print(f"{case:28s} {'ok' if not found else 'FAIL ' + ', '.join(sorted(set(found)))}")
    for context, kernels in record["us"].items():
        print(f"context {context:8d}: " + ", ".join(f"{kernel} {value:.2f} us" for kernel, value in kernels.items()))
    return int(any(record["differing"].values()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
