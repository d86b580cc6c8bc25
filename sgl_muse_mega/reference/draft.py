"""The DFlash2 draft: context path, block path and head (model specification, sections 7.1-7.3)."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from sgl_muse_mega.checkpoint.weights import ConvWeights, DraftLayerWeights, DraftWeights
from sgl_muse_mega.config import DraftConfig
from sgl_muse_mega.reference import attention, head, selector
from sgl_muse_mega.reference.cache import KVCache
from sgl_muse_mega.reference.numerics import Numerics, linear, norm_absolute, norm_weightless, silu, widened
from sgl_muse_mega.reference.rope import rope_tables, rotate_half


def conv_coefficients(x: Tensor, weights: ConvWeights, num: Numerics) -> Tensor:
    """B2: D = x W_kp^T viewed as [T, side, tap, group]; the sublayer's input decides the taps of both sides."""
    projected = num.bf(linear(x, weights.kernel_projection))
    return projected.reshape(len(x), 2, 2, -1)


def conv(x: Tensor, base: Tensor, dynamic: Tensor, num: Numerics) -> Tensor:
    """Two-tap convolution over the rows of one block, x [T, H]; the row before the first is zero.

    base [2 taps, H], dynamic [T, 2 taps, groups]: every channel of a group shares its dynamic part. Tap 0 is the
    current row, tap 1 the previous row of the same block. Summed in the working type, one rounding (D-20).
    """
    group = x.shape[-1] // dynamic.shape[-1]
    taps = num.value(base)[None] + dynamic.repeat_interleave(group, dim=-1)
    previous = pad(x, (0, 0, 1, 0))[:-1]
    return num.bf(taps[:, 0] * x + taps[:, 1] * previous)


def head_norm(x: Tensor, weight: Tensor, head_dim: int, eps: float, num: Numerics) -> Tensor:
    """Per-head norm with plain gamma, rounded to bf16: [T, heads * d] -> [T, heads, d]."""
    return num.bf(norm_absolute(x.unflatten(-1, (-1, head_dim)), weight, eps))


@dataclass(frozen=True, slots=True)
class DraftHead:
    """Candidates of one block: slots are the rows 1 .. W - 1."""

    candidates: Tensor  # int64 [W - 1, k]
    lattice: Tensor  # [W - 1, k, k]


