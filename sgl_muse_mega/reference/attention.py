"""Attention half of a decoder layer, equations A1-A10 (model specification, section 2.2), and the gated residual."""

import torch
from torch import Tensor

from sgl_muse_mega.reference.numerics import (
    Numerics,
    linear,
    norm_weightless,
    norm_zero_centred,
    sigmoid,
)
from sgl_muse_mega.reference.rope import rope_tables, rotate_half


def a1_input_norm(stream: Tensor, weight: Tensor, eps: float, num: Numerics) -> Tensor:
    """a = bf(N1(s; w_in)); stream [T, H]."""
    return num.bf(norm_zero_centred(stream, weight, eps))


def a2_projections(
    a: Tensor, q_proj: Tensor, k_proj: Tensor, v_proj: Tensor, gate_proj: Tensor, num: Numerics
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k, v, g = a W^T each, rounded to bf16."""
    q, k, v, gate = (num.bf(linear(a, weight)) for weight in (q_proj, k_proj, v_proj, gate_proj))
    return q, k, v, gate


def a3_head_norm(x: Tensor, head_dim: int, eps: float, num: Numerics) -> Tensor:
    """Weightless norm per head: [T, heads * head_dim] -> [T, heads, head_dim]; for q and k."""
    return num.bf(norm_weightless(x.unflatten(-1, (-1, head_dim)), eps))


def a4_rotate(x: Tensor, positions: Tensor, theta: float, num: Numerics) -> Tensor:
    """Rotary embedding of [T, heads, head_dim] at `positions`; theta 0 leaves x as it is."""
    if theta == 0:
        return x
    cos, sin = rope_tables(positions, x.shape[-1], theta, num.dtype)
    return num.bf(rotate_half(x, cos, sin))


def visible(query_positions: Tensor, key_positions: Tensor, window: int | None) -> Tensor:
    """Mask [T, n] of keys j with 0 <= i - j and, on sliding layers, i - j <= window - 1."""
    distance = query_positions[:, None] - key_positions[None, :]
    mask = distance >= 0
    return mask if window is None else mask & (distance < window)


def a6_attention(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scale: float, num: Numerics) -> Tensor:
    """o = softmax(c q k^T) v; q [T, heads, d], keys and values [n, kv_heads, d], mask [T, n]; query head h reads
    KV head h // (heads / kv_heads). Probabilities are not rounded; the result is bf16."""
    group = q.shape[1] // keys.shape[1]
    grouped = q.double().unflatten(1, (keys.shape[1], group))
    scores = torch.einsum("tkgd,nkd->kgtn", grouped, keys.double()) * scale
    scores = scores.masked_fill(~mask[None, None], float("-inf"))
    output = torch.einsum("kgtn,nkd->tkgd", scores.softmax(dim=-1), values.double())
    return num.bf(output.flatten(1, 2).to(q.dtype))


def a7_output_gate(o: Tensor, gate: Tensor, eps: float, num: Numerics) -> Tensor:
    """y_h = bf(N0(o_h) * sigmoid(g_h)); o [T, heads, d], gate [T, heads * d] -> [T, heads * d], one rounding (D-12)."""
    return num.bf(norm_weightless(o, eps).flatten(1) * sigmoid(gate))


def a8_output_projection(y: Tensor, o_proj: Tensor, num: Numerics) -> Tensor:
    """z = y W_o^T."""
    return num.bf(linear(y, o_proj))


def a9_post_attention_norm(z: Tensor, eps: float, num: Numerics) -> Tensor:
    """n = bf(N0(z))."""
    return num.bf(norm_weightless(z, eps))


def residual_gate(gate: Tensor, temperature: float, num: Numerics) -> tuple[Tensor, Tensor]:
    """alpha and beta per channel from the stored float32 gate; alpha^2 + beta^2 = 1 above the clamp of alpha^2."""
    u = num.value(gate) / temperature
    beta = torch.sigmoid(u)
    alpha = torch.sqrt(torch.clamp(torch.sigmoid(-u) * (1 + beta), min=1e-3))
    return alpha, beta


def a10_f16_residual(stream: Tensor, n: Tensor, alpha: Tensor, beta: Tensor) -> Tensor:
    """s' = alpha s + beta n, never rounded; A10 after attention, F16 after the experts."""
    return alpha * stream + beta * n
