"""The DFlash2 draft's weights from and to a Hugging Face folder (specification section 7.4).

15 BF16 tensors per layer and 6 others, all with or all without the prefix `model.`; embedding and head are the
target's. An optional `mask_embedding.pt` replaces the mask token's embedding row.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sgl_muse_mega.checkpoint.shards import DEFAULT_SHARD_BYTES, CheckpointReader, TensorSpec, staged, write_shards
from sgl_muse_mega.checkpoint.weights import ConvWeights, DraftLayerWeights, DraftWeights
from sgl_muse_mega.config import DraftConfig
from sgl_muse_mega.errors import UserError

MASK_EMBEDDING = "mask_embedding.pt"
_IGNORED = re.compile(r".*\brotary_emb\.")
_CONVS = ("attention_conv", "mlp_conv")


def load_draft(directory: Path, config: DraftConfig) -> DraftWeights:
    """Reads all weights of the draft.

    Raises UserError when names, shapes or dtypes are not those of the configuration, or when `mask_embedding.pt` is
    unreadable, is for another mask token or has another width.
    """
    with CheckpointReader(directory) as reader:
        table = _table(config)
        prefix = "" if any(name in reader for name in table) else "model."
        reader.require({prefix + name: spec for name, spec in table.items()}, _IGNORED)

        def read(name: str) -> Tensor:
            return reader.read(prefix + name)

        layers = []
        for layer in range(config.num_hidden_layers):
            held: dict[str, Any] = {
                field: read(_layer_prefix(layer) + name) for field, (name, _) in _layer_table(config).items()
            }
            for conv in _CONVS:
                held[conv] = ConvWeights(*(read(_layer_prefix(layer) + name) for name in _conv_table(config, conv)))
            layers.append(DraftLayerWeights(**held))
        top = {field: read(name) for field, (name, _) in _top_table(config).items()}
    mask_embedding = _load_mask_embedding(directory / MASK_EMBEDDING, config)
    return DraftWeights(layers=tuple(layers), mask_embedding=mask_embedding, **top)


def save_draft(
    directory: Path, config: DraftConfig, weights: DraftWeights, *, max_shard_bytes: int = DEFAULT_SHARD_BYTES
) -> None:
    """Writes `config.json`, the weights and, where there is one, the mask embedding, replacing an existing draft.

    Nothing half-written stays behind. Raises ValueError when a tensor's shape or dtype is not that of the
    configuration, and UserError when the disk refuses.
    """
    with staged(directory) as folder:
        write_shards(folder, _tensors(config, weights), max_shard_bytes)
        if weights.mask_embedding is not None:
            row = weights.mask_embedding.detach().cpu().clone()
            torch.save({"embedding": row, "mask_token_id": config.mask_token_id}, folder / MASK_EMBEDDING)
        (folder / "config.json").write_text(json.dumps(config.to_hf(), indent=2) + "\n", encoding="utf-8")


def _layer_table(config: DraftConfig) -> dict[str, tuple[str, TensorSpec]]:
    """Fields of `DraftLayerWeights` apart from the convolutions: name below the layer and what it holds."""
    h, f, d = config.hidden_size, config.intermediate_size, config.head_dim
    a, c = config.num_attention_heads * d, config.num_key_value_heads * d
    shapes = {
        "input_layernorm": ("input_layernorm", (h,)),
        "q_proj": ("self_attn.q_proj", (a, h)),
        "k_proj": ("self_attn.k_proj", (c, h)),
        "v_proj": ("self_attn.v_proj", (c, h)),
        "o_proj": ("self_attn.o_proj", (h, a)),
        "q_norm": ("self_attn.q_norm", (d,)),
        "k_norm": ("self_attn.k_norm", (d,)),
        "post_attention_layernorm": ("post_attention_layernorm", (h,)),
        "gate_proj": ("mlp.gate_proj", (f, h)),
        "up_proj": ("mlp.up_proj", (f, h)),
        "down_proj": ("mlp.down_proj", (h, f)),
    }
    return {field: (f"{name}.weight", TensorSpec(shape)) for field, (name, shape) in shapes.items()}


def _conv_table(config: DraftConfig, conv: str) -> dict[str, TensorSpec]:
    """Names below the layer in the order of `ConvWeights`' fields."""
    h, taps, groups = config.hidden_size, config.conv_kernel_size, config.hidden_size // config.conv_group_size
    return {
        f"{conv}.base_kernel": TensorSpec((2, taps, h)),
        f"{conv}.kernel_projection.weight": TensorSpec((2 * taps * groups, h)),
    }


