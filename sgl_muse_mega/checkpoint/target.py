"""The target's weights from and to a Hugging Face folder (specification sections 3.1 and 3.2), whole or one rank's
share.

Rank r of R holds contiguous blocks: query heads [r A/R, ..) as rows of q_proj and gate_proj and as columns of o_proj,
the KV heads those queries use as rows of k_proj and v_proj (a KV head is held by several ranks where R exceeds their
number), experts [r E/R, ..), output rows [r M/R, ..) of pre_expert_proj and [r H/R, ..) of post_expert_proj, and
vocabulary rows [r V/R, ..) of embedding and head. Everything else is held whole.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sgl_muse_mega.checkpoint import nvfp4
from sgl_muse_mega.checkpoint.shards import DEFAULT_SHARD_BYTES, CheckpointReader, TensorSpec, staged, write_shards
from sgl_muse_mega.checkpoint.weights import LayerWeights, Nvfp4Experts, TargetWeights
from sgl_muse_mega.config import TargetConfig
from sgl_muse_mega.errors import UserError

_TEXT = "model.language_model."
_IGNORED = re.compile(
    r"model\.(vision_tower|vision_adapter|vision_projection|audio_tower)\."
    r"|.*\.rotary_emb\.|.*num_tokens_per_expert$|.*\.mlp\.norm_weight$|.*\bembed_norm\.weight$"
    r"|.*\.self_attn\.[qkv]_scale$"
)
_EXPERT_FIELDS = ("gate_up_proj", "down_proj")


@dataclass(frozen=True, slots=True)
class _Entry:
    """One stored tensor: its name, what the checkpoint must hold under it, and the part of it that a rank holds."""

    name: str
    spec: TensorSpec
    part: tuple[slice, ...] = ()


@dataclass(frozen=True, slots=True)
class _Share:
    query_rows: slice
    kv_rows: slice
    experts: slice
    vocab: slice
    expert_rows: slice  # of pre_expert_proj
    branch_rows: slice  # of post_expert_proj


def load_target(directory: Path, config: TargetConfig, *, rank: int = 0, ranks: int = 1) -> TargetWeights:
    """Reads the share of rank `rank` of `ranks`; only that share is read from disk.

    Routed experts are NVFP4 where `config.nvfp4_experts(layer)` says so and BF16 elsewhere; BF16 experts may be stored
    one by one instead of stacked. Raises UserError when the model does not divide among the ranks, when names, shapes
    or dtypes are not those of the configuration, when a layer's stored form contradicts the quantisation config, or
    when NVFP4 scales are NaN, infinite or negative.
    """
    share = _share(config, rank, ranks)
    with CheckpointReader(directory) as reader:
        one_by_one = [_one_by_one(reader, config, layer) for layer in range(config.num_hidden_layers)]
        reader.require(_specs(config, one_by_one), _IGNORED)
        layers = []
        for layer, separate in enumerate(one_by_one):
            held: dict[str, Any] = {
                field: reader.read(entry.name, entry.part)
                for field, entry in _layer_table(config, share, layer).items()
            }
            for field in _EXPERT_FIELDS:
                if separate:
                    held[field] = _read_separate_experts(reader, config, share, layer, field)
                else:
                    held[field] = _read_experts(reader, _expert_table(config, share, layer, field))
            layers.append(LayerWeights(**held, first_expert=share.experts.start))
        top: dict[str, Any] = {
            field: reader.read(entry.name, entry.part) for field, entry in _top_table(config, share).items()
        }
    return TargetWeights(layers=tuple(layers), **top)


def share_layer(config: TargetConfig, layer: int, weights: LayerWeights, *, rank: int, ranks: int) -> LayerWeights:
    """Rank `rank`'s share of a whole layer, as `load_target` would read it.

    Raises UserError when the model does not divide among the ranks.
    """
    share = _share(config, rank, ranks)
    held: dict[str, Any] = {
        field: _own(getattr(weights, field), entry) for field, entry in _layer_table(config, share, layer).items()
    }
    for field in _EXPERT_FIELDS:
        stored = getattr(weights, field)
        parts = {
            name: _own(getattr(stored, name) if name else stored, entry)
            for name, entry in _expert_table(config, share, layer, field).items()
        }
        held[field] = parts[""] if "" in parts else Nvfp4Experts(**parts)
    return LayerWeights(**held, first_expert=share.experts.start)


def share_target(config: TargetConfig, weights: TargetWeights, *, rank: int, ranks: int) -> TargetWeights:
    """Rank `rank`'s share of a whole target, as `load_target` would read it.

    Raises UserError when the model does not divide among the ranks.
    """
    share = _share(config, rank, ranks)
    top = {field: _own(getattr(weights, field), entry) for field, entry in _top_table(config, share).items()}
    layers = tuple(share_layer(config, i, held, rank=rank, ranks=ranks) for i, held in enumerate(weights.layers))
    return TargetWeights(layers=layers, **top)


def _own(whole: Tensor, entry: _Entry) -> Tensor:
    """The part of a tensor that a rank holds, in memory of its own (a slice may not be aligned as kernels need it)."""
    return whole[entry.part].clone(memory_format=torch.contiguous_format) if entry.part else whole


def save_target(
    directory: Path, config: TargetConfig, weights: TargetWeights, *, max_shard_bytes: int = DEFAULT_SHARD_BYTES
) -> None:
    """Writes `config.json` and all weights (not one rank's share), replacing a checkpoint that is already there.

    Nothing half-written stays behind. Raises ValueError when a tensor's shape, dtype or form is not that of the
    configuration, and UserError when the disk refuses.
    """
    with staged(directory) as folder:
        write_shards(folder, _tensors(config, weights), max_shard_bytes)
        (folder / "config.json").write_text(json.dumps(config.to_hf(), indent=2) + "\n", encoding="utf-8")


def _share(config: TargetConfig, rank: int, ranks: int) -> _Share:
    if not 0 <= rank < ranks:
        raise ValueError(f"rank {rank} is not one of {ranks} ranks")
    sizes = {
        "num_attention_heads": config.num_attention_heads,
        "num_local_experts": config.num_local_experts,
        "vocab_size": config.vocab_size,
        "moe_hidden_size": config.moe_hidden_size,
        "hidden_size": config.hidden_size,
    }
    problems = [f"{name} = {size}" for name, size in sizes.items() if size % ranks]
    kv_heads = config.num_key_value_heads
    if kv_heads % ranks and ranks % kv_heads:
        problems.append(f"num_key_value_heads = {kv_heads}")
    if problems:
        raise UserError(f"The model does not divide among {ranks} ranks: {', '.join(problems)}; use another number.")

    def block(size: int) -> slice:
        return slice(rank * size // ranks, (rank + 1) * size // ranks)

    heads, first_kv, d = block(config.num_attention_heads), rank * kv_heads // ranks, config.head_dim
    return _Share(
        query_rows=slice(heads.start * d, heads.stop * d),
        kv_rows=slice(first_kv * d, (first_kv + max(1, kv_heads // ranks)) * d),
        experts=block(config.num_local_experts),
        vocab=block(config.vocab_size),
        expert_rows=block(config.moe_hidden_size),
        branch_rows=block(config.hidden_size),
    )


def _top_table(config: TargetConfig, share: _Share) -> dict[str, _Entry]:
    """Fields of `TargetWeights` apart from the layers."""
    rows = TensorSpec((config.vocab_size, config.hidden_size))
    return {
        "embed_tokens": _Entry(_TEXT + "embed_tokens.weight", rows, (share.vocab,)),
        "norm": _Entry(_TEXT + "norm.weight", TensorSpec((config.hidden_size,))),
        "lm_head": _Entry("lm_head.weight", rows, (share.vocab,)),
    }


def _layer_table(config: TargetConfig, share: _Share, layer: int) -> dict[str, _Entry]:
    """Fields of `LayerWeights` apart from the routed experts."""
    h, m, e = config.hidden_size, config.moe_hidden_size, config.num_local_experts
    a, c = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim

    def entry(name: str, *shape: int, dtype: torch.dtype = torch.bfloat16, part: tuple[slice, ...] = ()) -> _Entry:
        return _Entry(_layer_prefix(layer) + name, TensorSpec(shape, dtype), part)

    queries, kv, columns = (share.query_rows,), (share.kv_rows,), (slice(None), share.query_rows)
    return {
        "input_layernorm": entry("input_layernorm.weight", h),
        "q_proj": entry("self_attn.q_proj.weight", a, h, part=queries),
        "k_proj": entry("self_attn.k_proj.weight", c, h, part=kv),
        "v_proj": entry("self_attn.v_proj.weight", c, h, part=kv),
        "gate_proj": entry("self_attn.gate_proj.weight", a, h, part=queries),
        "o_proj": entry("self_attn.o_proj.weight", h, a, part=columns),
        "post_attention_residual_gate": entry("post_attention_residual_gate.gate", h, dtype=torch.float32),
        "pre_feedforward_layernorm": entry("pre_feedforward_layernorm.weight", h),
        "router": entry("mlp.gate.weight", e, h, dtype=torch.float32),
        "router_bias": entry("mlp.gate.e_score_correction_bias", e, dtype=torch.float32),
        "pre_expert_proj": entry("mlp.pre_expert_proj.weight", m, h, part=(share.expert_rows,)),
        "pre_expert_norm": entry("mlp.pre_expert_norm.weight", m),
        "post_expert_norm": entry("mlp.experts.post_expert_norm.weight", m),
        "post_expert_proj": entry("mlp.post_expert_proj.weight", h, m, part=(share.branch_rows,)),
        "post_feedforward_layernorm": entry("post_feedforward_layernorm.weight", h),
        "post_feedforward_residual_gate": entry("post_feedforward_residual_gate.gate", h, dtype=torch.float32),
    }


def _expert_table(config: TargetConfig, share: _Share, layer: int, field: str) -> dict[str, _Entry]:
    """Stacked experts: one tensor under "" (BF16), or the fields of `Nvfp4Experts`."""
    e, (rows, columns) = config.num_local_experts, _expert_shape(config, field)
    name, part = f"{_layer_prefix(layer)}mlp.experts.{field}", (share.experts,)
    if not config.nvfp4_experts(layer):
        return {"": _Entry(name, TensorSpec((e, rows, columns)), part)}
    scale_2 = TensorSpec((e, 2) if field == "gate_up_proj" else (e,), torch.float32)
    blocks = TensorSpec((e, rows, columns // nvfp4.GROUP), torch.float8_e4m3fn)
    return {
        "codes": _Entry(name, TensorSpec((e, rows, columns // 2), torch.uint8), part),
        "block_scale": _Entry(name + "_weight_scale", blocks, part),
        "scale_2": _Entry(name + "_weight_scale_2", scale_2, part),
        "input_scale": _Entry(name + "_input_scale", scale_2, part),
    }


def _separate_experts(config: TargetConfig, layer: int, field: str, expert: int) -> dict[str, TensorSpec]:
    """The matrices that, one below the other, are one expert's `field` where experts are stored one by one."""
    rows, columns = _expert_shape(config, field)
    names = ("gate_proj", "up_proj") if field == "gate_up_proj" else ("down_proj",)
    spec = TensorSpec((rows // len(names), columns))
    return {f"{_layer_prefix(layer)}mlp.experts.{expert}.{name}.weight": spec for name in names}


def _specs(config: TargetConfig, one_by_one: list[bool]) -> dict[str, TensorSpec]:
    """Every tensor of the checkpoint."""
    whole = _share(config, 0, 1)
    specs = {entry.name: entry.spec for entry in _top_table(config, whole).values()}
    for layer, separate in enumerate(one_by_one):
        specs |= {entry.name: entry.spec for entry in _layer_table(config, whole, layer).values()}
        for field in _EXPERT_FIELDS:
            if separate:
                for expert in range(config.num_local_experts):
                    specs |= _separate_experts(config, layer, field, expert)
            else:
                specs |= {entry.name: entry.spec for entry in _expert_table(config, whole, layer, field).values()}
    return specs


def _one_by_one(reader: CheckpointReader, config: TargetConfig, layer: int) -> bool:
    """Whether the layer's experts are stored one by one; refuses a form that contradicts the quantisation config."""
    base = f"{_layer_prefix(layer)}mlp.experts."
    stacked, separate = base + "gate_up_proj", base + "0.gate_proj.weight"
    name = stacked if stacked in reader else separate
    if name in reader:
        stored = reader.stored_dtype(name)
        nvfp4_expected = config.nvfp4_experts(layer)
        if stored == ("BF16" if nvfp4_expected else "U8") or (name == separate and nvfp4_expected):
            form = "NVFP4" if nvfp4_expected else "BF16"
            raise UserError(
                f"Layer {layer} has {form} experts by the quantisation config, but {name} is stored as {stored}; "
                "the configuration and the weights are of different exports."
            )
    return name == separate and name in reader


def _read_experts(reader: CheckpointReader, table: dict[str, _Entry]) -> Tensor | Nvfp4Experts:
    held = {field: reader.read(entry.name, entry.part) for field, entry in table.items()}
    if "" in held:
        return held[""]
    nvfp4.check_block_scale(held["block_scale"], table["block_scale"].name)
    nvfp4.check_scale_2(held["scale_2"], table["scale_2"].name)
    experts = held["codes"].shape[0]
    held["scale_2"] = held["scale_2"].reshape(experts, -1)
    held["input_scale"] = held["input_scale"].reshape(experts, -1)
    return Nvfp4Experts(**held)


def _read_separate_experts(
    reader: CheckpointReader, config: TargetConfig, share: _Share, layer: int, field: str
) -> Tensor:
    experts = range(share.experts.start, share.experts.stop)
    stack = torch.empty((len(experts), *_expert_shape(config, field)), dtype=torch.bfloat16)
    for held, expert in zip(stack, experts, strict=True):
        torch.cat([reader.read(name) for name in _separate_experts(config, layer, field, expert)], out=held)
    return stack


def _tensors(config: TargetConfig, weights: TargetWeights) -> Iterator[tuple[str, Tensor]]:
    """Every stored tensor of whole weights in a fixed order; raises ValueError where one does not fit."""
    whole = _share(config, 0, 1)
    if len(weights.layers) != config.num_hidden_layers:
        raise ValueError(f"{len(weights.layers)} layers of weights, expected {config.num_hidden_layers}")
    top = _top_table(config, whole)
    yield _fitting(top["embed_tokens"], weights.embed_tokens)
    for layer, held in enumerate(weights.layers):
        for field, entry in _layer_table(config, whole, layer).items():
            yield _fitting(entry, getattr(held, field))
        for field in _EXPERT_FIELDS:
            experts = getattr(held, field)
            if isinstance(experts, Nvfp4Experts) != config.nvfp4_experts(layer):
                raise ValueError(f"{field} of layer {layer} is not in the form (NVFP4 or BF16) of the configuration")
            for part, entry in _expert_table(config, whole, layer, field).items():
                tensor = getattr(experts, part) if part else experts
                scalar_per_expert = part in ("scale_2", "input_scale")
                yield _fitting(entry, tensor.reshape(entry.spec.shape) if scalar_per_expert else tensor)
    yield _fitting(top["norm"], weights.norm)
    yield _fitting(top["lm_head"], weights.lm_head)


def _fitting(entry: _Entry, tensor: Tensor) -> tuple[str, Tensor]:
    entry.spec.check(entry.name, tensor)
    return entry.name, tensor


def _expert_shape(config: TargetConfig, field: str) -> tuple[int, int]:
    """Rows and columns of one expert's matrix; gate_up_proj is gate above up."""
    m, i = config.moe_hidden_size, config.moe_intermediate_size
    return (2 * i, m) if field == "gate_up_proj" else (m, i)


def _layer_prefix(layer: int) -> str:
    return f"{_TEXT}layers.{layer}."
