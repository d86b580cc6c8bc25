"""Small checkpoints for the tests of reading and writing them, and what those tests compare."""

import dataclasses
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from sgl_muse_mega.checkpoint import target
from sgl_muse_mega.checkpoint.random_weights import random_target
from sgl_muse_mega.checkpoint.shards import SINGLE
from sgl_muse_mega.checkpoint.weights import ConvWeights, Nvfp4Experts
from sgl_muse_mega.config import DraftConfig, TargetConfig
from sgl_muse_mega.errors import UserError

LAYERS = "model.language_model.layers."
EXPERTS = LAYERS + "1.mlp.experts."


def target_config(quantised: bool = True, **changes) -> TargetConfig:
    """Three small layers; of a quantised one only layer 1 has NVFP4 experts."""
    fields = {
        "vocab_size": 64,
        "hidden_size": 32,
        "num_hidden_layers": 3,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5,
        "post_norm_eps": 1e-8,
        "sliding_window": 16,
        "moe_hidden_size": 32,
        "moe_intermediate_size": 48,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "routed_scaling_factor": 1.0,
        "qk_scale_factor": 5.4,
        "output_multiplier": 0.2,
        "final_logit_softcapping": 20.0,
        "residual_gate_temperature": 0.3,
        "eos_token_ids": [1],
    }
    exclude = ("*layers.0.mlp.experts*", "*layers.2.mlp.experts*", "*self_attn*", "lm_head")
    quantization = {"quant_algo": "NVFP4", "group_size": 16, "exclude": exclude} if quantised else None
    return TargetConfig.model_validate({**fields, "quantization": quantization, **changes})


def draft_config(**changes) -> DraftConfig:
    fields = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "sliding_window": 16,
        "layer_types": ["sliding_attention"] * 2,
        "is_causal": False,
        "block_size": 8,
        "conv_kernel_size": 2,
        "conv_group_size": 16,
        "selector_rank": 8,
        "selector_top_k": 4,
        "target_layer_ids": [0, 1],
        "mask_token_id": 63,
        "output_multiplier": 0.2,
        "final_logit_softcapping": 20.0,
        "num_target_layers": 3,
    }
    return DraftConfig.model_validate({**fields, **changes})


def tensors(container, prefix: str = "") -> dict[str, torch.Tensor]:
    """Every tensor of a weight container by its path."""
    found = {}
    for field in dataclasses.fields(container):
        value = getattr(container, field.name)
        if isinstance(value, torch.Tensor):
            found[prefix + field.name] = value
        elif isinstance(value, Nvfp4Experts | ConvWeights):
            found |= tensors(value, f"{prefix}{field.name}.")
        elif isinstance(value, tuple):
            for i, layer in enumerate(value):
                found |= tensors(layer, f"{prefix}{field.name}.{i}.")
    return found


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal dtype, shape and bits."""
    a, b = a.contiguous(), b.contiguous()
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def assert_same(found, expected) -> None:
    found, expected = tensors(found), tensors(expected)
    assert found.keys() == expected.keys()
    assert [name for name in found if not same(found[name], expected[name])] == []


def saved_target(folder: Path, quantised: bool = True, **options) -> TargetConfig:
    config = target_config(quantised)
    target.save_target(folder, config, random_target(config, seed=1), **options)
    return config


def edit(folder: Path, change) -> None:
    """Rewrites the single file of a checkpoint after `change(tensors)`."""
    content = {name: tensor.clone() for name, tensor in load_file(folder / SINGLE).items()}
    change(content)
    (folder / SINGLE).unlink()  # the old file may still be mapped
    save_file(content, folder / SINGLE)


def refusal(action) -> str:
    with pytest.raises(UserError) as caught:
        action()
    text = str(caught.value)
    assert "\n" not in text
    assert len(text) < 700
    assert text.endswith(".")
    return text
