"""The target: decoder layers over a paged cache, prefill and T-row verify alike (model specification, sections 1-2)."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from sgl_muse_mega.checkpoint.weights import LayerWeights, TargetWeights
from sgl_muse_mega.config import TargetConfig
from sgl_muse_mega.reference import attention, experts, head
from sgl_muse_mega.reference.cache import KVCache
from sgl_muse_mega.reference.numerics import Numerics, Record, widened


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of one step and what they may see.

    positions int64 [T], absolute and 0-based. full_slots, sliding_slots int64 [T]: where each row's K and V go (full
    layers and sliding layers have their own page tables). full_context, sliding_context: slot of every context position
    from full_start or sliding_start on; the context ends where the step begins. ancestors bool [T, T]: row i sees row j
    of the step; None is a chain (row i sees rows 0 .. i).
    """

    positions: Tensor
    full_slots: Tensor
    sliding_slots: Tensor
    full_context: Tensor
    sliding_context: Tensor
    full_start: int = 0
    sliding_start: int = 0
    ancestors: Tensor | None = None


@dataclass(frozen=True, slots=True)
class TargetOutput:
    """What one forward pass of T rows gives."""

    logits: Tensor  # [T or logit_rows, V] float32 after the softcap
    taps: Tensor  # [taps, T, H]: the stream after the tapped layers, rounded to bf16
    experts: list[Tensor] = field(default_factory=list)  # selected ids per layer, int64 [T, k]


class ReferenceLayer:
    """One decoder layer with its constants; equation names are recorded through `record` when one is given."""

    def __init__(self, config: TargetConfig, index: int, weights: LayerWeights, num: Numerics) -> None:
        self.config = config
        self.index = index
        self.num = num
        self.weights = widened(weights)
        temperature = config.residual_gate_temperature
        self.attention_gate = attention.residual_gate(weights.post_attention_residual_gate, temperature, num)
        self.ffn_gate = attention.residual_gate(weights.post_feedforward_residual_gate, temperature, num)
        self.gate_up = experts.ExpertStack(weights.gate_up_proj, num)
        self.down = experts.ExpertStack(weights.down_proj, num)
        self.local_experts = (
            weights.down_proj.shape[0] if isinstance(weights.down_proj, Tensor) else weights.down_proj.codes.shape[0]
        )

    def attend(self, stream: Tensor, rows: Rows, cache: KVCache, record: Record) -> Tensor:
        """A1-A10: stream [T, H] -> stream after the attention half; writes the rows' K and V into the cache."""
        c, w, num = self.config, self.weights, self.num
        full = c.is_full(self.index)
        a = attention.a1_input_norm(stream, w.input_layernorm, c.rms_norm_eps, num)
        q, k, v, gate = attention.a2_projections(a, w.q_proj, w.k_proj, w.v_proj, w.gate_proj, num)
        q, k = (attention.a3_head_norm(x, c.head_dim, c.rms_norm_eps, num) for x in (q, k))
        q, k = (attention.a4_rotate(x, rows.positions, c.rope_theta(self.index), num) for x in (q, k))
        v = v.unflatten(-1, (-1, c.head_dim))
        slots = rows.full_slots if full else rows.sliding_slots
        cache.write(slots, k, v)

        context = rows.full_context if full else rows.sliding_context
        start = rows.full_start if full else rows.sliding_start
        keys, values = cache.read(torch.cat((context, slots)), num.dtype)
        context_positions = torch.arange(start, start + len(context), device=context.device)
        window = c.window(self.index)
        mask = torch.cat(
            (
                attention.visible(rows.positions, context_positions, window),
                _step_mask(rows, window),
            ),
            dim=1,
        )
        o = attention.a6_attention(q, keys, values, mask, c.attention_scale, num)
        y = attention.a7_output_gate(o, gate, c.rms_norm_eps, num)
        z = attention.a8_output_projection(y, w.o_proj, num)
        n = attention.a9_post_attention_norm(z, c.post_norm_eps, num)
        after = attention.a10_f16_residual(stream, n, *self.attention_gate)
        for name, value in (("A1", a), ("A2.gate", gate), ("A4.q", q), ("A4.k", k), ("A2.v", v), ("A6", o), ("A7", y),
                            ("A8", z), ("A9", n), ("A10", after)):  # fmt: skip
            record(name, value)
        return after

    def feed_forward(self, stream: Tensor, record: Record) -> tuple[Tensor, Tensor]:
        """F1-F16: returns the stream after the layer and the selected experts [T, k]."""
        c, w, num = self.config, self.weights, self.num
        b = experts.f1_pre_ffn_norm(stream, w.pre_feedforward_layernorm, c.rms_norm_eps, num)
        logits = experts.f2_router_logits(b, w.router)
        scores = experts.f3_router_scores(logits, c.output_multiplier)
        selected = experts.f4_select(scores, w.router_bias, c.num_experts_per_tok)
        omega = experts.f5_route_weights(scores, selected, c.routed_scaling_factor)
        h = experts.f6_pre_expert_projection(b, w.pre_expert_proj, num)
        x = experts.f7_pre_expert_norm(h, w.pre_expert_norm, c.rms_norm_eps, num)
        m = experts.f8_to_f12_experts(
            x, selected, omega, self.gate_up, self.down, w.post_expert_norm, c.post_norm_eps, num,
            w.first_expert, self.local_experts,
        )  # fmt: skip
        z = experts.f14_post_expert_projection(m, w.post_expert_proj, num)
        n = experts.f15_post_ffn_norm(z, w.post_feedforward_layernorm, c.post_norm_eps, num)
        after = attention.a10_f16_residual(stream, n, *self.ffn_gate)
        for name, value in (("F1", b), ("F2", logits), ("F3", scores), ("F4", selected), ("F5", omega), ("F6", h),
                            ("F7", x), ("F12", m), ("F14", z), ("F15", n), ("F16", after)):  # fmt: skip
            record(name, value)
        return after, selected

    def forward(
        self, stream: Tensor, rows: Rows, cache: KVCache, record: Record | None = None
    ) -> tuple[Tensor, Tensor]:
        """The whole layer: stream [T, H] -> (stream, selected experts)."""
        note = record or _ignore
        return self.feed_forward(self.attend(stream, rows, cache, note), note)


