"""The reference target against Hugging Face transformers' `muse_spark`."""

from pathlib import Path

import documented
import pytest
import torch
import transformers_target as oracle
from equations import Difference, compare_layer, difference, evaluate, routing_margin, whole_prompt, wrong
from models import LAYERS, PROMPT, SEED, TARGET
from report import note
from transformers.models.muse_spark import modeling_muse_spark as spark

from sgl_muse_mega.checkpoint.weights import TargetWeights
from sgl_muse_mega.reference.backend import ReferenceBackend
from sgl_muse_mega.reference.cache import KVCache
from sgl_muse_mega.reference.experts import f3_router_scores, f4_select
from sgl_muse_mega.reference.numerics import (
    Numerics,
    norm_absolute,
    norm_weight_first,
    norm_weightless,
    norm_zero_centred,
)
from sgl_muse_mega.reference.rope import rope_tables
from sgl_muse_mega.reference.target import ReferenceLayer, ReferenceTarget

EXACT = Numerics(exact=True)
SAME = 6e-4
"""Two bf16 results that differ by the order of a float32 sum alone: the rms of a few values on a rounding edge."""
BANDS = {  # normative form against transformers in bf16: the difference is there, and no larger than this
    "A1": (1.5e-3, 5e-3),
    "A4.q": (1.5e-3, 5e-3),
    "A4.k": (1e-3, 4e-3),
    "A6": (3e-3, 1.2e-2),
    "A7": (1.5e-3, 5e-3),
    "A10": (8e-4, 3e-3),
    "F1": (1.5e-3, 5e-3),
    "F7": (1.5e-3, 5e-3),
    "F10": (1.5e-3, 6e-3),
    "F11": (1.5e-3, 5e-3),
    "F12": (2e-3, 1e-2),
    "F15": (1.5e-3, 6e-3),
    "F16": (8e-4, 3e-3),
}


@pytest.fixture(scope="module")
def bf16_run(checkpoint: Path, prompt: torch.Tensor) -> oracle.Run:
    return oracle.run(oracle.load(checkpoint, torch.bfloat16), prompt)


@pytest.mark.parametrize("layer", range(LAYERS))
def test_every_equation_without_rounding(layer: int, weights: TargetWeights, float32_run: oracle.Run) -> None:
    found = compare_layer(layer, weights.layers[layer], EXACT, float32_run.stages[layer], oracle.Q_FACTOR)
    assert len(found) == 25
    note("transformers, float32: any equation", found)
    assert wrong(found) == {}


@pytest.mark.parametrize("layer", range(LAYERS))
def test_every_equation_in_bf16(layer: int, weights: TargetWeights, bf16_run: oracle.Run) -> None:
    stages, w = bf16_run.stages[layer], weights.layers[layer]
    found = compare_layer(layer, w, Numerics(), stages, oracle.Q_FACTOR)
    explained = evaluate(documented.transformers(layer, w), stages)
    note("transformers, bf16", found)
    note("transformers, bf16, with its own rounding", explained)
    bands = {n: b for n, b in BANDS.items() if TARGET.rope_theta(layer) or n != "A4.k"}
    assert {n: str(d) for n, d in found.items() if n not in bands and d.rms > SAME} == {}
    assert {n: str(found[n]) for n, (low, high) in bands.items() if not low < found[n].rms < high} == {}
    assert {n: str(d) for n, d in explained.items() if d.rms > SAME} == {}


@pytest.mark.parametrize("scale", [1e-5, 1e-4, 1.0, 1e3])
def test_norms_of_small_and_large_rows(scale: float) -> None:
    """The four flavours where eps decides (mean squares of 1e-10 and 1e-8) and where it does not."""
    generator = torch.Generator().manual_seed(SEED)
    x = scale * torch.randn(7, 96, generator=generator)
    weight = 0.1 * torch.randn(96, generator=generator)
    found = {}
    for eps in (TARGET.rms_norm_eps, TARGET.post_norm_eps):
        modules = {
            "N0": spark.MuseSparkRMSNorm(eps=eps, with_scale=False),
            "N1": spark.MuseSparkTextCenteredRMSNorm(96, eps=eps),
            "N2": spark.MuseSparkTextInputScaledRMSNorm(96, eps=eps),
            "NF": spark.MuseSparkRMSNorm(96, eps=eps),
        }
        ours = {
            "N0": norm_weightless(x.double(), eps),
            "N1": norm_zero_centred(x.double(), weight, eps),
            "N2": norm_weight_first(x.double(), weight, eps),
            "NF": norm_absolute(x.double(), weight, eps),
        }
        for name, module in modules.items():
            if name != "N0":
                module.weight = torch.nn.Parameter(weight)
            with torch.inference_mode():
                found[f"{name}, eps {eps}"] = difference(ours[name], module(x))
    assert {n: str(d) for n, d in found.items() if d.rms > 3e-7} == {}


def test_rotation_tables_at_far_positions(checkpoint: Path) -> None:
    """float32 angles up to the last position of the published model, bit for bit."""
    positions = torch.tensor([0, 1, 2047, 2048, 65535, 131072, 524287, 1048575])
    rotary = oracle.load(checkpoint, torch.float32).model.language_model.rotary_emb
    theirs = rotary(torch.zeros(1), positions[None])
    for mine, their in zip(rope_tables(positions, TARGET.head_dim, 500000.0, torch.float32), theirs, strict=True):
        assert torch.equal(torch.cat((mine, mine), dim=-1), their[0])


