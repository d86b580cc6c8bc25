"""Every comparison must notice an error: each mistake below is made on purpose and has to show where it belongs."""

from collections.abc import Callable
from typing import Any

import equations
import pytest
import test_transformers_draft as drafts
import torch
import transformers_draft
import transformers_target
from equations import compare_layer, difference, wrong
from models import DRAFT, SEED, TARGET, draft_weights, token_ids
from torch import Tensor

from sgl_muse_mega.checkpoint.weights import TargetWeights
from sgl_muse_mega.reference import attention, experts, head
from sgl_muse_mega.reference import draft as reference_draft
from sgl_muse_mega.reference.backend import ReferenceBackend
from sgl_muse_mega.reference.numerics import Numerics, rms

EXACT = Numerics(exact=True)
SLIDING, FULL = 0, 1  # layers

Patch = pytest.MonkeyPatch
Mistake = Callable[[Patch], None]


def config(**changes: Any) -> Mistake:
    return lambda patch: patch.setattr(equations, "TARGET", TARGET.model_copy(update=changes))


def function(module: Any, name: str, mistaken: Callable[..., Any]) -> Mistake:
    """mistaken takes the right function first."""
    right = getattr(module, name)
    return lambda patch: patch.setattr(module, name, lambda *args, **kwargs: mistaken(right, *args, **kwargs))


