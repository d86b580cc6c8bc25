"""The target's weights in the form the kernels read."""

from dataclasses import dataclass

import torch
from torch import Tensor

from sgl_muse_mega.checkpoint import marlin
from sgl_muse_mega.checkpoint.weights import LayerWeights, Nvfp4Experts, TargetWeights
from sgl_muse_mega.config import TargetConfig
from sgl_muse_mega.megakernel import word_order


@dataclass(frozen=True, slots=True)
class KernelLayer:
    """One layer; names are the launch parameters' (`protocol.PARAMETERS`)."""

    input_norm: Tensor  # [H] bf16
    qkv: Tensor  # [(2 heads + 2 kv_heads) 64, H] bf16: q | k | v | gate; q and k rows in adjacent-pair order
    o_proj: Tensor  # [H, heads 64] bf16
    attention_alpha: Tensor  # [H] f32
    attention_beta: Tensor
    pre_feedforward_norm: Tensor  # [H] bf16
    router: Tensor  # [E, H] f32
    router_bias: Tensor  # [E] f32
    pre_expert_proj: Tensor  # [M, H] bf16
    pre_expert_norm: Tensor  # [M] bf16
    gate_up: Tensor  # bf16 [E_local, 2 I, M], or Marlin words int32 [E_local, M / 16, 4 I]
    down: Tensor  # bf16 [E_local, M, I], or int32 [E_local, I / 16, 2 M]
    gate_up_block_scale: Tensor | None  # Marlin bytes [E_local, M / 16, 2 I]
    down_block_scale: Tensor | None  # [E_local, I / 16, M]
    gate_scale: Tensor | None  # [E_local] f32
    up_scale: Tensor | None
    down_scale: Tensor | None
    post_expert_norm: Tensor  # [M] bf16
    post_expert_proj: Tensor  # [H, M] bf16
    post_feedforward_norm: Tensor  # [H] bf16
    feedforward_alpha: Tensor  # [H] f32
    feedforward_beta: Tensor
    first_expert: int
    field_order: bool = False  # NVFP4 words are in field order instead of Marlin's (`word_order`)

    @property
    def nvfp4(self) -> bool:
        return self.gate_scale is not None


@dataclass(frozen=True, slots=True)
class KernelWeights:
    embedding: Tensor  # [V, H] bf16
    layers: tuple[KernelLayer, ...]
    final_norm: Tensor  # [H] bf16
    lm_head: Tensor  # [V, H] bf16


def adjacent_pairs(weight: Tensor, head_dim: int) -> Tensor:
    """Rows of q or k from rotate-half to adjacent-pair order (section 2.3): rows 2j, 2j+1 are old rows j, j + d/2."""
    heads, width = weight.shape[0] // head_dim, weight.shape[1]
    halves = weight.view(heads, 2, head_dim // 2, width)
    return halves.transpose(1, 2).reshape(weight.shape)


def residual_gate(gate: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """alpha and beta [H] f32 from the stored gate (section 2.2)."""
    u = gate.float() / temperature
    beta = torch.sigmoid(u)
    alpha = torch.sqrt(torch.clamp(torch.sigmoid(-u) * (1 + beta), min=1e-3))
    return alpha.contiguous(), beta.contiguous()


def rope_table(theta: float, positions: int, head_dim: int, device: torch.device) -> Tensor:
    """f32 [positions, head_dim]: cosines of p theta^(-2j / head_dim), then sines, angles in float32."""
    j = torch.arange(0, head_dim, 2, device=device, dtype=torch.float32)
    angle = torch.arange(positions, device=device, dtype=torch.float32)[:, None] * (1.0 / theta ** (j / head_dim))[None]
    return torch.cat((angle.cos(), angle.sin()), dim=-1).contiguous()


def prepare_layer(config: TargetConfig, layer: LayerWeights, *, field_order: bool = False) -> KernelLayer:
    """Copies one layer into kernel order, on the device it is on.

    field_order: put the words of NVFP4 experts into field order.
    """
    d, temperature = config.head_dim, config.residual_gate_temperature
    qkv = torch.cat(
        (adjacent_pairs(layer.q_proj, d), adjacent_pairs(layer.k_proj, d), layer.v_proj, layer.gate_proj)
    ).contiguous()
    attention = residual_gate(layer.post_attention_residual_gate, temperature)
    feedforward = residual_gate(layer.post_feedforward_residual_gate, temperature)
    gate_up, gate_up_scales, gate_up_globals = _experts(layer.gate_up_proj)
    down, down_scales, down_globals = _experts(layer.down_proj)
    field_order = field_order and gate_up_scales is not None
    if field_order:
        word_order.to_field_order(gate_up)
        word_order.to_field_order(down)
    return KernelLayer(
        input_norm=layer.input_layernorm,
        qkv=qkv,
        o_proj=layer.o_proj,
        attention_alpha=attention[0],
        attention_beta=attention[1],
        pre_feedforward_norm=layer.pre_feedforward_layernorm,
        router=layer.router,
        router_bias=layer.router_bias,
        pre_expert_proj=layer.pre_expert_proj,
        pre_expert_norm=layer.pre_expert_norm,
        gate_up=gate_up,
        down=down,
        gate_up_block_scale=gate_up_scales,
        down_block_scale=down_scales,
        gate_scale=gate_up_globals[0] if gate_up_globals else None,
        up_scale=gate_up_globals[1] if gate_up_globals else None,
        down_scale=down_globals[0] if down_globals else None,
        post_expert_norm=layer.post_expert_norm,
        post_expert_proj=layer.post_expert_proj,
        post_feedforward_norm=layer.post_feedforward_layernorm,
        feedforward_alpha=feedforward[0],
        feedforward_beta=feedforward[1],
        first_expert=layer.first_expert,
        field_order=field_order,
    )


def prepare(config: TargetConfig, weights: TargetWeights) -> KernelWeights:
    """The whole target in kernel order."""
    return KernelWeights(
        embedding=weights.embed_tokens,
        layers=tuple(prepare_layer(config, layer) for layer in weights.layers),
        final_norm=weights.norm,
        lm_head=weights.lm_head,
    )


def _experts(stored: Tensor | Nvfp4Experts) -> tuple[Tensor, Tensor | None, list[Tensor] | None]:
    """Matrix, block scales and the global scale of each part; BF16 experts are used as they are."""
    if isinstance(stored, Tensor):
        return stored, None, None
    globals_ = [part.clone() for part in stored.scale_2.float().unbind(dim=1)]
    return marlin.pack_weight(stored.codes), marlin.pack_scales(stored.block_scale), globals_
