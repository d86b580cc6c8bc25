"""Differentiable DFlash2 draft: specification section 7, many blocks per sequence at once.

Parameters are float32 masters, rounded to bf16 in every forward; names and shapes are those of `DraftWeights`.
"""

from dataclasses import dataclass, fields

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sgl_muse_mega.checkpoint.weights import ConvWeights, DraftLayerWeights, DraftWeights
from sgl_muse_mega.config import DraftConfig
from training.layout import Layout
from training.model import Target, linear, rms, rotate


@dataclass(frozen=True, slots=True)
class Blocks:
    """A blocks of W rows per sequence, [B, A, W, ...]."""

    start: Tensor  # int64 [B, A], position of the anchor
    hidden: Tensor  # bf16 [B, A, W, H], h0

    @classmethod
    def of(cls, target: Target, config: DraftConfig, ids: Tensor, start: Tensor) -> "Blocks":
        """[anchor, mask, ...] at every start position, with the target's normed embedding (section 7.2, D-16)."""
        tokens = torch.full((*start.shape, config.block_size), config.mask_token_id, device=start.device)
        tokens[..., 0] = ids.gather(1, start)
        with torch.no_grad():
            return cls(start, target.embed(tokens))


class Convolution(nn.Module):
    """The two-tap in-block convolution round one sublayer; starts as the identity."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        width = config.hidden_size
        self.group = config.conv_group_size
        self.base_kernel = nn.Parameter(torch.tensor([1.0, 0.0])[None, :, None].repeat(2, 1, width))
        self.kernel_projection = nn.Parameter(torch.zeros(4 * width // self.group, width))

    def coefficients(self, x: Tensor) -> Tensor:
        """float32 [..., W, side, tap, H] from the normed sublayer input (B2)."""
        dynamic = linear(x, self.kernel_projection).unflatten(-1, (2, 2, -1)).float()
        return self.base_kernel.bfloat16().float() + dynamic.repeat_interleave(self.group, -1)

    @staticmethod
    def apply_side(x: Tensor, coefficients: Tensor, side: int) -> Tensor:
        """bf16 [..., W, H]: current row times tap 0 plus previous row of the block times tap 1, one rounding."""
        current = x.float()
        previous = F.pad(current, (0, 0, 1, 0))[..., :-1, :]
        taps = coefficients[..., side, :, :]
        return (taps[..., 0, :] * current + taps[..., 1, :] * previous).bfloat16()

    def weights(self) -> ConvWeights:
        return ConvWeights(*(w.detach().bfloat16().cpu() for w in (self.base_kernel, self.kernel_projection)))


class DraftLayer(nn.Module):
    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.config = config
        width, inner, d = config.hidden_size, config.intermediate_size, config.head_dim
        heads, kv = config.num_attention_heads * d, config.num_key_value_heads * d
        for name, rows, columns in (
            ("q_proj", heads, width),
            ("k_proj", kv, width),
            ("v_proj", kv, width),
            ("o_proj", width, heads),
            ("gate_proj", inner, width),
            ("up_proj", inner, width),
            ("down_proj", width, inner),
        ):
            setattr(self, name, nn.Parameter(torch.randn(rows, columns) * columns**-0.5))
        for name, size in (
            ("input_layernorm", width),
            ("post_attention_layernorm", width),
            ("q_norm", d),
            ("k_norm", d),
        ):
            setattr(self, name, nn.Parameter(torch.ones(size)))
        self.attention_conv = Convolution(config)
        self.mlp_conv = Convolution(config)

    def norm(self, x: Tensor, gamma: Tensor) -> Tensor:
        return (rms(x, self.config.rms_norm_eps) * gamma.bfloat16().float()).bfloat16()

    def keys(self, x: Tensor, position: Tensor) -> Tensor:
        """Normed and rotated keys, [N, kv_heads, d]."""
        k = self.norm(linear(x, self.k_proj).unflatten(-1, (-1, self.config.head_dim)), self.k_norm)
        return rotate(k, position, self.config.rope_theta)

    def values(self, x: Tensor) -> Tensor:
        return linear(x, self.v_proj).unflatten(-1, (-1, self.config.head_dim))

    def forward(self, h: Tensor, position: Tensor, context: tuple[Tensor, Tensor], mask: Tensor) -> Tensor:
        """B1 to B11 for h bf16 [B, A, W, H] at positions [B, A, W]; context K and V are [B, T, kv_heads, d], mask
        [B, 1, A W, T + A W]."""
        config, shape = self.config, h.shape
        x = self.norm(h, self.input_layernorm)
        coefficients = self.attention_conv.coefficients(x)
        xc = Convolution.apply_side(x, coefficients, 0).flatten(0, 2)
        flat = position.flatten()
        q = self.norm(linear(xc, self.q_proj).unflatten(-1, (-1, config.head_dim)), self.q_norm)
        q = rotate(q, flat, config.rope_theta).unflatten(0, (shape[0], -1))
        k, v = (
            torch.cat((old, new.unflatten(0, (shape[0], -1))), 1)
            for old, new in zip(context, (self.keys(xc, flat), self.values(xc)), strict=True)
        )
        group = config.num_attention_heads // config.num_key_value_heads
        k, v = (t.repeat_interleave(group, 2) for t in (k, v))
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        o = F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(2)
        y = linear(o, self.o_proj).view(shape)
        h = h + Convolution.apply_side(y, coefficients, 1)
        x = self.norm(h, self.post_attention_layernorm)
        coefficients = self.mlp_conv.coefficients(x)
        xc = Convolution.apply_side(x, coefficients, 0)
        act = (F.silu(linear(xc, self.gate_proj).float()) * linear(xc, self.up_proj).float()).bfloat16()
        return h + Convolution.apply_side(linear(act, self.down_proj), coefficients, 1)

    def weights(self) -> DraftLayerWeights:
        tensors = {}
        for field in fields(DraftLayerWeights):
            value = getattr(self, field.name)
            tensors[field.name] = value.weights() if isinstance(value, Convolution) else value.detach().bfloat16().cpu()
        return DraftLayerWeights(**tensors)


class Draft(nn.Module):
    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.config = config
        width, inputs, rank = (
            config.hidden_size,
            len(config.target_layer_ids) * config.hidden_size,
            config.selector_rank,
        )
        self.fc = nn.Parameter(torch.randn(width, inputs) * inputs**-0.5)
        self.layers = nn.ModuleList(DraftLayer(config) for _ in range(config.num_hidden_layers))
        self.hidden_norm = nn.Parameter(torch.ones(width))
        self.norm = nn.Parameter(torch.ones(width))
        self.predecessor_codebook = nn.Parameter(torch.randn(config.vocab_size, rank) * rank**-0.5)
        self.successor_codebook = nn.Parameter(torch.randn(config.vocab_size, rank) * 0.1 * rank**-0.5)
        self.hidden_projection = nn.Parameter(torch.randn(rank, width) * width**-0.5)

    def context(self, taps: tuple[Tensor, ...]) -> Tensor:
        """c of section 7.1, bf16 [N, H], from the taps bf16 [N, H] each."""
        c = linear(torch.cat(taps, -1), self.fc)
        return (rms(c, self.config.rms_norm_eps) * self.hidden_norm.bfloat16().float()).bfloat16()

    def forward(self, taps: tuple[Tensor, ...], layout: Layout, blocks: Blocks) -> Tensor:
        """Final normed hidden state of every block row, bf16 [B, A, W, H]."""
        c = self.context(taps)
        h = blocks.hidden
        position = blocks.start[..., None] + torch.arange(h.shape[2], device=h.device)
        mask = self._mask(layout, blocks.start, position)
        for layer in self.layers:
            old = layout.pad(layer.keys(c, layout.column)), layout.pad(layer.values(c))
            h = layer(h, position, old, mask)
        return (rms(h, self.config.rms_norm_eps) * self.norm.bfloat16().float()).bfloat16()

    def _mask(self, layout: Layout, start: Tensor, position: Tensor) -> Tensor:
        """bool [B, 1, A W, T + A W]: context keys before the anchor inside the window, and the row's own block (B5)."""
        batch, count, width = position.shape
        key = torch.arange(layout.width, device=start.device)
        distance = position[..., None] - key
        old = (key < start[..., None, None]) & (distance < self.config.sliding_window)
        own = torch.eye(count, dtype=torch.bool, device=start.device)
        own = own.repeat_interleave(width, 0).repeat_interleave(width, 1)
        return torch.cat((old.flatten(1, 2), own.expand(batch, -1, -1)), -1)[:, None]

    def pair_scores(self, hf: Tensor, predecessor: Tensor, candidates: Tensor) -> Tensor:
        """<A[pred] . e, B[cand]> of section 7.3: hf [..., H], predecessor [...], candidates [..., k] -> [..., k]."""
        e = linear(hf, self.hidden_projection).float()
        a = F.embedding(predecessor, self.predecessor_codebook).bfloat16().float() * e
        b = F.embedding(candidates, self.successor_codebook).bfloat16().float()
        return (b @ a[..., None])[..., 0]

    def walk(self, hf: Tensor, logits: Tensor, anchor: Tensor) -> Tensor:
        """Greedy path of section 7.3 over rows 1..W-1: hf [..., W-1, H], logits [..., W-1, V] -> tokens [..., W-1]."""
        scores, candidates = logits.topk(self.config.selector_top_k, dim=-1)
        token, path = anchor, []
        for t in range(logits.shape[-2]):
            total = scores[..., t, :] + self.pair_scores(hf[..., t, :], token, candidates[..., t, :])
            token = candidates[..., t, :].gather(-1, total.argmax(-1, keepdim=True))[..., 0]
            path.append(token)
        return torch.stack(path, -1)

    def weights(self) -> DraftWeights:
        """The exported form, on the CPU."""
        names = ["fc", "hidden_norm", "norm", "predecessor_codebook", "successor_codebook", "hidden_projection"]
        tensors = {name: getattr(self, name).detach().bfloat16().cpu() for name in names}
        return DraftWeights(layers=tuple(layer.weights() for layer in self.layers), **tensors)
