"""The full-size model on four GPUs: 62 layers, 256 experts, a draft of the published size, random weights.

    python benchmark/full_size.py --ranks 4 --json full.json --save          # one call of less than ten minutes
    python benchmark/full_size.py --ranks 2 --layers 26 --json full-2.json   # as many layers as fit
    python benchmark/full_size.py --ranks 1 --layers 10 --json full-1.json
    python benchmark/full_size.py --dry-run --ranks 2                        # tiny sizes on the emulator

For every number of rows: the whole step and its parts, each alone in a graph; what a layer's exchanges cost beside the
same kernels in loop-back; distinct experts; the share of the memory roof; tokens per second at several accept lengths.
At the end all ranks must have the same bits after thousands of steps. Weights are made in place; memory is printed as
the model grows. The run ends by itself after --timeout seconds and keeps what it had. It has not run on hardware yet.
"""

import argparse
import hashlib
import json
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from full_size_model import EXPERTS, LAYERS, Model, Sizes, memory
from rank_workers import Found, Tell, run_on_emulator, run_on_gpus
from torch import Tensor

from sgl_muse_mega import results
from sgl_muse_mega.commands.build import HOPPER_SMS, instances
from sgl_muse_mega.commands.roof import ROOF_GB_S
from sgl_muse_mega.commands.step_times import WARM_UP, timed_steps
from sgl_muse_mega.megakernel.build import build
from sgl_muse_mega.megakernel.decode_loop import DecodeLoop
from sgl_muse_mega.megakernel.machine import Machine
from sgl_muse_mega.megakernel.mailbox import LoopBack
from sgl_muse_mega.megakernel.place import Place
from sgl_muse_mega.megakernel.step import Step
from sgl_muse_mega.results import Figure
from sgl_muse_mega.speculative.sampling import SamplingParams

ACCEPT_LENGTHS = (1.0, 3.0, 3.88, 4.19, 5.37)
BEGIN_AGAIN = 200  # steps of a sequence: random weights seldom keep a draft, so a context grows slowly


@dataclass(frozen=True, slots=True)
class Options:
    sizes: Sizes
    rows: tuple[int, ...]
    context: int
    repeats: int
    steps: int  # at the end, for equal bits
    seed: int


def work(machine: Machine, place: Place, options: Options, tell: Tell) -> None:
    """One rank."""
    start = time.monotonic()
    model = Model.make(options.sizes, machine, place, options.seed, tell)
    tell("built", time.monotonic() - start)
    loops: dict[int, DecodeLoop] = {}
    for rows in options.rows:
        cap = 8 if rows <= 8 else 16
        if cap not in loops:
            loops[cap] = model.loop(machine, place, cap, options.context, (BEGIN_AGAIN + options.repeats + 8) * cap)
            memory(machine, tell, f"steps of up to {cap} rows")
        tell("case", Case(model, loops[cap], machine, place, options, rows).measure())
    tell("equal", equal_bits(next(iter(loops.values())), machine, place, options))