def adjacent_pairs(_right: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x[..., 0::2], x[..., 1::2]
    cos, sin = cos[:, None], sin[:, None]
    return torch.stack((first * cos - second * sin, second * cos + first * sin), dim=-1).flatten(-2)


def other_kv_heads(right: Any, q: Tensor, keys: Tensor, *args: Any) -> Tensor:
    """Query head h reads KV head h % kv_heads."""
    group = q.shape[1] // keys.shape[1]
    order = torch.arange(q.shape[1]).reshape(group, keys.shape[1]).T.flatten()
    return right(q[:, order], keys, *args)[:, order.argsort()]


def no_clamp(_right: Any, gate: Tensor, temperature: float, num: Numerics) -> tuple[Tensor, Tensor]:
    beta = torch.sigmoid(num.value(gate) / temperature)
    return torch.sqrt(1 - beta**2), beta


def norm_before_weight(_right: Any, x: Tensor, weight: Tensor, eps: float, *_args: Any) -> Tensor:
    return rms(x, eps) * (1 + weight.to(x.dtype))


def norm_after_sum(right: Any, rows: Tensor, weights: Tensor, num: Numerics) -> Tensor:
    return rms(right(rows, weights, num), 1e-8)


N1, N2 = {"A1", "F1", "F7"}, {"F11", "F12", "F15"}
MISTAKES: dict[str, tuple[int, Mistake, set[str]]] = {
    "rms_norm_eps 1e-6": (SLIDING, config(rms_norm_eps=1e-6), {"A1", "A3.q", "A3.k", "A7", "F1", "F7"}),
    "post_norm_eps 1e-5": (SLIDING, config(post_norm_eps=1e-5), {"A9", *N2}),
    "window of one key more": (SLIDING, config(sliding_window=TARGET.sliding_window + 1), {"A6"}),
    "window of one key less": (SLIDING, config(sliding_window=TARGET.sliding_window - 1), {"A6"}),
    "window on a full layer": (FULL, config(layer_types=("sliding_attention",) * TARGET.num_hidden_layers), {"A6"}),
    "rotation on a full layer": (
        FULL,
        config(layer_rope_theta=(500000.0,) * TARGET.num_hidden_layers),
        {"A4.q", "A4.k"},
    ),
    "another theta": (SLIDING, config(layer_rope_theta=(10000.0,) * TARGET.num_hidden_layers), {"A4.q", "A4.k"}),
    "rotated adjacent pairs": (SLIDING, function(attention, "rotate_half", adjacent_pairs), {"A4.q", "A4.k"}),
    "rotated backwards": (
        SLIDING,
        function(attention, "rotate_half", lambda right, x, cos, sin: right(x, cos, -sin)),
        {"A4.q", "A4.k"},
    ),
    "q without its factor": (SLIDING, config(qk_scale_factor=1.0), {"A6"}),
    "other KV heads": (SLIDING, function(attention, "a6_attention", other_kv_heads), {"A6"}),
    "no norm of the attention output": (
        SLIDING,
        function(
            attention,
            "norm_weightless",
            lambda right, x, eps: x if x.shape[1] == TARGET.num_attention_heads else right(x, eps),
        ),
        {"A3.q", "A7"},
    ),
    "gate not through the sigmoid": (
        SLIDING,
        function(
            attention,
            "a7_output_gate",
            lambda right, o, g, eps, num: right(o, torch.logit(g.clamp(0.01, 0.99)), eps, num),
        ),
        {"A7"},
    ),
    "another gate temperature": (SLIDING, config(residual_gate_temperature=0.31), {"A10", "F16"}),
    "alpha without its clamp": (SLIDING, function(attention, "residual_gate", no_clamp), {"A10", "F16"}),
    "gamma without its one, attention": (
        SLIDING,
        function(attention, "norm_zero_centred", lambda right, x, w, eps: right(x, w.float() - 1, eps)),
        {"A1"},
    ),
    "gamma without its one, experts": (
        SLIDING,
        function(experts, "norm_zero_centred", lambda right, x, w, eps: right(x, w.float() - 1, eps)),
        {"F1", "F7"},
    ),
    "norm before the weight": (SLIDING, function(experts, "norm_weight_first", norm_before_weight), N2),
    "router without its multiplier": (SLIDING, config(output_multiplier=1.0), {"F5"}),
    "route weights not scaled": (SLIDING, config(routed_scaling_factor=1.0), {"F5"}),
    "gate and up exchanged": (
        SLIDING,
        function(experts, "f9_activation", lambda right, gate, up, num: right(up, gate, num)),
        {"F10", "F12"},
    ),
    "norm after the sum of the experts": (SLIDING, function(experts, "f12_combine", norm_after_sum), {"F12"}),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_one_equation(
    name: str, weights: TargetWeights, float32_run: transformers_target.Run, monkeypatch: Patch
) -> None:
    layer, mistake, expected = MISTAKES[name]
    stages, w = float32_run.stages[layer], weights.layers[layer]
    mistake(monkeypatch)
    found = compare_layer(layer, w, EXACT, stages, transformers_target.Q_FACTOR)
    assert set(wrong(found)) == expected


@pytest.fixture
def logits(weights: TargetWeights, prompt: Tensor) -> Callable[[Any], Tensor]:
    def last_rows(model: Any) -> Tensor:
        backend = ReferenceBackend(model, weights, numerics=EXACT)
        backend.prefill(prompt[:-8].tolist())
        return backend.verify(prompt[-8:].tolist())

    return last_rows


WHOLE: dict[str, tuple[dict[str, Any], Mistake]] = {
    "window of one key more": ({"sliding_window": TARGET.sliding_window + 1}, lambda patch: None),
    "final norm around one": (
        {},
        function(head, "norm_absolute", lambda right, x, w, eps: right(x, 1 + w.float(), eps)),
    ),
    "no softcap": ({"final_logit_softcapping": 1e6}, lambda patch: None),
    "no embedding norm": ({}, function(head, "norm_weightless", lambda right, x, eps: x)),
    "positions from one": (
        {},
        function(attention, "rope_tables", lambda right, p, *args: right(p + (p > 40), *args)),
    ),
}


@pytest.mark.parametrize("name", WHOLE)
def test_whole_model(
    name: str, float64_run: transformers_target.Run, logits: Callable[[Any], Tensor], monkeypatch: Patch
) -> None:
    changes, mistake = WHOLE[name]
    mistake(monkeypatch)
    found = difference(logits(TARGET.model_copy(update=changes)), float64_run.logits[-8:])
    assert found.rms > 50 * 2e-5  # the bound of test_transformers_target


DRAFT_MISTAKES: dict[str, Mistake] = {
    "causal block": lambda patch: patch.setattr(drafts, "RAW", drafts.RAW.model_copy(update={"is_causal": True})),
    "normed embedding": lambda patch: patch.setattr(drafts, "RAW", DRAFT),
    "context through the input norm": function(
        reference_draft.ReferenceDraft,
        "write_context",
        lambda right, self, c, *args: right(
            self, reference_draft.norm_absolute(c, self.weights.layers[0].input_layernorm, 1e-5), *args
        ),
    ),
    "block one position later": function(
        reference_draft.ReferenceDraft,
        "_rotate",
        lambda right, self, x, positions: right(self, x, positions + int(len(positions) == DRAFT.block_size)),
    ),
    "eps 1e-6": lambda patch: patch.setattr(drafts, "RAW", drafts.RAW.model_copy(update={"rms_norm_eps": 1e-6})),
}


@pytest.mark.parametrize("name", DRAFT_MISTAKES)
def test_draft(name: str, weights: TargetWeights, monkeypatch: Patch) -> None:
    draft = transformers_draft.plain(draft_weights())
    generator = torch.Generator().manual_seed(SEED + 8)
    taps = torch.randn(3, drafts.CONTEXT, DRAFT.hidden_size, generator=generator).double()
    block = token_ids(DRAFT.block_size, SEED)
    window = DRAFT.sliding_window
    theirs = drafts.theirs(draft, weights, taps, block, window - 1)
    assert difference(drafts.ours(draft, weights, taps, block, window), theirs).rms < drafts.BOUND
    DRAFT_MISTAKES[name](monkeypatch)
    assert difference(drafts.ours(draft, weights, taps, block, window), theirs).rms > 3 * drafts.BOUND
