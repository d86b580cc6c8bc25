"""SGLang's DFlash2 draft on a CPU: its modules and its loader, with the attention product computed here.

DFLASH refuses the CPU, so its worker cannot run; what stands in for it is the order of calls of section 7.1 and 7.2 of
the model specification and an attention backend that applies the layer's own window and attention type.
"""

from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from models import DRAFT
from safetensors import safe_open
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.model_executor import forward_context
from sglang.srt.models.dflash import DFlash2DraftModel
from torch import Tensor
from transformers import Qwen3Config

from sgl_muse_mega.config import DraftConfig


def load(directory: Path, target: Any, config: DraftConfig = DRAFT) -> Any:
    """The draft in `directory`, with the head of `target`, a loaded SGLang model."""
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        draft = DFlash2DraftModel(Qwen3Config(**config.to_hf()))
    finally:
        torch.set_default_dtype(default)
    with safe_open(directory / "model.safetensors", "pt") as stored:
        draft.load_weights((name, stored.get_tensor(name)) for name in stored.keys())  # noqa: SIM118
    draft.lm_head = target.lm_head
    return draft


@dataclass
class Context:
    """K and V of the committed rows [n, kv_heads, d] per layer, which start at position 0."""

    c: Tensor
    keys: list[Tensor] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)


def context(draft: Any, taps: Tensor) -> Context:
    """taps bf16 [taps, T, H], as the worker stacks them."""
    with torch.inference_mode():
        made = Context(draft.project_target_hidden(taps.transpose(0, 1).flatten(1)))
        positions = torch.arange(taps.shape[1])
        for layer in draft.layers:
            attention = layer.self_attn
            k, v = attention.kv_proj_only(made.c)
            k = attention.apply_k_rope(positions, attention.apply_k_norm(k))
            made.keys.append(k.unflatten(-1, (-1, attention.head_dim)))
            made.values.append(v.unflatten(-1, (-1, attention.head_dim)))
    return made


class _Attention:
    """Softmax attention of the block's rows over context and block; q, k, v as SGLang's modules hand them over."""

    def __init__(self, past: Context, positions: Tensor) -> None:
        self.past = past
        self.positions = positions

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, layer: Any, _batch: Any, _save: bool = True, **_kwargs: Any
    ) -> Tensor:
        d, window = DRAFT.head_dim, layer.sliding_window_size
        keys = torch.cat((self.past.keys[layer.layer_id], k.reshape(len(k), -1, d))).float()
        values = torch.cat((self.past.values[layer.layer_id], v.reshape(len(v), -1, d))).float()
        key_positions = torch.cat((torch.arange(len(keys) - len(k)), self.positions))
        distance = self.positions[:, None] - key_positions[None, :]
        mask = distance.abs() <= window if layer.attn_type == AttentionType.ENCODER_ONLY else distance >= 0
        mask &= distance <= window
        group = layer.tp_q_head_num // layer.tp_k_head_num
        keys, values = keys.repeat_interleave(group, dim=1), values.repeat_interleave(group, dim=1)
        scores = torch.einsum("thd,nhd->htn", q.reshape(len(q), -1, d).float(), keys) * layer.scaling
        weights = scores.masked_fill(~mask, float("-inf")).softmax(dim=-1)
        return torch.einsum("htn,nhd->thd", weights, values).flatten(1).to(q.dtype)


@dataclass
class Block:
    hidden: Tensor  # [W, H]: after the final norm
    convolutions: list[tuple[Any, Tensor, Tensor, Tensor, Tensor]]  # module, x, xc, y, yc


def block(draft: Any, embeddings: Tensor, past: Context) -> Block:
    """One block of rows whose embeddings are [W, H], right after the context."""
    start = len(past.c)
    positions = torch.arange(start, start + len(embeddings))
    watched: list[tuple[Any, Tensor, Tensor, Tensor, Tensor]] = []
    originals = {}
    for module in (m for layer in draft.layers for m in (layer.attention_conv, layer.mlp_conv)):
        originals[module] = (module.prepare, module.finish)

        def prepare(x: Tensor, module: Any = module) -> Any:
            xc, coefficients = originals[module][0](x)
            watched.append((module, x, xc, x, x))
            return xc, coefficients

        def finish(y: Tensor, coefficients: Tensor, module: Any = module) -> Tensor:
            yc = originals[module][1](y, coefficients)
            watched[-1] = (*watched[-1][:3], y, yc)
            return yc

        module.prepare, module.finish = prepare, finish
    batch = SimpleNamespace(forward_mode=SimpleNamespace(is_extend=lambda: False), num_token_non_padded_cpu=None)
    backend = _Attention(past, positions)
    previous = forward_context.set_forward_context(forward_context.ForwardContext(attn_backend=backend))
    try:
        with torch.inference_mode():
            output = draft(None, positions, batch, input_embeds=embeddings)
    finally:
        forward_context.set_forward_context(previous)
        for module in originals:
            del module.prepare, module.finish
    return Block(output.hidden_states, watched)