class Case:
    """One number of rows."""

    def __init__(
        self, model: Model, loop: DecodeLoop, machine: Machine, place: Place, options: Options, rows: int
    ) -> None:
        self.model, self.loop, self.machine, self.place = model, loop, machine, place
        self.options, self.rows = options, rows

    def measure(self) -> dict[str, Any]:
        loop, rows = self.loop, self.rows
        decode, step, draft = loop.decode, loop.decode.step, loop.decode.draft
        assert draft is not None
        begin(loop, self.options.context, rows)
        experts, size = self.distinct_experts()
        layers = list(range(len(step.weights.layers)))
        us = {"layers, loop-back": self.loop_back()} if self.place.ranks > 1 else {}
        parts: dict[str, Callable[[], None]] = {
            "layers": lambda: verify(step, rows),
            "first layer": lambda: each(step, [0], rows),
            "NVFP4 layer": lambda: each(step, [1], rows),
            "last layer": lambda: each(step, layers[-1:], rows),
            "head": lambda: decode.launch_head(rows),
            "accept": lambda: decode.accept.launch(rows),
            "draft context": lambda: draft.launch_context(rows),
        }
        if rows > 1:  # block and head together: alone, one rank's block would run ahead of the others
            parts["draft"] = lambda: draft.launch(rows)
        us |= {name: self.timed(enqueue) for name, enqueue in parts.items()}
        whole, gaps = self.steps()
        return {
            "rows": rows, "us": us, "step_us": whole, "gap_us": gaps, "distinct_experts": experts,
            "bytes": size + self.other_bytes(),
        }  # fmt: skip

    def loop_back(self) -> list[float]:
        """us of the same layers with mailboxes of this rank's own: the same stores, polls and sums, and no wire."""
        loop, options = self.loop, self.options
        whole = loop.decode.step
        step = Step(
            self.model.config, self.model.weights, self.machine, row_cap=loop.width_limit,
            max_context=options.context + loop.width_limit, kv_dtype="bf16" if options.sizes.tiny else "fp8",
            taps=whole.taps_after, mail=LoopBack(self.place.ranks, self.place.rank),
        )  # fmt: skip
        step.use_caches(loop.caches)
        for name in ("positions", "length", "full_slots", "sliding_slots"):
            getattr(step.inputs, name).copy_(getattr(whole.inputs, name))
        for name in ("full_pages", "sliding_pages"):
            pages = getattr(step.inputs, name)
            pages.copy_(getattr(whole.inputs, name)[: len(pages)])
        # Nobody else would send the embeddings of other ranks' tokens.
        step.inputs.token_ids.copy_(step.first_token + torch.arange(loop.width_limit))
        self.machine.attach(step, loop.caches)
        found = self.timed(lambda: verify(step, self.rows))
        loop.decode.declare(loop.caches)
        return found

    def distinct_experts(self) -> tuple[list[int], int]:
        """Of every layer, this rank's experts that these rows use; and the bytes of weights that the layers read."""
        step, rows = self.loop.decode.step, self.rows
        step.launch_embed(rows)
        self.machine.synchronize()
        distinct, size = [], bytes_of(step.weights.layers[0].qkv)
        for index, layer in enumerate(step.weights.layers):
            step.launch_layer(index, rows)
            self.machine.synchronize()
            ids = step.activations.route_ids[:rows] - layer.first_expert
            local = layer.down.shape[0]
            distinct.append(int(ids[(ids >= 0) & (ids < local)].unique().numel()))
            scales = [t for t in (layer.gate_up_block_scale, layer.down_block_scale) if t is not None]
            size += distinct[-1] * bytes_of(layer.gate_up, layer.down, *scales) // local
            size += bytes_of(layer.o_proj, layer.router, layer.pre_expert_proj, layer.post_expert_proj)
            if index + 1 < len(step.weights.layers):
                size += bytes_of(step.weights.layers[index + 1].qkv)
        return distinct, size

    def other_bytes(self) -> int:
        """Weights of draft and heads that a step reads."""
        draft = self.loop.decode.draft
        assert draft is not None
        weights = draft.weights
        size = bytes_of(weights.lm_head, weights.fusion)
        kv_rows = 2 * draft.instance.kv_heads * draft.instance.head_dim
        size += len(weights.layers) * kv_rows * draft.instance.hidden * 2
        if self.rows > 1:
            size += bytes_of(weights.lm_head, weights.hidden_projection)
            size += sum(bytes_of(*(getattr(layer, name) for name in layer.__slots__)) for layer in weights.layers)
        return size

    def timed(self, enqueue: Callable[[], None]) -> list[float]:
        """us of every repeat of a graph of these launches; all ranks do the same."""
        begin(self.loop, self.options.context, self.rows)
        self.place.meet()
        if self.machine.device.type != "cuda":
            return [wall_us(self.machine, enqueue) for _ in range(self.options.repeats)]
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            enqueue()
        self.place.meet()
        times = []
        for _ in range(self.options.repeats + 3):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            graph.replay()
            end.record()
            times.append((start, end))
        self.machine.synchronize()
        return [start.elapsed_time(end) * 1e3 for start, end in times[3:]]

    def steps(self) -> tuple[list[float], list[float]]:
        """us of whole steps, and us between them while the host reads every report."""
        loop = self.loop
        begin(loop, self.options.context, self.rows)
        self.place.meet()
        if self.machine.device.type != "cuda":
            return [wall_us(self.machine, loop.next_step) for _ in range(self.options.repeats)], [0.0]
        return timed_steps(loop, self.options.repeats + WARM_UP)


