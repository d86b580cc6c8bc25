"""Hugging Face transformers' plain DFlash draft on DFlash2 weights whose DFlash2 parts are switched off."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import MuseGlimmerAssistantConfig, MuseGlimmerAssistantModel

from sgl_muse_mega.checkpoint.weights import ConvWeights, DraftLayerWeights, DraftWeights
from sgl_muse_mega.config import DraftConfig


def plain(weights: DraftWeights) -> DraftWeights:
    """Identity convolutions and a selector that adds nothing: a plain DFlash draft (self-checks 10 and 11)."""

    def identity(conv: ConvWeights) -> ConvWeights:
        base = torch.zeros_like(conv.base_kernel)
        base[:, 0] = 1
        return ConvWeights(base, torch.zeros_like(conv.kernel_projection))

    layers = tuple(
        replace(layer, attention_conv=identity(layer.attention_conv), mlp_conv=identity(layer.mlp_conv))
        for layer in weights.layers
    )
    return replace(weights, layers=layers, hidden_projection=torch.zeros_like(weights.hidden_projection))


def build(config: DraftConfig, weights: DraftWeights, dtype: torch.dtype, window: int) -> Any:
    """window: of transformers' config; its draft sees keys up to and including that distance (D-38)."""
    theirs = MuseGlimmerAssistantConfig(
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.num_hidden_layers,
        num_attention_heads=config.num_attention_heads,
        num_key_value_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        rms_norm_eps=config.rms_norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
        max_position_embeddings=config.max_position_embeddings,
        sliding_window=window,
        layer_types=list(config.layer_types),
        block_size=config.block_size,
        mask_token_id=config.mask_token_id,
        target_layer_ids=list(config.target_layer_ids),
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
        attn_implementation="eager",
    )
    model = MuseGlimmerAssistantModel(theirs).to(dtype).eval()
    model.load_state_dict({name: value.to(dtype) for name, value in _state(weights).items()}, strict=True)
    return model


def _state(weights: DraftWeights) -> dict[str, Tensor]:
    state = {
        "encoder.fc.weight": weights.fc,
        "encoder.output_norm_enc.weight": weights.hidden_norm,
        "norm.weight": weights.norm,
    }
    for i, layer in enumerate(weights.layers):
        state |= {f"layers.{i}.{name}.weight": value for name, value in _layer_state(layer).items()}
    return state


def _layer_state(layer: DraftLayerWeights) -> dict[str, Tensor]:
    return {
        "input_layernorm": layer.input_layernorm,
        "post_attention_layernorm": layer.post_attention_layernorm,
        "self_attn.q_proj": layer.q_proj,
        "self_attn.k_proj": layer.k_proj,
        "self_attn.v_proj": layer.v_proj,
        "self_attn.o_proj": layer.o_proj,
        "self_attn.q_norm": layer.q_norm,
        "self_attn.k_norm": layer.k_norm,
        "mlp.gate_proj": layer.gate_proj,
        "mlp.up_proj": layer.up_proj,
        "mlp.down_proj": layer.down_proj,
    }