class ReferenceDraft:
    """A DFlash2 draft that borrows the target's embedding and head."""

    def __init__(
        self,
        config: DraftConfig,
        weights: DraftWeights,
        embed_tokens: Tensor,
        lm_head: Tensor,
        embedding_eps: float,
        num: Numerics | None = None,
    ) -> None:
        self.config = config
        layers = tuple(
            replace(widened(w), attention_conv=widened(w.attention_conv), mlp_conv=widened(w.mlp_conv))
            for w in weights.layers
        )
        self.weights = replace(weights, layers=layers, fc=weights.fc.double())
        self.embed_tokens = embed_tokens
        self.lm_head = lm_head.double()
        self.embedding_eps = embedding_eps
        self.num = num or Numerics()

    def context(self, taps: Tensor) -> Tensor:
        """c = bf(rms(c_in W_fc^T) * w_hidden_norm), c_in the concatenated taps [n_taps, T, H] (7.1): [T, H]."""
        joined = taps.transpose(0, 1).flatten(1)
        projected = self.num.bf(linear(joined, self.weights.fc))
        return self.num.bf(norm_absolute(projected, self.weights.hidden_norm, self.config.rms_norm_eps))

    def write_context(self, c: Tensor, positions: Tensor, slots: Tensor, caches: list[KVCache]) -> None:
        """K and V of every draft layer for committed rows; neither input norm nor convolution touches them (7.1)."""
        for layer, cache in zip(self.weights.layers, caches, strict=True):
            keys, values = self._keys_values(layer, c, positions)
            cache.write(slots, keys, values)

    def block_input(self, ids: Tensor) -> Tensor:
        """h0: target embedding rows of [anchor, mask, ...], normed or raw (D-16): [W, H] bf16."""
        rows = self.num.value(self.embed_tokens[ids])
        if self.weights.mask_embedding is not None:
            masked = ids == self.config.mask_token_id
            rows = torch.where(masked[:, None], self.num.value(self.weights.mask_embedding)[None], rows)
        if self.config.normed_embedding:
            rows = norm_weightless(rows, self.embedding_eps)
        return self.num.bf(rows * self.config.input_embedding_scale)

    def block(
        self, ids: Tensor, start: int, context_slots: Tensor, context_start: int, caches: list[KVCache]
    ) -> Tensor:
        """B1-B11 for the W rows at positions start .. start + W - 1; returns the final residual h [W, H].

        context_slots: slots of the committed positions context_start .. start - 1.
        """
        num = self.num
        positions = torch.arange(start, start + len(ids), device=ids.device)
        context_positions = torch.arange(context_start, start, device=ids.device)
        mask = torch.cat(
            (
                attention.visible(positions, context_positions, self.config.sliding_window),
                self._block_mask(positions),
            ),
            dim=1,
        )
        h = self.block_input(ids)
        for layer, cache in zip(self.weights.layers, caches, strict=True):
            past = cache.read(context_slots, num.dtype)
            h = num.bf(h + self._attention(layer, h, positions, past, mask))
            h = num.bf(h + self._feed_forward(layer, h))
        return h

    def candidates(self, h: Tensor, anchor: int) -> DraftHead:
        """Head, candidates and lattice of the rows after the anchor (7.3); z is rounded to bf16 (D-21)."""
        c, w, num = self.config, self.weights, self.num
        hf = num.bf(norm_absolute(h[1:], w.norm, c.rms_norm_eps))
        z = num.bf(linear(hf, self.lm_head))
        chosen = selector.candidates(z, c.selector_top_k)
        u = head.o3_softcap(z.gather(1, chosen), c.output_multiplier, c.final_logit_softcapping)
        e = selector.selector_state(hf, w.hidden_projection, num)
        scores = selector.lattice(u, chosen, anchor, e, w.predecessor_codebook, w.successor_codebook, num)
        return DraftHead(chosen, scores)

    def _keys_values(self, layer: DraftLayerWeights, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """K = rope(bf(rms_head(x W_k^T) * w_knorm)), V = x W_v^T: [T, kv_heads, d] each."""
        num, d = self.num, self.config.head_dim
        keys = head_norm(num.bf(linear(x, layer.k_proj)), layer.k_norm, d, self.config.rms_norm_eps, num)
        return self._rotate(keys, positions), num.bf(linear(x, layer.v_proj)).unflatten(-1, (-1, d))

    def _rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        cos, sin = rope_tables(positions, self.config.head_dim, self.config.rope_theta, self.num.dtype)
        return self.num.bf(rotate_half(x, cos, sin))

    def _attention(
        self, layer: DraftLayerWeights, h: Tensor, positions: Tensor, past: tuple[Tensor, Tensor], mask: Tensor
    ) -> Tensor:
        """B1-B7."""
        c, num = self.config, self.num
        x = num.bf(norm_absolute(h, layer.input_layernorm, c.rms_norm_eps))
        dynamic = conv_coefficients(x, layer.attention_conv, num)
        xc = conv(x, layer.attention_conv.base_kernel[0], dynamic[:, 0], num)
        q = head_norm(num.bf(linear(xc, layer.q_proj)), layer.q_norm, c.head_dim, c.rms_norm_eps, num)
        keys, values = self._keys_values(layer, xc, positions)
        keys, values = torch.cat((past[0], keys)), torch.cat((past[1], values))
        o = attention.a6_attention(self._rotate(q, positions), keys, values, mask, c.head_dim**-0.5, num)
        y = num.bf(linear(o.flatten(1), layer.o_proj))
        return conv(y, layer.attention_conv.base_kernel[1], dynamic[:, 1], num)

    def _feed_forward(self, layer: DraftLayerWeights, h: Tensor) -> Tensor:
        """B9-B10."""
        num = self.num
        x = num.bf(norm_absolute(h, layer.post_attention_layernorm, self.config.rms_norm_eps))
        dynamic = conv_coefficients(x, layer.mlp_conv, num)
        xc = conv(x, layer.mlp_conv.base_kernel[0], dynamic[:, 0], num)
        gate, up = (num.bf(linear(xc, weight)) for weight in (layer.gate_proj, layer.up_proj))
        m = num.bf(linear(num.bf(silu(gate) * up), layer.down_proj))
        return conv(m, layer.mlp_conv.base_kernel[1], dynamic[:, 1], num)

    def _block_mask(self, positions: Tensor) -> Tensor:
        """[W, W]: every row of the block, or the rows up to itself when the draft is causal (D-17)."""
        every = torch.ones(len(positions), len(positions), dtype=torch.bool, device=positions.device)
        return every.tril() if self.config.is_causal else every