def _top_table(config: DraftConfig) -> dict[str, tuple[str, TensorSpec]]:
    """Fields of `DraftWeights` that are single tensors: name and what it holds."""
    h, codebook = config.hidden_size, TensorSpec((config.vocab_size, config.selector_rank))
    selector = "candidate_selector."
    return {
        "fc": ("fc.weight", TensorSpec((h, len(config.target_layer_ids) * h))),
        "hidden_norm": ("hidden_norm.weight", TensorSpec((h,))),
        "norm": ("norm.weight", TensorSpec((h,))),
        "predecessor_codebook": (selector + "predecessor_codebook", codebook),
        "successor_codebook": (selector + "successor_codebook", codebook),
        "hidden_projection": (selector + "hidden_projection.weight", TensorSpec((config.selector_rank, h))),
    }


def _table(config: DraftConfig) -> dict[str, TensorSpec]:
    """Every tensor of the checkpoint, without the optional prefix."""
    specs = dict(_top_table(config).values())
    for layer in range(config.num_hidden_layers):
        below = dict(_layer_table(config).values())
        for conv in _CONVS:
            below |= _conv_table(config, conv)
        specs |= {_layer_prefix(layer) + name: spec for name, spec in below.items()}
    return specs


def _tensors(config: DraftConfig, weights: DraftWeights) -> Iterator[tuple[str, Tensor]]:
    if len(weights.layers) != config.num_hidden_layers:
        raise ValueError(f"{len(weights.layers)} layers of weights, expected {config.num_hidden_layers}")
    held = {name: getattr(weights, field) for field, (name, _) in _top_table(config).items()}
    for layer, tensors in enumerate(weights.layers):
        prefix = _layer_prefix(layer)
        held |= {prefix + name: getattr(tensors, field) for field, (name, _) in _layer_table(config).items()}
        for conv in _CONVS:
            held[f"{prefix}{conv}.base_kernel"] = getattr(tensors, conv).base_kernel
            held[f"{prefix}{conv}.kernel_projection.weight"] = getattr(tensors, conv).kernel_projection
    for name, spec in _table(config).items():
        spec.check(name, held[name])
        yield name, held[name]


def _load_mask_embedding(path: Path, config: DraftConfig) -> Tensor | None:
    """The row for the mask token, bf16 [H], or None where the draft ships none."""
    if not path.is_file():
        return None
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged stream makes the unpickler raise nearly anything
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(f"{path} is damaged or holds more than tensors ({reason}); fetch it again.") from None
    if not isinstance(content, dict) or not isinstance(content.get("embedding"), Tensor):
        raise UserError(f"{path} has no tensor named embedding; expected the fields embedding and mask_token_id.")
    if content.get("mask_token_id") != config.mask_token_id:
        raise UserError(
            f"{path} is for mask_token_id {content.get('mask_token_id')}, but the draft's config.json says "
            f"{config.mask_token_id}; the files are of different drafts."
        )
    embedding: Tensor = content["embedding"]
    if embedding.numel() != config.hidden_size:
        raise UserError(
            f"{path} has an embedding of shape {list(embedding.shape)}, expected hidden_size = {config.hidden_size} "
            "values."
        )
    return embedding.reshape(-1).to(torch.bfloat16)


def _layer_prefix(layer: int) -> str:
    return f"layers.{layer}."