def begin(loop: DecodeLoop, context: int, rows: int) -> None:
    """Starts decoding behind token 5 after the context."""
    loop.length = context
    loop.begin(5, SamplingParams(), width=rows, max_new_tokens=1 << 40, stop_ids=())


def verify(step: Step, rows: int) -> None:
    step.launch_embed(rows)
    each(step, list(range(len(step.weights.layers))), rows)


def each(step: Step, layers: list[int], rows: int) -> None:
    for index in layers:
        step.launch_layer(index, rows)


def wall_us(machine: Machine, action: Callable[[], Any]) -> float:
    start = time.monotonic()
    action()
    machine.synchronize()
    return (time.monotonic() - start) * 1e6


def bytes_of(*tensors: Tensor) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


def equal_bits(loop: DecodeLoop, machine: Machine, place: Place, options: Options) -> dict[str, Any]:
    """Whether all ranks report the same tokens and end with the same stream, and how many steps that took."""
    digest, tokens, rows = hashlib.sha256(), 0, min(max(options.rows), loop.width_limit)
    for number in range(options.steps):
        if number % BEGIN_AGAIN == 0:
            begin(loop, options.context, rows)
        report = loop.next_step()
        tokens += len(report.tokens)
        digest.update(repr((number, report.tokens, report.length)).encode())
    machine.synchronize()
    stream = loop.decode.step.activations.stream[:rows].cpu().contiguous()
    digest.update(stream.view(torch.uint8).numpy().tobytes())
    everybody = {text.decode() for text in place.group.gather(digest.hexdigest().encode())}
    return {"steps": options.steps, "rows": rows, "tokens": tokens, "equal": len(everybody) == 1}


def report(found: Found, options: Options, ranks: int) -> dict[str, Any]:
    """Prints the table and returns what goes into the file: of each case the slowest rank's times."""
    by_rank = found.of("case")
    cases = []
    for index in range(min(map(len, by_rank))):
        of_ranks = [rank[index] for rank in by_rank]
        slowest = max(of_ranks, key=lambda case: statistics.median(case["step_us"]))
        experts = [statistics.mean(case["distinct_experts"]) for case in of_ranks]
        size = max(case["bytes"] for case in of_ranks)
        ms = statistics.median(slowest["step_us"]) / 1e3
        gap = statistics.median(slowest["gap_us"] or [0.0]) / 1e3
        cases.append(
            {**slowest, "ranks": of_ranks, "ms": ms, "gap_ms": gap, "mean_experts": experts, "bytes": size,
             "roof": size / (ms * 1e-3) / (ROOF_GB_S * 1e9),
             "tokens_per_second": {str(n): n / (ms + gap) * 1e3 for n in ACCEPT_LENGTHS}}
        )  # fmt: skip
    names = ("draft", "layers", "first layer", "NVFP4 layer", "last layer", "head", "accept", "draft context")
    print(f"{ranks} ranks, {options.sizes.layers} layers, context {options.context}; ms, the slowest rank's medians")
    print("rows " + "".join(f"{name:>14}" for name in ("step", "between", *names, "exchanges")) + "  experts  GB  roof")
    for case in cases:
        ms = {name: statistics.median(us) / 1e3 for name, us in case["us"].items()}
        ms["exchanges"] = ms["layers"] - ms["layers, loop-back"] if "layers, loop-back" in ms else 0.0
        cells = [case["ms"], case["gap_ms"], *(ms.get(name) for name in (*names, "exchanges"))]
        line = f"{case['rows']:4d} " + "".join(f"{'-' if c is None else f'{c:.3f}':>14}" for c in cells)
        print(f"{line}  {max(case['mean_experts']):.1f}  {case['bytes'] / 1e9:.2f}  {case['roof']:.3f}")
    for case in cases:
        rates = ", ".join(f"{rate:.1f} at {length}" for length, rate in case["tokens_per_second"].items())
        print(f"{case['rows']:4d} rows, tokens/s by accept length: {rates}")
    equal = [answer for rank in found.of("equal") for answer in rank]
    complete = len(equal) == ranks and len(cases) == len(options.rows)
    failed = bool(found.problems) or not complete or not all(answer["equal"] for answer in equal)
    bits = "equal" if equal and all(answer["equal"] for answer in equal) else "NOT SHOWN"
    print(f"bits of all ranks after {options.steps} steps: {bits}")
    print("problems:", "; ".join(found.problems) or "none")
    return {
        "failed": failed, "problems": found.problems, "cases": cases, "equal": equal, "memory_gb": found.of("memory"),
        "built_s": found.of("built"),
    }  # fmt: skip


