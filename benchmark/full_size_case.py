"""What one rank of `full_size.py` measures: one number of rows, and equal bits over thousands of steps."""

import hashlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from full_size_model import Model, Sizes

from sgl_muse_mega.commands.step_bytes import bytes_of, draft_loads, layer_loads
from sgl_muse_mega.commands.step_times import WARM_UP, timed_steps
from sgl_muse_mega.megakernel.decode_loop import DecodeLoop
from sgl_muse_mega.megakernel.machine import Machine
from sgl_muse_mega.megakernel.mailbox import LoopBack
from sgl_muse_mega.megakernel.place import Place
from sgl_muse_mega.megakernel.step import Step
from sgl_muse_mega.speculative.sampling import SamplingParams

BEGIN_AGAIN = 200  # steps of a sequence: random weights seldom keep a draft, so a context grows slowly


@dataclass(frozen=True, slots=True)
class Options:
    sizes: Sizes
    rows: tuple[int, ...]
    context: int
    repeats: int
    steps: int  # at the end, for equal bits
    seed: int
    end: float  # of time.monotonic(): nothing is begun after it


def late(place: Place, options: Options) -> bool:
    """Whether any rank finds that the time is over; all ranks call it together."""
    return b"1" in place.group.gather(b"%d" % (time.monotonic() > options.end))


class Case:
    """One number of rows."""

    def __init__(
        self, model: Model, loop: DecodeLoop, machine: Machine, place: Place, options: Options, rows: int
    ) -> None:
        self.model, self.loop, self.machine, self.place = model, loop, machine, place
        self.options, self.rows = options, rows

    def measure(self) -> dict[str, Any]:
        """us of every repeat of the step and of its parts; of every layer this rank's experts and bytes."""
        loop, rows = self.loop, self.rows
        decode, step, draft = loop.decode, loop.decode.step, loop.decode.draft
        assert draft is not None
        decode.declare(loop.caches)
        begin(loop, self.options.context, rows)
        self.place.meet()
        if rows > 1:  # all rows behind the anchor would be one token, and go to the same experts
            draft.launch(rows)
        experts, sizes = layer_loads(step, rows)
        tokens = step.inputs.token_ids[:rows].tolist()
        back, us = self.loop_back() if self.place.ranks > 1 else ([], {})
        layers = len(step.weights.layers)
        # Every repeat starts with the embedding: a stream that went through the same layers again and again would
        # have rows that grow alike, and fewer experts.
        parts: dict[str, Callable[[], None]] = {
            "embedding": lambda: verify(step, rows, 0),
            "to first layer": lambda: verify(step, rows, 1),
            "to last but one": lambda: verify(step, rows, layers - 1),
            "layers": lambda: verify(step, rows, layers),
            "target head": lambda: decode.launch_head(rows),
            "accept": lambda: decode.accept.launch(rows),
            "draft context": lambda: draft.launch_context(rows),
        }
        if rows > 1:  # no block by itself: alone, one rank's would run ahead of the others
            parts["draft"] = lambda: draft.launch(rows)
            parts["draft head"] = lambda: draft.launch_head(rows)
        us |= {name: self.timed(enqueue) for name, enqueue in parts.items()}
        whole, gaps = self.steps()
        return {
            "rows": rows, "tokens": tokens, "us": us, "step_us": whole, "gap_us": gaps, "experts": experts,
            "experts_loop_back": back, "layer_bytes": sizes, "other_bytes": self.other_bytes(),
        }  # fmt: skip

    def loop_back(self) -> tuple[list[int], dict[str, list[float]]]:
        """The same layers with mailboxes of this rank's own: the same stores, polls and sums, and no wire.

        Its rows are others, so its experts are; of every layer how many, and us of all layers.
        """
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
        experts, _ = layer_loads(step, self.rows)
        found = {"layers, loop-back": self.timed(lambda: verify(step, self.rows, len(experts)))}
        loop.decode.declare(loop.caches)
        return experts, found

    def other_bytes(self) -> int:
        """Weights of draft and heads that a step reads."""
        draft = self.loop.decode.draft
        assert draft is not None
        layers, head, context = draft_loads(draft)
        size = bytes_of(draft.weights.lm_head) + context
        return size + head + layers if self.rows > 1 else size

    def timed(self, enqueue: Callable[[], None]) -> list[float]:
        """us of every repeat of a graph of these launches, one right behind the other: a wait of the host between
        them would set the ranks apart. All ranks do the same."""
        begin(self.loop, self.options.context, self.rows)
        self.place.meet()
        if self.machine.device.type != "cuda":
            return [wall_us(self.machine, enqueue) for _ in range(self.options.repeats)]
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            enqueue()
        self.place.meet()
        times = []
        for _ in range(WARM_UP + self.options.repeats):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            graph.replay()
            end.record()
            times.append((start, end))
        self.machine.synchronize()
        return [start.elapsed_time(end) * 1e3 for start, end in times[WARM_UP:]]

    def steps(self) -> tuple[list[float], list[float]]:
        """us of whole steps, and us between them while the host reads every report."""
        loop = self.loop
        begin(loop, self.options.context, self.rows)
        self.place.meet()
        if self.machine.device.type != "cuda":
            return [wall_us(self.machine, loop.next_step) for _ in range(self.options.repeats)], [0.0]
        return timed_steps(loop, self.options.repeats + WARM_UP)


def equal_bits(loop: DecodeLoop, machine: Machine, place: Place, options: Options) -> dict[str, Any]:
    """Whether all ranks report the same tokens and have the same stream after every `BEGIN_AGAIN` steps.

    Ends with the first difference, and when the time is over: "steps" says how many there were.
    """
    rows = min(max(options.rows), loop.width_limit)
    digest, steps, tokens, equal = hashlib.sha256(), 0, 0, True
    loop.decode.declare(loop.caches)  # another loop's steps may have run last
    while equal and steps < options.steps and not late(place, options):
        begin(loop, options.context, rows)
        for _ in range(min(BEGIN_AGAIN, options.steps - steps)):
            report = loop.next_step()
            steps, tokens = steps + 1, tokens + len(report.tokens)
            digest.update(repr((steps, report.tokens, report.length)).encode())
        machine.synchronize()
        stream = loop.decode.step.activations.stream[:rows].cpu().contiguous()
        digest.update(stream.view(torch.uint8).numpy().tobytes())
        equal = len(set(place.group.gather(digest.digest()))) == 1
    return {"steps": steps, "rows": rows, "tokens": tokens, "equal": equal and steps > 0}


def begin(loop: DecodeLoop, context: int, rows: int) -> None:
    """Starts decoding behind token 5 after the context."""
    loop.length = context
    loop.begin(5, SamplingParams(), width=rows, max_new_tokens=1 << 40, stop_ids=())


def verify(step: Step, rows: int, layers: int) -> None:
    """The embedding and the first `layers` layers."""
    step.launch_embed(rows)
    for index in range(layers):
        step.launch_layer(index, rows)


def wall_us(machine: Machine, action: Callable[[], Any]) -> float:
    start = time.monotonic()
    action()
    machine.synchronize()
    return (time.monotonic() - start) * 1e6
