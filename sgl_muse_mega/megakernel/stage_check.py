"""Compares every stage of a launch with the reference, each stage fed the kernel's own input of that stage.

What a stage reads and writes stays in `Activations` after the launch, so one launch serves all comparisons, and an
error is charged to the stage that made it.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from sgl_muse_mega.checkpoint import marlin, nvfp4
from sgl_muse_mega.megakernel import word_order
from sgl_muse_mega.megakernel.mailbox import LoopBack, read_mail, session_word
from sgl_muse_mega.megakernel.step import Step
from sgl_muse_mega.megakernel.tiling import BLOCK_ROWS, Dense
from sgl_muse_mega.megakernel.weights import KernelLayer
from sgl_muse_mega.reference import attention, experts, head
from sgl_muse_mega.reference.numerics import Numerics, linear, norm_weightless

MIN_COSINE = 0.9999
NUM = Numerics()


@dataclass(frozen=True, slots=True)
class StageResult:
    """Distance of one stage's output from the reference's, over all rows."""

    name: str
    cosine: float
    relative_rms: float
    worst: float  # largest absolute difference

    @property
    def passed(self) -> bool:
        return self.cosine >= MIN_COSINE and bool(torch.isfinite(torch.tensor(self.relative_rms)))


def compare(name: str, ours: Tensor, reference: Tensor) -> StageResult:
    """Both tensors as one vector in float64; NaN anywhere in ours fails."""
    a, b = ours.double().flatten(), reference.double().flatten()
    difference = a - b
    norm_a, norm_b = a.norm(), b.norm()
    if norm_b == 0:
        zero = bool((a == 0).all())
        return StageResult(name, 1.0 if zero else 0.0, 0.0 if zero else float("inf"), float(a.abs().max()))
    cosine = float((a @ b) / (norm_a * norm_b))
    return StageResult(name, cosine, float(difference.norm() / norm_b), float(difference.abs().max()))


def sum_of_parts(partial: Tensor, dense: Dense, rows: int) -> Tensor:
    """f32 [blocks, parts, row_cap, 64] -> [rows, N], parts added in worker order as the kernels do."""
    columns = []
    for block in range(dense.blocks):
        first, last = block * dense.chunks, (block + 1) * dense.chunks - 1
        count = 1 if dense.whole_k else dense.worker_of(last) - dense.worker_of(first) + 1
        total = partial[block, 0, :rows].clone()
        for part in range(1, count):
            total += partial[block, part, :rows]
        columns.append(total)
    return torch.cat(columns, dim=1)[:, : dense.n]


def sum_in_order(mail: Tensor) -> Tensor:
    """f32 [ranks, rows, columns] -> [rows, columns], added in rank order."""
    total = mail[0].clone()
    for more in mail[1:]:
        total += more
    return total


def expert_order(width: int, nvfp4_experts: bool, device: torch.device) -> Tensor:
    """For each input k of an expert row, its place in memory (routing.cuh, expert_position)."""
    k = torch.arange(width, device=device)
    if not nvfp4_experts:
        return k
    return k // 32 * 32 + (k % 8) // 2 * 8 + (k // 16 % 2) * 4 + (k % 16) // 8 * 2 + k % 2


class LayerCheck:
    """Takes a copy of a layer's inputs before its launch, and the stages' results after it."""

    def __init__(self, step: Step, index: int, rows: int, caches: list[tuple[Tensor, Tensor]]) -> None:
        self.step, self.index, self.rows = step, index, rows
        self.config, self.caches = step.config, caches
        self.layer: KernelLayer = step.weights.layers[index]
        self.instance = step.variants[self.layer.nvfp4].instance
        act = step.activations
        self.stream = act.stream[:rows].clone()
        self.query, self.gate = act.query[:rows].clone(), act.gate[:rows].clone()
        self.results: list[StageResult] = []

    def _note(self, name: str, ours: Tensor, reference: Tensor) -> None:
        self.results.append(compare(name, ours, reference))

    def run(self) -> list[StageResult]:
        """All stages; call after the launch has completed."""
        self._attention()
        after_attention = self._attention_boundary()
        self._routing()
        self._experts()
        self._expert_boundary(after_attention)
        if self.index + 1 < len(self.step.weights.layers):
            self.results += qkv_results(self.step, self.index + 1, self.rows, self.caches)
        return self.results

    def _mail(self, point: str) -> Tensor:
        """What all ranks sent at an exchange point of this launch, f32 [ranks, rows, columns]; raises where a packet of
        this launch is missing, or in loop-back not what this rank sent."""
        variant, instance = self.step.variants[self.layer.nvfp4], self.instance
        epoch = int(variant.control["layer"].epoch) - 1
        tag = (session_word(self.step.mail.session) + 2 * epoch + 2**31) % 2**32 - 2**31
        mail = read_mail(
            variant.mailbox, epoch % 2, instance.mail_offsets[f"{point}_MAIL_AT"], self.rows,
            instance.mail_columns[point], tag,
        )  # fmt: skip
        if isinstance(self.step.mail, LoopBack) and not bool((mail == mail[0]).all()):
            raise AssertionError(f"the copies of {point} in loop-back differ")
        return mail

    def _gathered(self, point: str, own: Tensor) -> Tensor:
        """Rows of all ranks' columns; `own` are this rank's, which it must have sent."""
        if self.instance.ranks == 1:
            return own
        mail = self._mail(point)
        self._note(f"{point} sent", mail[self.step.mail.rank], own)
        return torch.cat(tuple(mail), dim=1)

    def visible_keys(self) -> tuple[Tensor, Tensor, Tensor]:
        """Keys and values [n, kv_heads, 64] f32 of every position a row can see, and the mask [T, n]."""
        inputs, rows = self.step.inputs, self.rows
        full, window = self.config.is_full(self.index), self.config.window(self.index)
        length = int(inputs.length)
        positions = inputs.positions[:rows]
        start = 0 if window is None else max(0, int(positions.min()) - window + 1)
        start = min(start, length)
        pages = inputs.full_pages if full else inputs.sliding_pages
        slots = inputs.full_slots if full else inputs.sliding_slots
        where = torch.cat((pages[start:length].long(), slots[:rows]))
        keys, values = (_cached(cache, where) for cache in self.caches[self.index])
        context = torch.arange(start, length, device=positions.device)
        seen = attention.visible(positions, context, window)
        bits = torch.arange(rows, device=positions.device)
        ancestors = (inputs.ancestors[:rows, None] >> bits[None] & 1).bool()
        own = ancestors & attention.visible(positions, positions, window)
        return keys, values, torch.cat((seen, own), dim=1)

    def _attention(self) -> None:
        keys, values, mask = self.visible_keys()
        o = attention.a6_attention(self.query.float(), keys, values, mask, self.config.attention_scale, NUM)
        y = attention.a7_output_gate(o, self.gate.flatten(1).float(), self.config.rms_norm_eps, NUM)
        self._note("A6-A7 attention, output gate", self.step.activations.gated[: self.rows], y)

    def _attention_boundary(self) -> Tensor:
        act, c, layer, rows = self.step.activations, self.config, self.layer, self.rows
        z = linear(act.gated[:rows].float(), layer.o_proj)
        if self.instance.ranks == 1:
            total = NUM.bf(sum_of_parts(act.o_partial, self.instance.o_proj, rows))
            self._note("A8 o_proj", total, z)
        else:
            mail = self._mail("O_PROJ")
            self._note("A8 o_proj", mail[self.step.mail.rank], z)
            total = NUM.bf(sum_in_order(mail))
        n = attention.a9_post_attention_norm(total, c.post_norm_eps, NUM)
        after = attention.a10_f16_residual(self.stream, n, layer.attention_alpha, layer.attention_beta)
        b = experts.f1_pre_ffn_norm(after, layer.pre_feedforward_norm, c.rms_norm_eps, NUM)
        self._note("A9-F1 boundary", act.router_input[:rows], b)
        return after

    def _routing(self) -> None:
        act, c, layer, rows = self.step.activations, self.config, self.layer, self.rows
        b = act.router_input[:rows].float()
        logits = act.router_logits[:rows]
        self._note("F2 router", logits, experts.f2_router_logits(b, layer.router))
        scores = experts.f3_router_scores(logits, c.output_multiplier)
        ids = act.route_ids[:rows].long()
        selection = scores + layer.router_bias
        best = selection.gather(1, experts.f4_select(scores, layer.router_bias, c.num_experts_per_tok))
        # Scores of a tie may differ in the last bit between the two sigmoids: the selected scores must agree.
        self._note("F4 selection", selection.gather(1, ids), best)
        omega = experts.f5_route_weights(scores, ids, c.routed_scaling_factor)
        self._note("F5 route weights", act.route_weights[:rows], omega)
        h = NUM.bf(sum_of_parts(act.pre_partial, self.instance.pre_proj, rows))
        self._note("F6 pre_expert_proj", h, linear(b, layer.pre_expert_proj))
        h = self._gathered("PRE_PROJ", h)
        x = experts.f7_pre_expert_norm(h, layer.pre_expert_norm, c.rms_norm_eps, NUM)
        order = expert_order(c.moe_hidden_size, layer.nvfp4, x.device)
        self._note("F7 expert input", act.expert_input[:rows][:, order], x)

    def _experts(self) -> None:
        act, c, layer, rows = self.step.activations, self.config, self.layer, self.rows
        x = act.expert_input[:rows][:, expert_order(c.moe_hidden_size, layer.nvfp4, act.stream.device)].float()
        inner = expert_order(c.moe_intermediate_size, layer.nvfp4, x.device)
        ids = act.route_ids[:rows].long() - layer.first_expert
        local = layer.down.shape[0]
        ids = torch.where((ids >= 0) & (ids < local), ids, -1)
        lines, activated, outputs, expected_act, expected_out = 0, [], [], [], []
        normed = x.new_zeros(rows, c.num_experts_per_tok, c.moe_hidden_size)
        for expert in sorted(set(ids[ids >= 0].tolist())):
            token, slot = (ids == expert).nonzero(as_tuple=True)
            gate_up, down, scales = expert_matrices(layer, expert)
            both = linear(x[token], gate_up)
            gate, up = both.chunk(2, dim=-1)
            if layer.nvfp4:
                gate, up = gate * scales[0], up * scales[1]
            else:
                gate, up = NUM.bf(gate), NUM.bf(up)
            here = slice(lines, lines + len(token))
            ours = act.activated[here][:, inner].float()
            y = linear(ours, down)
            y = y * scales[2] if layer.nvfp4 else NUM.bf(y)
            activated.append(ours)
            expected_act.append(experts.f9_activation(gate, up, NUM))
            outputs.append(act.expert_output[here])
            expected_out.append(y)
            normed[token, slot] = experts.f11_post_expert_norm(
                act.expert_output[here], layer.post_expert_norm, c.post_norm_eps
            )
            lines += len(token)
        if lines:
            self._note("F8-F9 gate, up, SwiGLU", torch.cat(activated), torch.cat(expected_act))
            self._note("F10 down", torch.cat(outputs), torch.cat(expected_out))
        combined = experts.f12_combine(normed, act.route_weights[:rows], NUM)
        if self.instance.ranks > 1:
            mail = self._mail("EXPERT")
            self._note("F11-F12 combine, one rank's", mail[self.step.mail.rank], combined)
            combined = NUM.bf(sum_in_order(mail))
        self._note("F11-F13 combine", act.combined[:rows], combined)

    def _expert_boundary(self, after_attention: Tensor) -> None:
        act, c, layer, rows = self.step.activations, self.config, self.layer, self.rows
        z = NUM.bf(sum_of_parts(act.post_partial, self.instance.post_proj, rows))
        self._note("F14 post_expert_proj", z, linear(act.combined[:rows].float(), layer.post_expert_proj))
        z = self._gathered("POST_PROJ", z)
        n = experts.f15_post_ffn_norm(z, layer.post_feedforward_norm, c.post_norm_eps, NUM)
        stream = attention.a10_f16_residual(after_attention, n, layer.feedforward_alpha, layer.feedforward_beta)
        self._note("F15-F16 stream", act.stream[:rows], stream)
        if self.index in self.step.taps_after:
            tap = self.step.taps[:rows, self.step.taps_after.index(self.index)]
            self._note("tap", tap, NUM.bf(act.stream[:rows]))
        if self.index + 1 < len(self.step.weights.layers):
            norm = self.step.weights.layers[self.index + 1].input_norm
            a = attention.a1_input_norm(act.stream[:rows], norm, c.rms_norm_eps, NUM)
            self._note("A1 next input", act.next_input[:rows], a)


def embed_results(step: Step, rows: int, caches: list[tuple[Tensor, Tensor]]) -> list[StageResult]:
    """Stages of the embed launch."""
    c, act = step.config, step.activations
    ids = step.inputs.token_ids[:rows] - step.first_token
    stream = head.e1_embedding(ids, step.weights.embedding, c.rms_norm_eps, NUM)
    a = attention.a1_input_norm(act.stream[:rows], step.weights.layers[0].input_norm, c.rms_norm_eps, NUM)
    return [
        compare("E1 embedding", act.stream[:rows], stream),
        compare("A1 first input", act.next_input[:rows], a),
        *qkv_results(step, 0, rows, caches),
    ]


def qkv_results(step: Step, index: int, rows: int, caches: list[tuple[Tensor, Tensor]]) -> list[StageResult]:
    """A2-A5 of layer `index`, from the normed rows the kernel wrote."""
    c, act, layer, instance = step.config, step.activations, step.weights.layers[index], step.instance
    d, heads, kv_heads = c.head_dim, instance.heads, instance.kv_heads
    parts = sum_of_parts(act.qkv_partial, instance.qkv_proj, rows)
    results = [compare("A2 q, k, v, gate", parts, linear(act.next_input[:rows].float(), layer.qkv))]
    widths = [heads * d, kv_heads * d, kv_heads * d, heads * d]
    q, k, v, gate = (NUM.bf(x).unflatten(-1, (-1, d)) for x in parts.split(widths, dim=1))
    positions = step.inputs.positions[:rows]
    q, k = (_rotate_pairs(NUM.bf(norm_weightless(x, c.rms_norm_eps)), positions, c.rope_theta(index)) for x in (q, k))
    slots = (step.inputs.full_slots if c.is_full(index) else step.inputs.sliding_slots)[:rows]
    stored_k, stored_v = (_cached(cache, slots) for cache in caches[index])
    if caches[index][0].dtype == torch.float8_e4m3fn:
        k, v = (x.clamp(-448, 448).to(torch.float8_e4m3fn).float() for x in (k, v))
    return [
        *results,
        compare("A3-A4 query", act.query[:rows], q),
        compare("A5 key", stored_k, k),
        compare("A5 value", stored_v, v),
        compare("A2 output gate", act.gate[:rows], gate),
    ]


def head_results(step: Step, rows: int) -> list[StageResult]:
    """Stages of the head launch."""
    c, act = step.config, step.activations
    hf = head.o1_final_norm(act.stream[:rows], step.weights.final_norm, c.rms_norm_eps, NUM)
    z = head.o2_head(act.next_input[:rows].float(), step.weights.lm_head)
    logits = head.o3_softcap(z, c.output_multiplier, c.final_logit_softcapping)
    ours = act.logits[:rows]
    return [
        compare("O1 final norm", act.next_input[:rows], hf),
        compare("O2-O3 logits", ours, logits),
        compare(
            "greedy token's logit",
            ours.gather(1, act.greedy_ids[:rows, None] - step.first_token),
            ours.max(dim=1, keepdim=True).values,
        ),
    ]


def expert_matrices(layer: KernelLayer, expert: int) -> tuple[Tensor, Tensor, Tensor]:
    """gate_up and down as float64 without global scales, and the scales of gate, up and down."""
    if not layer.nvfp4:
        one = layer.gate_up.new_ones(3, dtype=torch.float32)
        return layer.gate_up[expert].double(), layer.down[expert].double(), one
    matrices = []
    for words, scales in ((layer.gate_up, layer.gate_up_block_scale), (layer.down, layer.down_block_scale)):
        assert scales is not None
        one = words[expert : expert + 1]
        if layer.field_order:
            one = one.clone()
            word_order.to_marlin_order(one)
        codes = marlin.unpack_weight(one[0])
        matrices.append(nvfp4.dequantize_codes(codes, marlin.unpack_scales(scales[expert])).double())
    globals_ = torch.stack([s[expert] for s in (layer.gate_scale, layer.up_scale, layer.down_scale) if s is not None])
    return matrices[0], matrices[1], globals_


def _rotate_pairs(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    """A4 in adjacent-pair order; x [T, heads, d]."""
    if theta == 0:
        return x
    j = torch.arange(0, x.shape[-1], 2, device=x.device, dtype=torch.float32)
    angle = positions.float()[:, None] * (1.0 / theta ** (j / x.shape[-1]))[None]
    cos, sin = angle.cos()[:, None], angle.sin()[:, None]
    even, odd = x[..., 0::2], x[..., 1::2]
    return NUM.bf(torch.stack((even * cos - odd * sin, odd * cos + even * sin), dim=-1).flatten(-2))


def _cached(cache: Tensor, slots: Tensor) -> Tensor:
    """Rows of a cache as float32; float8 is indexed through its bytes."""
    if cache.dtype == torch.float8_e4m3fn:
        return cache.view(torch.uint8)[slots].view(torch.float8_e4m3fn).float()
    return cache[slots].float()


assert BLOCK_ROWS == 64  # sum_of_parts joins blocks of the width the kernels use
