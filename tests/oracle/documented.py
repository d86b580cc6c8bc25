"""The rounding points in which the other implementations differ from ours, written out.

An implementation's bf16 result must agree with our equation up to the size of such a difference, and with the form
below almost exactly: then the listed point is the whole difference. D-numbers are those of the model specification,
section 12.
"""

from collections.abc import Callable

import torch
from equations import Stages
from models import TARGET
from torch import Tensor
from torch.nn.functional import silu

from sgl_muse_mega.checkpoint.weights import LayerWeights
from sgl_muse_mega.reference import attention
from sgl_muse_mega.reference.numerics import Numerics, linear, rms
from sgl_muse_mega.reference.rope import rope_tables

NUM = Numerics()
Form = Callable[[Stages], Tensor]


def transformers(layer: int, w: LayerWeights) -> dict[str, Form]:
    """What transformers' bf16 run rounds beyond our equations (eager attention, experts in a loop)."""
    factor = TARGET.qk_scale_factor
    return _both(layer, w) | {
        "A4.q": lambda s: _rotated_in_bf16(NUM.bf(s["A3.q"].float() * factor), layer),
        "A4.k": lambda s: _rotated_in_bf16(s["A3.k"].float(), layer),
        "A6": lambda s: _attention_in_bf16(s, layer),
        "A10": lambda s: NUM.bf(_residual(s["stream"], s["A9"], w.post_attention_residual_gate)),
        "F16": lambda s: NUM.bf(_residual(s["A10"], s["F15"], w.post_feedforward_residual_gate)),
    }


def sglang(layer: int, w: LayerWeights) -> dict[str, Form]:
    """What SGLang's CPU path rounds beyond our equations; its GPU kernels do not share all of these points."""
    return _both(layer, w) | {
        "A10": lambda s: _residual(s["stream"], s["A9"], w.post_attention_residual_gate.to(torch.bfloat16)),
        "F16": lambda s: _residual(s["A10"], s["F15"], w.post_feedforward_residual_gate.to(torch.bfloat16)),
    }


def _both(layer: int, w: LayerWeights) -> dict[str, Form]:
    eps, post_eps = TARGET.rms_norm_eps, TARGET.post_norm_eps
    return {
        "A1": lambda s: _norm_first(s["stream"], w.input_layernorm, eps),
        "A7": lambda s: _gated(s["A6"], s["A2.gate"], eps),
        "F1": lambda s: _norm_first(s["A10"], w.pre_feedforward_layernorm, eps),
        "F7": lambda s: _norm_first(s["F6"], w.pre_expert_norm, eps),
        "F10": lambda s: _experts(s, w),
        "F11": lambda s: _weight_first(s["F10"], w.post_expert_norm, post_eps),
        "F12": lambda s: _combined_by_expert(s),
        "F15": lambda s: _weight_first(s["F14"], w.post_feedforward_layernorm, post_eps),
    }


def _gamma(weight: Tensor) -> Tensor:
    """1 + w rounded to bf16 (D-3)."""
    return NUM.bf(1 + weight.float())


def _norm_first(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return NUM.bf(rms(x.float(), eps) * _gamma(weight))


def _weight_first(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The scaled input is rounded before the mean square, also for the post-expert norm, and the result after (D-4)."""
    return NUM.bf(rms(NUM.bf(_gamma(weight) * x.float()), eps))


def _gated(o: Tensor, gate: Tensor, eps: float) -> Tensor:
    """The normed output and the sigmoid are rounded before their product (D-12)."""
    return NUM.bf(NUM.bf(rms(o.float(), eps)).flatten(1) * NUM.bf(torch.sigmoid(gate.float())))


def _rotated_in_bf16(x: Tensor, layer: int) -> Tensor:
    """Tables, products and sum in bf16 (D-6)."""
    theta = TARGET.rope_theta(layer)
    if theta == 0:
        return x
    cos, sin = (NUM.bf(t)[:, None, :] for t in rope_tables(torch.arange(len(x)), x.shape[-1], theta, torch.float32))
    first, second = x.chunk(2, dim=-1)
    return NUM.bf(
        torch.cat((NUM.bf(first * cos) - NUM.bf(second * sin), NUM.bf(second * cos) + NUM.bf(first * sin)), -1)
    )


def _attention_in_bf16(s: Stages, layer: int) -> Tensor:
    """Scores, scaled scores and probabilities are rounded (D-43); q carries the factor already (D-5)."""
    q, k = s["A4.q"].float(), s["A4.k"].float()
    v = s["A2.v"].float().unflatten(-1, (-1, TARGET.head_dim))
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    scores = NUM.bf(NUM.bf(torch.einsum("thd,nhd->htn", q, k)) * TARGET.head_dim**-0.5)
    positions = torch.arange(len(q))
    mask = attention.visible(positions, positions, TARGET.window(layer))
    probabilities = NUM.bf(scores.masked_fill(~mask, float("-inf")).softmax(dim=-1))
    return NUM.bf(torch.einsum("htn,nhd->thd", probabilities, v))


def _residual(stream: Tensor, n: Tensor, gate: Tensor) -> Tensor:
    """A stream in the model's type (D-1) is rounded by the caller; SGLang's gate is bf16 (D-37)."""
    alpha, beta = attention.residual_gate(gate, TARGET.residual_gate_temperature, NUM)
    return alpha * stream.float() + beta * n.float()


def _experts(s: Stages, w: LayerWeights) -> Tensor:
    """silu is rounded before its product with up (D-22)."""
    assert isinstance(w.gate_up_proj, Tensor)
    assert isinstance(w.down_proj, Tensor)
    rows = []
    for expert, token in zip(s["F10.expert"].tolist(), s["F10.token"].tolist(), strict=True):
        gate, up = NUM.bf(linear(s["F7"][token].float(), w.gate_up_proj[expert])).chunk(2)
        rows.append(NUM.bf(linear(NUM.bf(NUM.bf(silu(gate)) * up), w.down_proj[expert])))
    return torch.stack(rows)


def _combined_by_expert(s: Stages) -> Tensor:
    """Experts are added by id with the running sum in bf16 (D-25), from the rounded rows of F11."""
    total = torch.zeros(s["F12"].shape)
    rows = zip(s["F10.expert"].tolist(), s["F10.token"].tolist(), s["F11"].float(), strict=True)
    for expert, token, row in rows:  # ascending expert ids
        omega = s["F5"][token][s["F4"][token] == expert]
        total[token] = NUM.bf(total[token] + NUM.bf(row * omega))
    return total