def show(kind: str, content: Any) -> None:
    """What rank 0 tells, as it comes."""
    if kind == "memory":
        held, reserved, free = (content[name] for name in ("held", "reserved", "free"))
        print(f"after {content['after']}: {held:.1f} GB held, {reserved:.1f} reserved, {free:.1f} free", flush=True)
    elif kind == "case":
        print(f"{content['rows']} rows: {statistics.median(content['step_us']) / 1e3:.3f} ms per step", flush=True)
    elif kind == "built":
        print(f"built in {content:.0f} s", flush=True)


def compile_all(options: Options, ranks: int) -> None:
    """Compiles what the ranks will load, side by side, before they start."""
    target = options.sizes.target()
    wanted = instances(target, options.sizes.draft(target), sms=HOPPER_SMS, ranks=ranks, kv_dtypes=("fp8",))
    with ThreadPoolExecutor() as pool:
        list(pool.map(build, wanted.values()))


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--layers", type=int, default=LAYERS)
    parser.add_argument("--experts", type=int, default=EXPERTS, help="of all ranks")
    parser.add_argument("--rows", type=lambda text: tuple(map(int, text.split(","))), default=(8, 1, 2, 4, 16))
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--steps", type=int, default=5000, help="at the end, whose bits are compared")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--timeout", type=float, default=570.0, help="seconds of the whole run")
    parser.add_argument("--dry-run", action="store_true", help="tiny sizes on the emulator; its times say nothing")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--save", action="store_true", help="write the results and the figure full.t8.ms")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    given = parse(arguments)
    start = time.monotonic()
    sizes = Sizes(3 if given.dry_run else given.layers, given.experts, tiny=given.dry_run)
    options = Options(sizes, given.rows, given.context, given.repeats, given.steps, given.seed)
    if given.dry_run:
        found = run_on_emulator(work, options, given.ranks, show=show)
    else:
        compile_all(options, given.ranks)
        print(f"compiled in {time.monotonic() - start:.0f} s", flush=True)
        left = given.timeout - (time.monotonic() - start)
        found = run_on_gpus(work, options, given.ranks, seconds=left, show=show)
    content = report(found, options, given.ranks)
    content["options"] = {name: value for name, value in vars(given).items() if name not in ("json", "save")}
    gpu = None if given.dry_run else torch.cuda.get_device_name(0)
    environment = results.environment(gpu, ("python", "benchmark/full_size.py"))
    if given.json:
        given.json.write_text(json.dumps({"environment": environment, **content}, indent=1))
    if given.save and not given.dry_run:
        whole = (given.ranks, given.layers, given.experts) == (4, LAYERS, EXPERTS) and not content["failed"]
        eight = [case for case in content["cases"] if case["rows"] == 8] if whole else []
        figures = {"full.t8.ms": Figure.of([us / 1e3 for us in eight[0]["step_us"]], "ms")} if eight else {}
        print(results.save("full", environment, content, figures))
    return int(content["failed"])


if __name__ == "__main__":
    sys.exit(main())
