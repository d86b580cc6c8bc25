"""One arm of a comparison: a chain of layers on the GPU, in a process of its own that is asked for turns.

Run as a script by `session.py`, with the package it measures first on PYTHONPATH: it may be another checkout's, so
this file uses nothing but the interface of `sgl_muse_mega.megakernel`. It reads one JSON object a line: first the
`Workload`, then questions; it answers each with one line, an object with "error" when something went wrong.
"""

import hashlib
import json
import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, fields
from functools import partial
from typing import IO, Any, cast

import numpy as np
import torch
from torch import Tensor

from sgl_muse_mega.emulator.stepper import Emulator
from sgl_muse_mega.errors import UserError
from sgl_muse_mega.megakernel import stage_check
from sgl_muse_mega.megakernel.build import Progress, build, quiet
from sgl_muse_mega.megakernel.compiled import Compiled
from sgl_muse_mega.megakernel.cuda import CudaMachine
from sgl_muse_mega.megakernel.machine import Machine
from sgl_muse_mega.megakernel.random_step import RandomStep, random_weights, spark_config, tiny_config

EXPERTS, HEADS, RANK_OF = 256, 128, 4
DEADLINE_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class Workload:
    """What an arm runs. `ranks`: 1 has the heads and experts of one rank of four and exchanges nothing; otherwise one
    rank of so many, with split projections, which exchanges with itself. `tuning`: fields of the kernels' `Instance`
    that differ from the default, and macros as "defines". `emulated`: a small model on the CPU instead, to try the
    command out."""

    rows: list[int]
    layers: int
    context: int
    nvfp4: bool
    kv: str
    draws: int  # different token rows, and so different routing, taken in turn
    seed: int
    ranks: int = 1
    tuning: dict[str, Any] = field(default_factory=dict)
    emulated: bool = False

    @classmethod
    def read(cls, text: str) -> "Workload":
        values = json.loads(text)
        return cls(**{f.name: values[f.name] for f in fields(cls)})


class Recorded:
    """Launches as a CUDA graph; the emulator, which has none, makes them anew each time."""

    def __init__(self, machine: Machine, enqueue: Callable[[], None]) -> None:
        self._machine, self._enqueue = machine, enqueue
        self._graph: torch.cuda.CUDAGraph | None = None
        if machine.device.type == "cuda":
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph):
                enqueue()

    def replay(self) -> None:
        if self._graph:
            self._graph.replay()
        else:
            self._enqueue()
            self._machine.synchronize()


class Moment:
    """A point in time between launches."""

    def __init__(self, machine: Machine) -> None:
        self._event: torch.cuda.Event | None = None
        self._seconds = 0.0
        if machine.device.type == "cuda":
            self._event = torch.cuda.Event(enable_timing=True)

    def record(self) -> None:
        if self._event:
            self._event.record()
        self._seconds = time.perf_counter()

    def us_until(self, other: "Moment") -> float:
        """After a synchronisation."""
        if self._event and other._event:
            return float(self._event.elapsed_time(other._event)) * 1e3
        return (other._seconds - self._seconds) * 1e6