def test_routing(weights: TargetWeights, float32_run: oracle.Run, bf16_run: oracle.Run) -> None:
    """The same experts from the same logits, except at ties within float32; the bias takes part in the selection."""
    swayed = 0
    for run in (float32_run, bf16_run):
        for w, stages in zip(weights.layers, run.stages, strict=True):
            scores = f3_router_scores(stages["F2"].double(), TARGET.output_multiplier)
            ours = f4_select(scores, w.router_bias, TARGET.num_experts_per_tok)
            clear = routing_margin(scores, w.router_bias, TARGET.num_experts_per_tok) > 1e-5
            assert clear.float().mean() > 0.95
            assert torch.equal(ours[clear].sort(dim=-1).values, stages["F4"][clear].sort(dim=-1).values)
            unbiased = f4_select(scores, torch.zeros_like(w.router_bias), TARGET.num_experts_per_tok)
            swayed += int((unbiased.sort(dim=-1).values != ours.sort(dim=-1).values).any(dim=-1).sum())
    assert swayed > 20


@pytest.mark.parametrize("layer", range(LAYERS))
def test_whole_layer_in_bf16(layer: int, weights: TargetWeights, bf16_run: oracle.Run) -> None:
    """One layer from the oracle's own stream; rows that a near tie routes elsewhere are recognised by their margin."""
    w, stream, after = weights.layers[layer], bf16_run.streams[layer].float(), bf16_run.streams[layer + 1].float()
    recorded: dict[str, torch.Tensor] = {}
    cache = KVCache(PROMPT, TARGET.num_key_value_heads, TARGET.head_dim, torch.bfloat16, torch.device("cpu"))
    ours, chosen = ReferenceLayer(TARGET, layer, w, Numerics()).forward(
        stream, whole_prompt(PROMPT), cache, recorded.__setitem__
    )
    same = (chosen.sort(dim=-1).values == bf16_run.stages[layer]["F4"].sort(dim=-1).values).all(dim=-1)
    margin = routing_margin(recorded["F3"], w.router_bias, TARGET.num_experts_per_tok)
    assert (margin[~same] < 2e-2).all()
    assert same.float().mean() > 0.8
    found = Difference(
        float((ours - after)[same].square().mean().sqrt() / (after - stream)[same].square().mean().sqrt()),
        float((ours - after)[same].norm(dim=1).max() / (after - stream)[same].norm(dim=1).min()),
    )
    note("transformers, bf16: change of the stream by one layer", {f"layer {layer}": found})
    assert found.rms < 2.5e-2


def test_end_to_end_without_rounding(
    checkpoint: Path, weights: TargetWeights, prompt: torch.Tensor, float64_run: oracle.Run
) -> None:
    """All logits, and the draft's taps, through prefill in pieces and verify steps that are partly rejected."""
    backend = ReferenceBackend(TARGET, weights, numerics=EXACT)
    logits = {47: backend.prefill(prompt[:48].tolist())}
    position = 48
    for width, kept in ((8, 3), (1, 1), (8, 8), (5, 4), (16, 16)):
        guesses = prompt[position : position + width].clone()
        guesses[kept:] = 5  # rejected rows leave their K and V behind
        rows = backend.verify(guesses.tolist())
        backend.commit(kept)
        logits |= {position + i: rows[i] for i in range(kept)}
        position += kept
    assert position == PROMPT
    ours = torch.stack([logits[i] for i in sorted(logits)])
    found = difference(ours, float64_run.logits[sorted(logits)])
    note("transformers, float64: logits", {"end to end": found})
    assert found.rms < 2e-5
    assert (ours.argmax(-1) == float64_run.logits[sorted(logits)].argmax(-1)).all()


def test_end_to_end_in_bf16(
    weights: TargetWeights, prompt: torch.Tensor, float64_run: oracle.Run, bf16_run: oracle.Run
) -> None:
    """Judged by the distance to the float64 run, in units of the reference's own distance."""
    backend = ReferenceBackend(TARGET, weights)
    backend.prefill(prompt[:-16].tolist())
    ours, theirs = backend.verify(prompt[-16:].tolist()), bf16_run.logits[-16:].float()
    exact = float64_run.logits[-16:]
    unit = (ours - exact).square().mean(-1).sqrt().quantile(0.25)
    ratio = float((theirs - exact).square().mean(-1).sqrt().quantile(0.25) / unit)
    apart = float((theirs - ours).square().mean(-1).sqrt().quantile(0.25) / unit)
    note(
        "transformers, bf16: quartile of the distance of the logits, in the reference's own",
        {"to float64": ratio, "to the reference": apart},
    )
    assert 0.6 < ratio < 5
    assert apart < 6
    assert unit < 0.05 * exact.std()


def test_taps_are_the_stream_after_the_layer(
    weights: TargetWeights, prompt: torch.Tensor, float64_run: oracle.Run
) -> None:
    caches = [
        KVCache(PROMPT, TARGET.num_key_value_heads, TARGET.head_dim, torch.float64, torch.device("cpu"))
        for _ in range(LAYERS)
    ]
    target = ReferenceTarget(TARGET, weights, EXACT, taps=(0, 2, 4))
    taps = target.forward(prompt, whole_prompt(PROMPT), caches).taps
    found = {f"tap {i}": difference(tap, float64_run.streams[i + 1]) for i, tap in zip((0, 2, 4), taps, strict=True)}
    note("transformers, float64: taps", found)
    assert all(d.rms < 1e-5 for d in found.values())
