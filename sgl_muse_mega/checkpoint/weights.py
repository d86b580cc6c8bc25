"""Weights of the target and of the draft as plain containers.

Shapes use the names of the configuration: H hidden_size, A num_attention_heads * head_dim, C num_key_value_heads *
head_dim, E num_local_experts, M moe_hidden_size, I moe_intermediate_size, V vocab_size. A container that holds one
rank's share has the local sizes instead; which rows those are is said in `checkpoint.target`.
q and k rows stay in the checkpoint's rotate-half order (model specification, section 2.3).
"""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Nvfp4Experts:
    """One stacked expert matrix in ModelOpt's NVFP4 form (specification section 3.2); w = e2m1 * e4m3 * scale_2."""

    codes: Tensor  # uint8 [E, rows, columns / 2], element 2i of a row in the low nibble of byte i
    block_scale: Tensor  # float8_e4m3fn [E, rows, columns / 16]
    scale_2: Tensor  # float32 [E, parts]; the rows are divided evenly among the parts (2: gate and up; 1: down)
    input_scale: Tensor  # float32 [E, parts]; unused where activations stay 16 bit


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One decoder layer of the target; equation numbers are those of specification section 2.2."""

    input_layernorm: Tensor  # [H] bf16, zero-centred (A1)
    q_proj: Tensor  # [A, H] bf16
    k_proj: Tensor  # [C, H] bf16
    v_proj: Tensor  # [C, H] bf16
    gate_proj: Tensor  # [A, H] bf16, the output gate (A7)
    o_proj: Tensor  # [H, A] bf16
    post_attention_residual_gate: Tensor  # [H] float32 (A10)
    pre_feedforward_layernorm: Tensor  # [H] bf16, zero-centred (F1)
    router: Tensor  # [E_all, H] float32, never sharded (F2)
    router_bias: Tensor  # [E_all] float32, selection only (F4)
    pre_expert_proj: Tensor  # [M, H] bf16 (F6)
    pre_expert_norm: Tensor  # [M] bf16, zero-centred (F7)
    gate_up_proj: Tensor | Nvfp4Experts  # [E, 2 I, M], rows gate then up (F8)
    down_proj: Tensor | Nvfp4Experts  # [E, M, I] (F10)
    post_expert_norm: Tensor  # [M] bf16, zero-centred, weight first (F11)
    post_expert_proj: Tensor  # [H, M] bf16 (F14)
    post_feedforward_layernorm: Tensor  # [H] bf16, zero-centred, weight first (F15)
    post_feedforward_residual_gate: Tensor  # [H] float32 (F16)
    first_expert: int = 0  # global id of the first expert held


@dataclass(frozen=True, slots=True)
class TargetWeights:
    """The target; equation numbers are those of specification section 2.2."""

    embed_tokens: Tensor  # [V, H] bf16
    layers: tuple[LayerWeights, ...]
    norm: Tensor  # [H] bf16, absolute gamma (O1)
    lm_head: Tensor  # [V, H] bf16


@dataclass(frozen=True, slots=True)
class ConvWeights:
    """The two-tap in-block convolution round one sublayer of the draft (specification section 7.2)."""

    base_kernel: Tensor  # [2 sides, 2 taps, H] bf16
    kernel_projection: Tensor  # [2 sides * 2 taps * groups, H] bf16


@dataclass(frozen=True, slots=True)
class DraftLayerWeights:
    """One layer of the draft, bf16 (specification sections 7.2 and 7.4); F is the draft's intermediate_size."""

    input_layernorm: Tensor  # [H] bf16, plain gamma
    q_proj: Tensor  # [heads * head_dim, H]
    k_proj: Tensor  # [kv_heads * head_dim, H]
    v_proj: Tensor  # [kv_heads * head_dim, H]
    o_proj: Tensor  # [H, heads * head_dim]
    q_norm: Tensor  # [head_dim]
    k_norm: Tensor  # [head_dim]
    post_attention_layernorm: Tensor  # [H]
    gate_proj: Tensor  # [F, H]
    up_proj: Tensor  # [F, H]
    down_proj: Tensor  # [H, F]
    attention_conv: ConvWeights
    mlp_conv: ConvWeights


@dataclass(frozen=True, slots=True)
class DraftWeights:
    """The DFlash2 draft; embedding and head are the target's (specification section 7.4)."""

    layers: tuple[DraftLayerWeights, ...]
    fc: Tensor  # [H, taps * H]
    hidden_norm: Tensor  # [H]
    norm: Tensor  # [H]
    predecessor_codebook: Tensor  # [V, rank]
    successor_codebook: Tensor  # [V, rank]
    hidden_projection: Tensor  # [rank, H]
    mask_embedding: Tensor | None = None  # [H], replaces the mask token's embedding row when the draft ships one
