"""`sgl-muse-mega bench step`: where the time of a decode step goes, on random weights of the real sizes."""

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from sgl_muse_mega import results
from sgl_muse_mega.checkpoint.random_weights import random_draft
from sgl_muse_mega.commands.roof import ROOF_GB_S
from sgl_muse_mega.commands.step_bytes import bytes_of, draft_loads, layer_loads
from sgl_muse_mega.commands.step_times import WARM_UP, timed_replays, timed_steps
from sgl_muse_mega.config import DraftConfig, TargetConfig
from sgl_muse_mega.errors import UserError
from sgl_muse_mega.megakernel.cuda import CudaMachine
from sgl_muse_mega.megakernel.decode_backend import assemble
from sgl_muse_mega.megakernel.decode_loop import DecodeLoop
from sgl_muse_mega.megakernel.decode_request import Report
from sgl_muse_mega.megakernel.draft_weights import prepare_draft
from sgl_muse_mega.megakernel.random_step import EXPERTS, HEADS, VOCABULARY, random_weights, spark_config
from sgl_muse_mega.results import Figure
from sgl_muse_mega.speculative.sampling import SamplingParams


@dataclass(frozen=True, slots=True)
class Options:
    """layers: of the target. rank_of: ranks that share heads and experts; draft, latent projections and heads whole."""

    layers: int
    rank_of: int
    width: int
    context: int
    accept_length: float
    temperature: float
    top_p: float
    repeats: int
    seed: int
    save: bool


@dataclass(frozen=True, slots=True)
class Part:
    """One stretch of the step, timed alone: us of every repeat, and the bytes of weights it must read."""

    name: str
    launches: int
    bytes: int
    us: list[float]

    @property
    def median(self) -> float:
        return statistics.median(self.us)

    @property
    def fraction(self) -> float:
        """Of the measured roof."""
        return self.bytes / (self.median * 1e-6) / (ROOF_GB_S * 1e9)


def run(options: Options) -> int:
    """Measure, print, and save if asked. Raises UserError without a Hopper GPU or for sizes that cannot be built."""
    if options.layers < 7:
        raise UserError(f"The draft taps five layers before the last, {options.layers} are too few; use 7 or more.")
    machine = CudaMachine()
    loop = build(options, machine)
    console = Console(soft_wrap=True)
    parts = [measure(loop, options, *part) for part in stretches(loop, options)]
    whole, gaps = measure_steps(loop, options)
    machine.synchronize()
    report(console, options, loop, parts, whole, gaps)
    if options.save:
        name = torch.cuda.get_device_name(machine.device)
        print(results.save("step", results.environment(name), content(options, parts, whole, gaps),
                           figures(options, parts, whole, gaps)))  # fmt: skip
    return 0