class ReferenceTarget:
    """Muse Spark's text model on whole (unsharded) weights."""

    def __init__(
        self, config: TargetConfig, weights: TargetWeights, num: Numerics | None = None, taps: Sequence[int] = ()
    ) -> None:
        self.config = config
        self.num = num or Numerics()
        self.weights = weights
        self.lm_head = weights.lm_head.double()
        self.taps = tuple(taps)
        self.layers = [ReferenceLayer(config, i, w, self.num) for i, w in enumerate(weights.layers)]

    def forward(
        self, ids: Tensor, rows: Rows, caches: Sequence[KVCache], logit_rows: int | None = None
    ) -> TargetOutput:
        """ids int64 [T] -> logits of the last `logit_rows` rows (all by default) and the taps of all rows."""
        c, num = self.config, self.num
        stream = head.e1_embedding(ids, self.weights.embed_tokens, c.rms_norm_eps, num)
        kept, selected = {}, []
        for layer, cache in zip(self.layers, caches, strict=True):
            stream, chosen = layer.forward(stream, rows, cache)
            selected.append(chosen)
            if layer.index in self.taps:
                kept[layer.index] = num.bf(stream)
        last = stream if logit_rows is None else stream[len(stream) - logit_rows :]
        hf = head.o1_final_norm(last, self.weights.norm, c.rms_norm_eps, num)
        z = head.o2_head(hf, self.lm_head)
        taps = torch.stack([kept[i] for i in self.taps]) if self.taps else stream.new_empty(0, *stream.shape)
        return TargetOutput(head.o3_softcap(z, c.output_multiplier, c.final_logit_softcapping), taps, selected)


def _step_mask(rows: Rows, window: int | None) -> Tensor:
    """[T, T]: what the rows of the step see of each other, within the window."""
    steps = len(rows.positions)
    chain = torch.ones(steps, steps, dtype=torch.bool, device=rows.positions.device).tril()
    ancestors = chain if rows.ancestors is None else rows.ancestors
    return ancestors & attention.visible(rows.positions, rows.positions, window)


def _ignore(name: str, value: Tensor) -> None:
    del name, value
