"""The draft's weights in the form the kernels read."""

from dataclasses import dataclass

import torch
from torch import Tensor

from sgl_muse_mega.checkpoint.weights import DraftLayerWeights, DraftWeights
from sgl_muse_mega.config import DraftConfig
from sgl_muse_mega.megakernel.draft_instance import LARGEST_CHUNK, DraftInstance, chunk_of
from sgl_muse_mega.megakernel.tensors import Spec, check
from sgl_muse_mega.megakernel.tiling import BLOCK_ROWS


@dataclass(frozen=True, slots=True)
class KernelDraftLayer:
    """One layer; names are the launch parameters' (`draft_protocol.PARAMETERS`). All bf16; matrices, here by the shape
    they stand for, are in fragment order."""

    input_norm: Tensor  # [H]
    attention_projection: Tensor  # [4 groups, H]
    attention_base: Tensor  # [2 sides, 2 taps, H]
    qkv: Tensor  # [(heads + 2 kv_heads) d, H]: q | k | v, rotate-half order
    query_norm: Tensor  # [d]
    key_norm: Tensor  # [d]
    output: Tensor  # [H, heads d]
    post_attention_norm: Tensor  # [H]
    mlp_projection: Tensor
    mlp_base: Tensor
    gate_up: Tensor  # [2 F, H]: gate | up
    down: Tensor  # [H, F]


@dataclass(frozen=True, slots=True)
class KernelDraft:
    """What one rank holds: the selector and what is [H] whole, its share of the rest (`checkpoint.draft_share`)."""

    layers: tuple[KernelDraftLayer, ...]
    fusion: Tensor  # [H, taps H], fragment order; of several ranks as many output rows each
    hidden_norm: Tensor  # [H]
    norm: Tensor  # [H]
    predecessors: Tensor  # [V, rank]
    successors: Tensor  # [V, rank]
    hidden_projection: Tensor  # [rank, H], fragment order
    mask_embedding: Tensor  # [H]
    embedding: Tensor  # [V, H], the target's
    lm_head: Tensor  # [V, H], the target's in fragment order


def fragment_order(weight: Tensor) -> Tensor:
    """A matrix [N, K] as csrc/draft/product.cuh reads it: [blocks of 64 rows, chunks, 64 chunk], N padded with zeros.

    Within a chunk: m16 tile, step of 32 inputs, half (rows g, rows g + 8), lane 4 g + t, inputs 8 t .. 8 t + 7.
    """
    rows, k = weight.shape
    chunk = chunk_of(k, LARGEST_CHUNK)
    padded = torch.nn.functional.pad(weight, (0, 0, 0, -rows % BLOCK_ROWS))
    parts = padded.view(-1, 4, 2, 8, k // chunk, chunk // 32, 4, 8)  # block, tile, half, g, chunk, step, t, input
    ordered = parts.permute(0, 4, 1, 5, 2, 3, 6, 7)
    return ordered.reshape(len(padded) // BLOCK_ROWS, k // chunk, BLOCK_ROWS * chunk).contiguous()


def prepare_draft(
    config: DraftConfig, weights: DraftWeights, embedding: Tensor, lm_head: Tensor, mask: Tensor | None = None
) -> KernelDraft:
    """Copies the matrices into fragment order, the target's head among them; vectors are used where they are.

    mask: the target's embedding of the mask token [H], where `embedding` is a rank's part that may not hold it.
    """
    mask = mask if weights.mask_embedding is None else weights.mask_embedding
    return KernelDraft(
        layers=tuple(_prepare_layer(layer) for layer in weights.layers),
        fusion=fragment_order(weights.fc),
        hidden_norm=weights.hidden_norm,
        norm=weights.norm,
        predecessors=weights.predecessor_codebook,
        successors=weights.successor_codebook,
        hidden_projection=fragment_order(weights.hidden_projection),
        mask_embedding=(embedding[config.mask_token_id] if mask is None else mask).clone(),
        embedding=embedding,
        lm_head=fragment_order(lm_head),
    )


def _prepare_layer(layer: DraftLayerWeights) -> KernelDraftLayer:
    return KernelDraftLayer(
        input_norm=layer.input_layernorm,
        attention_projection=fragment_order(layer.attention_conv.kernel_projection),
        attention_base=layer.attention_conv.base_kernel,
        qkv=fragment_order(torch.cat((layer.q_proj, layer.k_proj, layer.v_proj))),
        query_norm=layer.q_norm,
        key_norm=layer.k_norm,
        output=fragment_order(layer.o_proj),
        post_attention_norm=layer.post_attention_layernorm,
        mlp_projection=fragment_order(layer.mlp_conv.kernel_projection),
        mlp_base=layer.mlp_conv.base_kernel,
        gate_up=fragment_order(torch.cat((layer.gate_proj, layer.up_proj))),
        down=fragment_order(layer.down_proj),
    )


def check_draft(instance: DraftInstance, weights: KernelDraft, device: torch.device) -> None:
    """Raises UserError unless every tensor is what the kernels of this instance read."""
    i = instance
    h, d, f, rank, vocab = i.hidden, i.head_dim, i.inter, i.rank, i.vocab
    width, kv, ids = i.heads * d, i.kv_heads * d, vocab * i.ranks
    projection, base = _packed(4 * (h // i.conv_group), h), (2, 2, h)
    layer_shapes: dict[str, tuple[int, ...]] = {
        "input_norm": (h,), "attention_projection": projection, "attention_base": base,
        "qkv": _packed(width + 2 * kv, h), "query_norm": (d,), "key_norm": (d,), "output": _packed(h, width),
        "post_attention_norm": (h,), "mlp_projection": projection, "mlp_base": base, "gate_up": _packed(2 * f, h),
        "down": _packed(h, f),
    }  # fmt: skip
    shapes: dict[str, tuple[int, ...]] = {
        "fusion": _packed(h // i.ranks, i.taps * h), "hidden_norm": (h,), "norm": (h,),
        "predecessors": (ids, rank), "successors": (ids, rank), "hidden_projection": _packed(rank, h),
        "mask_embedding": (h,), "embedding": (vocab, h), "lm_head": _packed(vocab, h),
    }  # fmt: skip
    pairs = [(Spec(name, shape, torch.bfloat16), getattr(weights, name)) for name, shape in shapes.items()]
    for index, layer in enumerate(weights.layers):
        pairs += [
            (Spec(f"layers.{index}.{name}", shape, torch.bfloat16), getattr(layer, name))
            for name, shape in layer_shapes.items()
        ]
    check(pairs, device, "the draft's weights")


def _packed(rows: int, k: int) -> tuple[int, ...]:
    """Shape of `fragment_order` of [rows, k]."""
    chunk = chunk_of(k, LARGEST_CHUNK)
    return (-(-rows // BLOCK_ROWS), k // chunk, BLOCK_ROWS * chunk)
