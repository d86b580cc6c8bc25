"""Feed-forward half of a decoder layer, equations F1-F15 (model specification, section 2.2; rounding of section 4)."""

import torch
from torch import Tensor

from sgl_muse_mega.checkpoint.nvfp4 import dequantize_codes
from sgl_muse_mega.checkpoint.weights import Nvfp4Experts
from sgl_muse_mega.reference.numerics import (
    Numerics,
    linear,
    norm_weight_first,
    norm_zero_centred,
    sigmoid,
    silu,
)

ROUTE_EPS = 1e-15


def f1_pre_ffn_norm(stream: Tensor, weight: Tensor, eps: float, num: Numerics) -> Tensor:
    """b = bf(N1(s'; w_preff))."""
    return num.bf(norm_zero_centred(stream, weight, eps))


def f2_router_logits(b: Tensor, router: Tensor) -> Tensor:
    """l = f32(b) W_r^T, the bf16-rounded row against the float32 router (D-7): [T, E]."""
    return linear(b, router)


def f3_router_scores(logits: Tensor, output_multiplier: float) -> Tensor:
    """r = sigmoid(l * output_multiplier)."""
    return sigmoid(logits * output_multiplier)


def f4_select(scores: Tensor, bias: Tensor, top_k: int) -> Tensor:
    """Ids of the k largest r + bias in descending order, ties to the lower id (D-24): int64 [T, k]."""
    order = torch.sort(scores + bias.to(scores.dtype), dim=-1, descending=True, stable=True).indices
    return order[:, :top_k]


def f5_route_weights(scores: Tensor, selected: Tensor, routed_scaling_factor: float) -> Tensor:
    """omega = r * (routed_scaling_factor / (sum of the selected r + 1e-15)), r without bias: [T, k]."""
    chosen = scores.gather(1, selected)
    total = torch.zeros_like(chosen[:, 0])
    for slot in range(chosen.shape[1]):  # selection order
        total = total + chosen[:, slot]
    return chosen * (routed_scaling_factor / (total + ROUTE_EPS))[:, None]


def f6_pre_expert_projection(b: Tensor, pre_expert_proj: Tensor, num: Numerics) -> Tensor:
    """h = b W_pre^T: [T, M]."""
    return num.bf(linear(b, pre_expert_proj))


def f7_pre_expert_norm(h: Tensor, weight: Tensor, eps: float, num: Numerics) -> Tensor:
    """x = bf(N1(h; w_preexp))."""
    return num.bf(norm_zero_centred(h, weight, eps))


class ExpertStack:
    """One stacked expert matrix [E, rows, columns], BF16 or NVFP4, dequantised one expert at a time on first use."""

    def __init__(self, stored: Tensor | Nvfp4Experts, num: Numerics) -> None:
        self._stored = stored
        self._scale_2: Tensor | None = num.value(stored.scale_2) if isinstance(stored, Nvfp4Experts) else None
        self._matrices: dict[int, Tensor] = {}

    @property
    def quantised(self) -> bool:
        """Whether the matrix is NVFP4."""
        return self._scale_2 is not None

    def matrix(self, expert: int) -> Tensor:
        """[rows, columns] float64; for NVFP4 the exact e2m1 * e4m3 without the global scale."""
        if expert not in self._matrices:
            stored = self._stored
            if isinstance(stored, Nvfp4Experts):
                plain = dequantize_codes(stored.codes[expert], stored.block_scale[expert])
            else:
                plain = stored[expert]
            self._matrices[expert] = plain.double()
        return self._matrices[expert]

    def scales(self, expert: int) -> Tensor:
        """Global scales of the parts (gate and up, or down) in the working type; NVFP4 only."""
        assert self._scale_2 is not None
        scales: Tensor = self._scale_2[expert]
        return scales


def f8_gate_up(x: Tensor, gate_up: ExpertStack, expert: int, num: Numerics) -> tuple[Tensor, Tensor]:
    """gt = x W1^T, up = x W3^T: [T, I] each; NVFP4 by section 4.2, BF16 rounded to bf16 (4.1)."""
    gate, up = linear(x, gate_up.matrix(expert)).chunk(2, dim=-1)
    if not gate_up.quantised:
        return num.bf(gate), num.bf(up)
    scale_gate, scale_up = gate_up.scales(expert)
    if num.w4a16 == "marlin":
        scale = num.bf(scale_gate)
        return num.bf(num.bf(gate) * scale), num.bf(num.bf(up) * scale)
    return gate * scale_gate, up * scale_up


def f9_activation(gate: Tensor, up: Tensor, num: Numerics) -> Tensor:
    """act = bf(silu(gt) * up), one rounding (D-22)."""
    return num.bf(silu(gate) * up)


def f10_down(act: Tensor, down: ExpertStack, expert: int, num: Numerics) -> Tensor:
    """y = act W2^T: [T, M]; float32 for NVFP4 in the normative form, bf16 otherwise."""
    y = linear(act, down.matrix(expert))
    if not down.quantised:
        return num.bf(y)
    scale = down.scales(expert)[0]
    if num.w4a16 == "marlin":
        return num.bf(num.bf(y) * num.bf(scale))
    return y * scale


def f11_post_expert_norm(y: Tensor, weight: Tensor, eps: float) -> Tensor:
    """m_e = N2(y_e; w_postexp) per (token, expert) row, before the weighted sum, in float32 (D-4)."""
    return norm_weight_first(y, weight, eps)


def f12_combine(expert_rows: Tensor, weights: Tensor, num: Numerics) -> Tensor:
    """m = bf(sum over slots of omega_e m_e) in slot order (D-25); expert_rows [T, k, M], weights [T, k]."""
    total = torch.zeros_like(expert_rows[:, 0])
    for slot in range(expert_rows.shape[1]):
        total = total + weights[:, slot, None] * expert_rows[:, slot]
    return num.bf(total)


def f8_to_f12_experts(
    x: Tensor,
    selected: Tensor,
    weights: Tensor,
    gate_up: ExpertStack,
    down: ExpertStack,
    post_expert_norm: Tensor,
    post_norm_eps: float,
    num: Numerics,
    first_expert: int = 0,
    local_experts: int | None = None,
) -> Tensor:
    """Routed experts of the rows x [T, M]: returns m [T, M].

    Slots whose expert is not in [first_expert, first_expert + local_experts) contribute nothing (one rank's share of
    F13).
    """
    rows = x.new_zeros(*selected.shape, x.shape[1])
    for expert in selected.unique().tolist():
        local = expert - first_expert
        if local < 0 or (local_experts is not None and local >= local_experts):
            continue
        token, slot = (selected == expert).nonzero(as_tuple=True)
        gate, up = f8_gate_up(x[token], gate_up, local, num)
        y = f10_down(f9_activation(gate, up, num), down, local, num)
        rows[token, slot] = f11_post_expert_norm(y, post_expert_norm, post_norm_eps)
    return f12_combine(rows, weights, num)


def f14_post_expert_projection(m: Tensor, post_expert_proj: Tensor, num: Numerics) -> Tensor:
    """z = m W_post^T: [T, H]."""
    return num.bf(linear(m, post_expert_proj))


def f15_post_ffn_norm(z: Tensor, weight: Tensor, eps: float, num: Numerics) -> Tensor:
    """n = bf(N2(z; w_postff)), (1 + w) z rounded to bf16 before the mean square (D-4)."""
    return num.bf(norm_weight_first(z, weight, eps, num.bf))