def build(options: Options, machine: CudaMachine, rows: int = 1) -> DecodeLoop:
    """A random pair: Muse Spark's sizes, the heads and experts of one rank, and a whole draft.

    rows: of a step, if they are more than the width.
    """
    local = EXPERTS // options.rank_of
    config = spark_config(options.layers, heads=HEADS // options.rank_of, vocab_size=VOCABULARY)
    weights = random_weights(config, options.seed, machine.device, first_expert=0, local_experts=local)
    draft_config = spark_draft(config)
    draft = random_draft(draft_config, options.seed, machine.device)
    rows = max(rows, options.width)
    max_context = options.context + (options.repeats + 8) * 4 * rows
    loop = assemble(
        config, weights, draft_config, prepare_draft(draft_config, draft, weights.embedding, weights.lm_head),
        machine=machine, width=rows, max_context=max_context, kv_dtype="fp8",
    )  # fmt: skip
    assert loop.decode.draft is not None
    loop.length = options.context
    generator = torch.Generator(machine.device).manual_seed(options.seed)
    for pair in [*loop.caches, *loop.decode.draft.caches]:
        for cache in pair:
            content = torch.randn(cache.shape, generator=generator, device=machine.device)
            cache.view(torch.uint8).copy_(content.to(cache.dtype).view(torch.uint8))
    return loop


def spark_draft(target: TargetConfig, **changes: Any) -> DraftConfig:
    """The expected draft of specification section 6; `changes` replaces fields."""
    last = target.num_hidden_layers
    return DraftConfig.model_validate(
        {
            "vocab_size": target.vocab_size, "hidden_size": 8192, "intermediate_size": 16384, "num_hidden_layers": 5,
            "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 128,
            "max_position_embeddings": target.max_position_embeddings, "rms_norm_eps": 1e-5, "rope_theta": 500000.0,
            "sliding_window": 2048, "layer_types": ("sliding_attention",) * 5, "is_causal": False, "block_size": 8,
            "conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 256, "selector_top_k": 16,
            "target_layer_ids": tuple(round(1 + i * (last - 4) / 4) for i in range(5)), "mask_token_id": 201818,
            "output_multiplier": 0.17677669529663687, "final_logit_softcapping": 20.0, "num_target_layers": last,
            **changes,
        }
    )  # fmt: skip


Stretch = tuple[str, int, int, Callable[[], None]]


def stretches(loop: DecodeLoop, options: Options) -> list[Stretch]:
    """(name, launches, bytes of weights, what to enqueue) of the parts of a step."""
    decode, width = loop.decode, options.width
    step, draft = decode.step, decode.draft
    assert draft is not None
    layers = len(step.weights.layers)
    draft_layers, draft_head, context = draft_loads(draft)

    def verify() -> None:
        step.launch_embed(width)
        for index in range(layers):
            step.launch_layer(index, width)

    return [
        ("draft layers", 1, draft_layers, lambda: draft.launch_block(width)),
        ("draft head", 1, draft_head, lambda: draft.launch_head(width)),
        ("verify layers", layers + 1, verify_bytes(loop, width), verify),
        ("head", 1, bytes_of(step.weights.lm_head), lambda: decode.launch_head(width)),
        ("accept", 1, 0, lambda: decode.accept.launch(width)),
        ("draft context", 1, context, lambda: draft.launch_context(width)),
    ]


def verify_bytes(loop: DecodeLoop, width: int) -> int:
    """Weights that the verify launches read: dense ones, and the distinct local experts of these very rows."""
    begin(loop, width)
    loop.decode.launch(width)
    return sum(layer_loads(loop.decode.step, width)[1])


def begin(loop: DecodeLoop, width: int, params: SamplingParams | None = None) -> None:
    """Starts decoding behind token 5."""
    loop.begin(5, params or SamplingParams(), width=width, max_new_tokens=1 << 40, stop_ids=())


def measure(
    loop: DecodeLoop, options: Options, name: str, launches: int, size: int, enqueue: Callable[[], None]
) -> Part:
    """Replays of one part as a graph of its own."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        enqueue()
    begin(loop, options.width, sampling(options))
    return Part(name, launches, size, timed_replays(graph, options.repeats))


def measure_steps(loop: DecodeLoop, options: Options) -> tuple[list[float], list[float]]:
    """us of whole steps, and us between the end of one and the begin of the next while the host reads every report."""
    begin(loop, options.width, sampling(options))
    return time_steps(loop, options.repeats, options.width)


def check_rows(report: Report, rows: int) -> None:
    """Raises UserError when a step did not verify `rows` rows for their own sake."""
    if report.rows != rows:
        raise UserError(f"A step of {rows} rows verified {report.rows}; the context is full, or the kernels are wrong.")


def time_steps(loop: DecodeLoop, repeats: int, rows: int) -> tuple[list[float], list[float]]:
    """The same of `repeats` steps of a sequence that has begun, each of `rows` rows. Raises UserError when they had
    others."""
    return timed_steps(loop, repeats + WARM_UP, check=lambda report: check_rows(report, rows))


def sampling(options: Options) -> SamplingParams:
    return SamplingParams(temperature=options.temperature, top_p=options.top_p, seed=options.seed)


def tokens_per_second(options: Options, whole: list[float], gaps: list[float]) -> float:
    return options.accept_length / ((statistics.median(whole) + statistics.median(gaps)) * 1e-6)


def report(
    console: Console, options: Options, loop: DecodeLoop, parts: list[Part], whole: list[float], gaps: list[float]
) -> None:
    """The table."""
    kind = "greedy" if options.temperature == 0 else f"temperature {options.temperature}, top-p {options.top_p}"
    console.print(
        f"{torch.cuda.get_device_name()}, {options.layers} layers of one rank of {options.rank_of}, width "
        f"{options.width}, context {options.context}, {kind}, {options.repeats} repeats, roof {ROOF_GB_S:.0f} GB/s"
    )
    table = Table("part", "launches", "us (min..max)", "MB", "roof us", "of roof")
    for part in parts:
        spread = f"{part.median:.1f} ({min(part.us):.1f}..{max(part.us):.1f})"
        roof = part.bytes / ROOF_GB_S / 1e3
        numbers = (f"{part.bytes / 1e6:.0f}", f"{roof:.1f}", f"{part.fraction:.3f}") if part.bytes else ("", "", "")
        table.add_row(part.name, str(part.launches), spread, *numbers)
    total = sum(part.bytes for part in parts)
    spread = f"{statistics.median(whole):.1f} ({min(whole):.1f}..{max(whole):.1f})"
    roof = total / ROOF_GB_S / 1e3
    table.add_row(
        "whole step", str(sum(part.launches for part in parts)), spread, f"{total / 1e6:.0f}", f"{roof:.1f}",
        f"{roof / statistics.median(whole):.3f}",
    )  # fmt: skip
    console.print(table)
    console.print(
        f"between steps {statistics.median(gaps):.1f} us ({min(gaps):.1f}..{max(gaps):.1f}); at accept length "
        f"{options.accept_length}: {tokens_per_second(options, whole, gaps):.1f} tokens/s"
    )


def content(options: Options, parts: list[Part], whole: list[float], gaps: list[float]) -> dict[str, Any]:
    """Everything measured, for the results file."""
    return {
        "options": {name: getattr(options, name) for name in Options.__slots__},
        "roof_gb_s": ROOF_GB_S,
        "parts": [
            {"name": p.name, "launches": p.launches, "bytes": p.bytes, "us": p.us, "fraction": p.fraction}
            for p in parts
        ],
        "step_us": whole,
        "gap_us": gaps,
        "tokens_per_second": tokens_per_second(options, whole, gaps),
    }


def figures(options: Options, parts: list[Part], whole: list[float], gaps: list[float]) -> dict[str, Figure]:
    """The named figures of one run at width 8 of 14 layers; other runs have none."""
    if (options.layers, options.rank_of, options.width) != (14, 4, 8):
        return {}
    by_name = {part.name: part for part in parts}

    def of_roof(part: Part) -> Figure:
        return Figure.of([part.bytes / us / ROOF_GB_S / 1e3 for us in part.us], "of the measured roof")

    return {
        "step.w8.ms": Figure.of([us / 1e3 for us in whole], "ms"),
        "step.gap_us": Figure.of(gaps, "us"),
        "step.draft.fraction": of_roof(by_name["draft layers"]),
        "step.head.fraction": of_roof(by_name["head"]),
    }
