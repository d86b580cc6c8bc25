"""Long runs of whole decode steps: the same states bit for bit, no memory taken, one graph launch per step."""

import re
import statistics
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from step_pair import Pair
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from sgl_muse_mega.commands.step_times import timed_steps
from sgl_muse_mega.megakernel.decode_loop import DecodeLoop
from sgl_muse_mega.speculative.generate import generate
from sgl_muse_mega.speculative.sampling import SamplingParams

SOAK_TOKENS = 400
CALL = re.compile(r"cuda[A-Z]\w*|cu[A-Z]\w*")
ENQUEUES = re.compile(r"Launch|Memcpy|Memset|Malloc|Free|Alloc")


@dataclass(frozen=True)
class Ending:
    """What a text leaves behind."""

    tokens: list[int]
    state: list[Tensor]

    def same(self, other: "Ending") -> bool:
        pairs = zip(self.state, other.state, strict=True)
        return self.tokens == other.tokens and all(torch.equal(a, b) for a, b in pairs)


def ending(loop: DecodeLoop, tokens: list[int]) -> Ending:
    """Committed rows of all caches, as bits, and what the next step would start from."""
    loop.decode.step.machine.synchronize()  # steps enqueued ahead of the end commit nothing
    rows = slice(1, loop.length + 1)
    assert loop.decode.draft is not None
    pairs = [*loop.caches, *loop.decode.draft.caches]
    bits = [cache[rows].view(torch.int16 if cache.element_size() == 2 else torch.int8) for p in pairs for cache in p]
    inputs = loop.decode.step.inputs
    return Ending(tokens, [t.clone() for t in (*bits, inputs.length, inputs.token_ids[:1], inputs.positions)])


def memory_in_use() -> dict[str, int]:
    """Bytes: of torch's tensors, of the whole GPU, and of this process on the host."""
    free, total = torch.cuda.mem_get_info()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {"tensors": torch.cuda.memory_allocated(), "gpu": total - free, "host": pages * 4096}


def soak(pair: Pair, steps: int, width: int) -> dict[str, Any]:
    """Six texts, greedy and sampled, again and again, each compared with its first run."""
    kinds = [SamplingParams(), SamplingParams(temperature=1.0, seed=3), SamplingParams(0.9, 0.9, 50, 0.01, seed=4)]
    tasks = [(prompt.ids, params) for prompt in pair.prompts[:2] for params in kinds]
    loop = pair.loop(width)
    expected: list[Ending] = []
    before: dict[str, int] = {}
    done = changed = texts = rounds = 0
    start = time.monotonic()

    def differs(index: int, found: Ending) -> bool:
        if len(expected) <= index:
            expected.append(found)
        return not found.same(expected[index])

    while done < steps or rounds < 3:
        for index, (ids, params) in enumerate(tasks):
            generation, _ = pair.run(ids, params, width, limit=SOAK_TOKENS, stop=False)
            changed += differs(index, ending(loop, generation.tokens))
            done, texts = done + generation.stats.steps, texts + 1
        rounds += 1
        if rounds == 2:  # by then everything has been allocated that a text needs
            before = memory_in_use()
    after = memory_in_use()
    grown = {name: after[name] - before[name] for name in after}
    return {"width": width, "steps": done, "texts": texts, "changed": changed, "grown_bytes": grown,
            "seconds": time.monotonic() - start}  # fmt: skip


def start_text(pair: Pair, width: int) -> DecodeLoop:
    """A text under way, with every graph captured."""
    loop, params = pair.loop(width), SamplingParams()
    iterator = iter(generate(loop, pair.prompts[0].ids, params, width=width, max_new_tokens=10**6))
    for _ in range(4):
        next(iterator)
    return loop


def profiled(pair: Pair, width: int, steps: int) -> dict[str, Any]:
    """What the host asked of CUDA in `steps` steps, and what the GPU did, as the profiler saw it."""
    loop = start_text(pair, width)
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        for _ in range(steps):
            loop.next_step()
    loop.decode.step.machine.synchronize()
    events = profiler.events() or []
    on_gpu = [e for e in events if e.device_type == torch.autograd.DeviceType.CUDA]
    calls = Counter(e.name for e in events if CALL.fullmatch(e.name))
    kernels = Counter(e.name for e in on_gpu)
    busy = sorted((e.time_range.start, e.time_range.end) for e in on_gpu)
    idle, until = 0.0, busy[0][1] if busy else 0.0
    for first, last in busy:
        idle += max(0.0, first - until)
        until = max(until, last)
    return {
        "width": width, "steps": steps, "calls": dict(calls), "kernels": dict(kernels),
        "enqueued": {name: count for name, count in calls.items() if ENQUEUES.search(name)},
        "idle_us_per_step": idle / steps,
    }  # fmt: skip


def gaps(pair: Pair, width: int, steps: int) -> dict[str, Any]:
    """us between the end of a step's graph and the begin of the next while the host reads every report, and us of the
    steps, by events on the stream."""
    loop = start_text(pair, width)
    lasted, between = timed_steps(loop, steps, warm_up=2)
    return {"width": width, "gap_us": between, "step_us": lasted, "gap_median_us": statistics.median(between)}
