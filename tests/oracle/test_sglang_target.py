"""The reference target against SGLang's own module tree, run by its model runner on a CPU in bf16."""

from typing import Any

import documented
import pytest
import sglang_target as oracle
import torch
from equations import Difference, compare_layer, difference, evaluate, routing_margin, whole_prompt
from models import LAYERS, PROMPT, SEED, TARGET, token_ids
from report import note

from sgl_muse_mega.checkpoint.weights import TargetWeights
from sgl_muse_mega.reference import head
from sgl_muse_mega.reference.backend import ReferenceBackend
from sgl_muse_mega.reference.cache import KVCache
from sgl_muse_mega.reference.numerics import Numerics
from sgl_muse_mega.reference.target import ReferenceLayer

SAME = 6e-4
BANDS = {
    "A1": (1.5e-3, 5e-3),
    "A6": (4e-4, 2.5e-3),
    "A7": (1.5e-3, 5e-3),
    "A10": (1e-4, 6e-4),
    "F1": (1.5e-3, 5e-3),
    "F7": (1.5e-3, 5e-3),
    "F10": (1.5e-3, 6e-3),
    "F11": (1.5e-3, 5e-3),
    "F12": (2e-3, 1e-2),
    "F15": (1.5e-3, 6e-3),
    "F16": (1e-4, 6e-4),
}
DECODED = 12


@pytest.fixture(scope="module")
def ids() -> torch.Tensor:
    return token_ids(PROMPT + DECODED, SEED + 2)


@pytest.fixture(scope="module")
def run(sglang_runner: Any, ids: torch.Tensor) -> oracle.Run:
    return oracle.run(sglang_runner, ids[:PROMPT], ids[PROMPT:])


@pytest.mark.parametrize("layer", range(LAYERS))
def test_every_equation(layer: int, weights: TargetWeights, run: oracle.Run) -> None:
    stages, w = run.stages[layer], weights.layers[layer]
    found = compare_layer(layer, w, Numerics(), stages, oracle.Q_FACTOR)
    assert len(found) == 23  # the norms of q and k are one operation with the rotation
    explained = evaluate(documented.sglang(layer, w), stages)
    note("SGLang, bf16", found)
    note("SGLang, bf16, with its own rounding", explained)
    assert {n: str(d) for n, d in found.items() if n not in BANDS and d.rms > SAME} == {}
    assert {n: str(found[n]) for n, (low, high) in BANDS.items() if not low < found[n].rms < high} == {}
    assert {n: str(d) for n, d in explained.items() if d.rms > SAME} == {}


@pytest.mark.parametrize("layer", range(LAYERS))
def test_whole_layer(layer: int, weights: TargetWeights, run: oracle.Run) -> None:
    """One layer from SGLang's own float32 stream; rows that a near tie routes elsewhere are known by their margin."""
    w, stream, after = weights.layers[layer], run.streams[layer], run.streams[layer + 1]
    recorded: dict[str, torch.Tensor] = {}
    cache = KVCache(PROMPT, TARGET.num_key_value_heads, TARGET.head_dim, torch.bfloat16, torch.device("cpu"))
    ours, chosen = ReferenceLayer(TARGET, layer, w, Numerics()).forward(
        stream, whole_prompt(PROMPT), cache, recorded.__setitem__
    )
    same = (chosen.sort(dim=-1).values == run.stages[layer]["F4"].sort(dim=-1).values).all(dim=-1)
    margin = routing_margin(recorded["F3"], w.router_bias, TARGET.num_experts_per_tok)
    assert (margin[~same] < 2e-2).all()
    assert same.float().mean() > 0.8
    found = Difference(
        float((ours - after)[same].square().mean().sqrt() / (after - stream)[same].square().mean().sqrt()),
        float((ours - after)[same].norm(dim=1).max() / (after - stream)[same].norm(dim=1).min()),
    )
    note("SGLang, bf16: change of the stream by one layer", {f"layer {layer}": found})
    assert found.rms < 1.5e-2


def test_embedding_final_norm_and_head(weights: TargetWeights, ids: torch.Tensor, run: oracle.Run) -> None:
    num, c = Numerics(), TARGET
    embedded = head.e1_embedding(ids[:PROMPT], weights.embed_tokens, c.rms_norm_eps, num)
    normed = head.o1_final_norm(run.streams[-1], weights.norm, c.rms_norm_eps, num)
    from_bf16 = head.o1_final_norm(num.bf(run.streams[-1]), weights.norm, c.rms_norm_eps, num)  # D-2
    z = head.o2_head(run.hidden[-1:].float(), weights.lm_head)
    logits = head.o3_softcap(z, c.output_multiplier, c.final_logit_softcapping)
    found = {
        "E1": difference(embedded, run.streams[0]),
        "O1": difference(normed, run.hidden),
        "O1 of the bf16 stream": difference(from_bf16, run.hidden),
        "O2, O3": difference(logits, run.logits[:1]),
    }
    note("SGLang, bf16", found)
    assert found["E1"].rms < SAME
    assert 1e-3 < found["O1"].rms < 5e-3
    assert found["O1 of the bf16 stream"].rms < SAME
    assert found["O2, O3"].rms < 1e-6


def test_end_to_end(weights: TargetWeights, ids: torch.Tensor, run: oracle.Run) -> None:
    """Prefill and decode steps, judged by the distance to a float64 run in units of the reference's own distance."""
    results = []
    for num in (Numerics(exact=True), Numerics()):
        backend = ReferenceBackend(TARGET, weights, numerics=num)
        first = backend.prefill(ids[:PROMPT].tolist())
        results.append(torch.cat((first[None], backend.verify(ids[PROMPT:].tolist()))))
    exact, ours = results
    unit = (ours - exact).square().mean(-1).sqrt().quantile(0.25)
    ratio = float((run.logits - exact).square().mean(-1).sqrt().quantile(0.25) / unit)
    apart = float((run.logits - ours).square().mean(-1).sqrt().quantile(0.25) / unit)
    name = "SGLang, bf16: quartile of the distance of the logits, in the reference's own"
    note(name, {"to float64": ratio, "to the reference": apart})
    assert 0.4 < ratio < 4
    assert apart < 4
    assert unit < 0.05 * exact.std()
