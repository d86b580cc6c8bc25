"""Runs every equation of a decoder layer on another implementation's own intermediate results.

A "stage" is the result of an equation of the model specification, section 2.2, under the name by which `ReferenceLayer`
records it; `stream` is the layer's input. Feeding each equation the other side's input keeps one difference from hiding
or causing another.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from models import TARGET
from torch import Tensor

from sgl_muse_mega.checkpoint.weights import LayerWeights
from sgl_muse_mega.reference import attention, experts
from sgl_muse_mega.reference.numerics import Numerics, linear
from sgl_muse_mega.reference.target import ReferenceLayer, Rows

Stages = Mapping[str, Tensor]


@dataclass(frozen=True, slots=True)
class Difference:
    """Between two results of one equation, in units of the root mean square of the other side's result."""

    rms: float
    worst: float

    def __str__(self) -> str:
        return f"rms {self.rms:.1e}, worst {self.worst:.1e}"


def difference(ours: Tensor, theirs: Tensor) -> Difference:
    assert ours.shape == theirs.shape, (ours.shape, theirs.shape)
    delta, size = ours.double() - theirs.double(), theirs.double().square().mean().sqrt()
    return Difference(float(delta.square().mean().sqrt() / size), float(delta.abs().max() / size))


def whole_prompt(rows: int) -> Rows:
    """A single step that is the whole sequence."""
    positions, nothing = torch.arange(rows), torch.empty(0, dtype=torch.int64)
    return Rows(positions, positions, positions, nothing, nothing)


def layer_equations(
    layer: int, w: LayerWeights, num: Numerics, q_factor: float = 1.0
) -> dict[str, Callable[[Stages], Tensor]]:
    """One function of the other side's stages per equation; q_factor is what that side has multiplied onto q."""
    c = TARGET
    eps, post_eps, d = c.rms_norm_eps, c.post_norm_eps, c.head_dim
    reference = ReferenceLayer(c, layer, w, num)

    def value(s: Stages, name: str) -> Tensor:
        return num.value(s[name])

    def projection(weight: Tensor, source: str) -> Callable[[Stages], Tensor]:
        return lambda s: num.bf(linear(value(s, source), weight))

    def head_norm(source: str) -> Callable[[Stages], Tensor]:
        return lambda s: attention.a3_head_norm(value(s, source), d, eps, num)

    def rotated(name: str, factor: float) -> Callable[[Stages], Tensor]:
        def equation(s: Stages) -> Tensor:
            fused = f"A3.{name}" not in s  # norm and rotation are one operation there
            normed = head_norm(f"A2.{name}")(s) if fused else value(s, f"A3.{name}")
            return attention.a4_rotate(factor * normed, torch.arange(len(normed)), c.rope_theta(layer), num)

        return equation

    def attended(s: Stages) -> Tensor:
        positions = torch.arange(len(s["stream"]))
        mask = attention.visible(positions, positions, c.window(layer))
        q, k, v = value(s, "A4.q"), value(s, "A4.k"), value(s, "A2.v").unflatten(-1, (-1, d))
        return attention.a6_attention(q, k, v, mask, c.attention_scale / q_factor, num)

    def expert_rows(s: Stages) -> Tensor:
        x, rows = value(s, "F7"), []
        for expert, token in zip(s["F10.expert"].tolist(), s["F10.token"].tolist(), strict=True):
            gate, up = experts.f8_gate_up(x[token : token + 1], reference.gate_up, expert, num)
            rows.append(experts.f10_down(experts.f9_activation(gate, up, num), reference.down, expert, num))
        return torch.cat(rows)

    def scores(s: Stages) -> Tensor:
        return experts.f3_router_scores(value(s, "F2"), c.output_multiplier)

    return {
        "A1": lambda s: attention.a1_input_norm(value(s, "stream"), w.input_layernorm, eps, num),
        "A2.q": projection(w.q_proj, "A1"),
        "A2.k": projection(w.k_proj, "A1"),
        "A2.v": projection(w.v_proj, "A1"),
        "A2.gate": projection(w.gate_proj, "A1"),
        "A3.q": head_norm("A2.q"),
        "A3.k": head_norm("A2.k"),
        "A4.q": rotated("q", q_factor),
        "A4.k": rotated("k", 1.0),
        "A6": attended,
        "A7": lambda s: attention.a7_output_gate(value(s, "A6"), value(s, "A2.gate"), eps, num),
        "A8": projection(w.o_proj, "A7"),
        "A9": lambda s: attention.a9_post_attention_norm(value(s, "A8"), post_eps, num),
        "A10": lambda s: attention.a10_f16_residual(value(s, "stream"), value(s, "A9"), *reference.attention_gate),
        "F1": lambda s: experts.f1_pre_ffn_norm(value(s, "A10"), w.pre_feedforward_layernorm, eps, num),
        "F2": lambda s: experts.f2_router_logits(value(s, "F1"), w.router),
        "F5": lambda s: experts.f5_route_weights(scores(s), s["F4"], c.routed_scaling_factor),
        "F6": projection(w.pre_expert_proj, "F1"),
        "F7": lambda s: experts.f7_pre_expert_norm(value(s, "F6"), w.pre_expert_norm, eps, num),
        "F10": expert_rows,
        "F11": lambda s: experts.f11_post_expert_norm(value(s, "F10"), w.post_expert_norm, post_eps),
        "F12": lambda s: experts.f8_to_f12_experts(
            value(s, "F7"),
            s["F4"],
            value(s, "F5"),
            reference.gate_up,
            reference.down,
            w.post_expert_norm,
            post_eps,
            num,
        ),
        "F14": projection(w.post_expert_proj, "F12"),
        "F15": lambda s: experts.f15_post_ffn_norm(value(s, "F14"), w.post_feedforward_layernorm, post_eps, num),
        "F16": lambda s: attention.a10_f16_residual(value(s, "A10"), value(s, "F15"), *reference.ffn_gate),
    }


def evaluate(equations: Mapping[str, Callable[[Stages], Tensor]], stages: Stages) -> dict[str, Difference]:
    """Difference of every equation whose result the other side shows."""
    return {name: difference(f(stages), stages[name]) for name, f in equations.items() if name in stages}


def compare_layer(layer: int, w: LayerWeights, num: Numerics, stages: Stages, q_factor: float) -> dict[str, Difference]:
    return evaluate(layer_equations(layer, w, num, q_factor), stages)


def routing_margin(scores: Tensor, bias: Tensor, top_k: int) -> Tensor:
    """Distance between the last selected and the first rejected r + bias, per row: [T]."""
    ordered = (scores + bias.to(scores.dtype)).sort(dim=-1, descending=True).values
    return ordered[:, top_k - 1] - ordered[:, top_k]


ANGLES = {"A4.q", "A4.k"}
SUMS = {"A2.q", "A2.k", "A2.v", "A2.gate", "A6", "A8", "F2", "F6", "F10", "F12", "F14"}


def wrong(found: Mapping[str, Difference]) -> dict[str, str]:
    """Equations that differ from a float32 run by more than float32 explains: its angles, its sums, its norms."""
    bounds = {name: 2e-6 if name in ANGLES else 1e-6 if name in SUMS else 3e-7 for name in found}
    return {name: str(d) for name, d in found.items() if d.rms > bounds[name]}