class Planner:
    """Stands for a machine to learn which kernels it will be asked for, so that they are compiled side by side. What is
    made on it has no kernels and cannot be launched."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._instances: dict[tuple[str, str], Compiled] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._machine, name)

    def load(self, instance: Compiled, progress: Progress = quiet) -> None:
        self._instances[instance.source, instance.header()] = instance

    def build(self, **options: Any) -> None:
        """options: of `build`."""
        with ThreadPoolExecutor() as pool:
            list(pool.map(partial(build, **options), self._instances.values()))


class Arm:
    """Full-size layers of one rank; one more than are measured, so that each has a next layer."""

    def __init__(self, work: Workload) -> None:
        """Raises UserError when the kernels cannot be built or do not fit."""
        self.work = work
        torch.backends.cuda.matmul.allow_tf32 = False
        tuning = dict(work.tuning)
        macros: dict[str, Any] = {"defines": tuning.pop("defines")} if "defines" in tuning else {}
        if work.emulated:
            self.machine: Machine = Emulator(**macros)
        else:
            self.machine = CudaMachine(deadline_seconds=DEADLINE_SECONDS, **macros)
        # The order of the words is the weights' affair; Step tells the instance. Old checkouts do not know it.
        share: dict[str, Any] = {"field_order": True} if tuning.pop("field_order", False) else {}
        extra: dict[str, Any] = {"tuning": tuning} if tuning else {}
        if work.ranks > 1:
            from sgl_muse_mega.megakernel.mailbox import LoopBack  # a checkout before the exchange has no such module

            share |= {"ranks": work.ranks, "rank": 1}
            extra["mail"] = LoopBack(work.ranks, 1)
        if work.emulated:
            config = tiny_config(work.layers + 1, nvfp4=work.nvfp4)
            self.weights = random_weights(config, work.seed, self.machine.device, **share)
        else:
            heads = HEADS if work.ranks > 1 else HEADS // RANK_OF
            config = spark_config(work.layers + 1, nvfp4=work.nvfp4, experts=EXPERTS, heads=heads)
            local = EXPERTS // (work.ranks if work.ranks > 1 else RANK_OF)
            self.weights = random_weights(
                config, work.seed, self.machine.device, first_expert=local, local_experts=local, **share
            )
        self.cases: dict[int, RandomStep] = {}
        self.tokens: dict[int, Tensor] = {}  # int64 [draws, row_cap]
        self.recorded: dict[tuple[int, int], Recorded] = {}

        def create(machine: Machine, cap: int) -> RandomStep:
            return RandomStep.create(
                config, self.weights, machine, row_cap=cap, max_context=work.context, kv_dtype=work.kv, **extra
            )

        caps = sorted({row_cap(rows) for rows in work.rows})
        if not work.emulated:
            planner = Planner(self.machine)
            for cap in caps:
                create(cast(Machine, planner), cap)
            planner.build(**macros)
        for cap in caps:
            case = create(self.machine, cap)
            case.fill(work.context, work.seed)
            self.cases[cap] = case
            generator = torch.Generator().manual_seed(work.seed)
            held = config.vocab_size // work.ranks  # rank 1's rows, or all
            first = held if work.ranks > 1 else 0
            tokens = first + torch.randint(0, held, (work.draws, 16), generator=generator)
            self.tokens[cap] = tokens[:, :cap].to(self.machine.device)

    def describe(self) -> dict[str, Any]:
        """The machine, and the sizes of each instance."""
        return {
            "gpu": "emulator" if self.work.emulated else torch.cuda.get_device_name(self.machine.device),
            "sms": self.machine.sms,
            "instances": {cap: case.step.instance.describe() for cap, case in self.cases.items()},
        }

    # ---- launches ----

    def case(self, rows: int, draw: int) -> RandomStep:
        """The buffers for so many rows, holding a draw."""
        case = self.cases[row_cap(rows)]
        self.machine.attach(case.step, case.caches)
        case.step.inputs.token_ids.copy_(self.tokens[row_cap(rows)][draw])
        return case

    def chain(self, rows: int, layers: int) -> Recorded:
        """Embedding, then the first `layers` layers."""
        step = self.cases[row_cap(rows)].step

        def enqueue() -> None:
            step.launch_embed(rows)
            for index in range(layers):
                step.launch_layer(index, rows)

        if (rows, layers) not in self.recorded:
            self.recorded[rows, layers] = Recorded(self.machine, enqueue)
        return self.recorded[rows, layers]

    # ---- answers ----

    def load(self, rows: int) -> dict[str, Any]:
        """Distinct local experts [draws][layers], and bytes [draws] that the layers of the chain must read: dense
        weights, the router, and those experts."""
        step = self.cases[row_cap(rows)].step
        dense, per_expert = 0, 0
        for index, layer in enumerate(step.weights.layers[: self.work.layers]):
            dense += size_of(layer.o_proj, layer.router, layer.pre_expert_proj, layer.post_expert_proj)
            dense += size_of(step.weights.layers[index + 1].qkv)
            scales = [t for t in (layer.gate_up_block_scale, layer.down_block_scale) if t is not None]
            per_expert = size_of(layer.gate_up, layer.down, *scales) // layer.down.shape[0]
        experts: list[list[int]] = []
        for draw in range(self.work.draws):
            self.case(rows, draw).step.launch_embed(rows)
            experts.append([])
            for index, layer in enumerate(step.weights.layers[: self.work.layers]):
                step.launch_layer(index, rows)
                self.machine.synchronize()
                ids = step.activations.route_ids[:rows] - layer.first_expert
                here = ids[(ids >= 0) & (ids < layer.down.shape[0])]
                experts[-1].append(int(here.unique().numel()))
        return {"experts": experts, "bytes": [dense + per_expert * sum(counts) for counts in experts]}

    def times(self, rows: int, repeats: int, first_draw: int) -> dict[str, Any]:
        """us of the chain and of the embedding alone, [repeats], back to back; draws in turn from `first_draw` on."""
        self.case(rows, first_draw)
        chain, embed = self.chain(rows, self.work.layers), self.chain(rows, 0)
        moments = [[Moment(self.machine) for _ in range(3)] for _ in range(repeats)]
        for _ in range(2):
            chain.replay()
            embed.replay()
        for repeat, (start, middle, end) in enumerate(moments):
            self.case(rows, (first_draw + repeat) % self.work.draws)
            start.record()
            chain.replay()
            middle.record()
            embed.replay()
            end.record()
        self.machine.synchronize()
        return {
            "chain_us": [start.us_until(middle) for start, middle, _ in moments],
            "embed_us": [middle.us_until(end) for _, middle, end in moments],
        }

    def outputs(self, rows: int, draw: int) -> list[Tensor]:
        """Stream and taps of the rows after the chain, poisoned before it."""
        step = self.case(rows, draw).step
        step.activations.poison()
        step.taps.view(torch.uint8).fill_(0xFF)
        self.chain(rows, self.work.layers).replay()
        self.machine.synchronize()
        return [step.activations.stream[:rows].cpu(), step.taps[:rows, : (self.work.layers + 1) // 2].cpu()]

    def bits(self, rows: int) -> dict[str, Any]:
        """A digest of the outputs of all draws; whether they are finite, and whether row 0 has the same bits alone."""
        digest, finite, alone = hashlib.sha256(), True, True
        for draw in range(self.work.draws):
            found = self.outputs(rows, draw)
            for tensor in found:
                digest.update(tensor.view(torch.uint8).numpy().tobytes())
                finite = finite and bool(torch.isfinite(tensor.float()).all())
            if rows <= 8:  # the 16-row instance is compared with itself only
                single = self.outputs(1, draw)
                alone = alone and all(torch.equal(a[:1], b) for a, b in zip(found, single, strict=True))
        return {"digest": digest.hexdigest(), "finite": finite, "row_alone": alone}

    def stages(self, rows: int, layers: int) -> dict[str, Any]:
        """Every stage of the first layers against the reference: smallest cosine, and the stages that fail."""
        case = self.case(rows, 0)
        step = case.step
        step.activations.poison()
        step.launch_embed(rows)
        self.machine.synchronize()
        found = []
        for index in range(layers):
            check = stage_check.LayerCheck(step, index, rows, case.caches)
            step.launch_layer(index, rows)
            self.machine.synchronize()
            found += check.run()
        worst = min(found, key=lambda r: r.cosine if r.cosine == r.cosine else -1.0)
        return {
            "compared": len(found),
            "failed": [r.name for r in found if not r.passed],
            "worst": worst.name,
            "cosine": worst.cosine,
            "relative_rms": max(r.relative_rms for r in found),
        }

    def logs(self, rows: int, path: str) -> dict[str, Any]:
        """Saves the logs of every layer of one replay with NumPy, int64 [layers, CTAs, warps, words]; the arm must have
        been built with a trace. Says how many warps do math, and the bytes of keys and values that each layer reads.
        """
        case = self.case(rows, 0)
        step, config = case.step, case.step.config
        chain = self.chain(rows, self.work.layers)
        for _ in range(1 if self.work.emulated else 20):  # clocks and caches as in the middle of a decode
            chain.replay()
        step.trace.zero_()
        chain.replay()
        self.machine.synchronize()
        np.save(path, step.trace[1 : self.work.layers + 1].cpu().numpy())
        row_bytes = size_of(*(cache[:1] for cache in case.caches[0]))
        windows = [config.window(index) for index in range(self.work.layers)]
        keys = [self.work.context if window is None else min(window, self.work.context) for window in windows]
        return {"math_warps": step.instance.math_warps, "cache_bytes": [count * row_bytes for count in keys]}


def row_cap(rows: int) -> int:
    return 8 if rows <= 8 else 16


def size_of(*tensors: Tensor) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


def answer(questions: IO[str], answers: IO[str]) -> None:
    """Serves until the questions end."""

    def say(content: dict[str, Any]) -> None:
        answers.write(json.dumps(content) + "\n")
        answers.flush()

    try:
        start = time.monotonic()
        arm = Arm(Workload.read(questions.readline()))
        say(arm.describe() | {"seconds": time.monotonic() - start})
        for line in questions:
            question = json.loads(line)
            say(getattr(arm, question.pop("ask"))(**question))
    except (UserError, RuntimeError, AttributeError, TypeError) as error:
        say({"error": f"{type(error).__name__}: {error}" if not isinstance(error, UserError) else str(error)})


if __name__ == "__main__":
    output = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print must not end up among the answers
    answer(sys.stdin, output)
