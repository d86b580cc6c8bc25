"""Differentiable target: the equations of the reference, batched, with every expert computed for every token.

Parameters are float32 masters; each forward rounds them to bf16 (or through NVFP4) and rounds activations where the
specification does, so that the trained model is the exported one. Names and shapes are those of `LayerWeights`.
"""

from dataclasses import dataclass, fields

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sgl_muse_mega.checkpoint.nvfp4 import fake_quantize, quantize
from sgl_muse_mega.checkpoint.weights import LayerWeights, TargetWeights
from sgl_muse_mega.config import TargetConfig
from training.layout import Layout

ROUTE_EPS = 1e-15
GATE_EPS = 1e-3
# Starting point of the residual gates: beta = 0.34, so that the embedding still reaches the last of a few layers.
_GATE_START = -0.2
_FLOAT32 = frozenset(["router", "router_bias", "post_attention_residual_gate", "post_feedforward_residual_gate"])
_EXPERTS = {"gate_up_proj": 2, "down_proj": 1}  # parts, each with a scale_2 of its own


def rms(x: Tensor, eps: float) -> Tensor:
    """x in float32 divided by its root mean square over the last dimension."""
    x = x.float()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


def linear(x: Tensor, w: Tensor) -> Tensor:
    """bf16 product with a float32 master weight rounded to bf16."""
    return F.linear(x, w.bfloat16())


def rotate(x: Tensor, position: Tensor, theta: float) -> Tensor:
    """Rotate-half RoPE (specification 2.3): bf16 [N, heads, d], positions [N] -> bf16, one rounding."""
    half = x.shape[-1] // 2
    frequency = theta ** (-torch.arange(half, device=x.device, dtype=torch.float64) / half)
    angle = (position[:, None].float() * frequency.float())[:, None]
    cos, sin = angle.cos(), angle.sin()
    low, high = x.float().split(half, -1)
    return torch.cat((low * cos - high * sin, high * cos + low * sin), -1).bfloat16()


def through(w: Tensor, parts: int) -> Tensor:
    """NVFP4 values of a master weight, with the gradient passed straight through."""
    return w + (fake_quantize(w, parts) - w).detach()


@dataclass(frozen=True, slots=True)
class TrainingOutput:
    logits: Tensor  # float32 [N, V] after the softcap (O3)
    taps: tuple[Tensor, ...]  # bf16 [N, H] after each of the asked layers
    load: Tensor  # float32 [layers, E], tokens routed to each expert


class Layer(nn.Module):
    def __init__(self, config: TargetConfig, index: int) -> None:
        super().__init__()
        self.config, self.index = config, index
        width, latent, inner = config.hidden_size, config.moe_hidden_size, config.moe_intermediate_size
        heads, kv = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
        experts = config.num_local_experts
        for name, rows, columns in (
            ("q_proj", heads, width),
            ("k_proj", kv, width),
            ("v_proj", kv, width),
            ("gate_proj", heads, width),
            ("o_proj", width, heads),
            ("router", experts, width),
            ("pre_expert_proj", latent, width),
            ("post_expert_proj", width, latent),
        ):
            setattr(self, name, nn.Parameter(torch.randn(rows, columns) * columns**-0.5))
        self.gate_up_proj = nn.Parameter(torch.randn(experts, 2 * inner, latent) * latent**-0.5)
        self.down_proj = nn.Parameter(torch.randn(experts, latent, inner) * inner**-0.5)
        for name in ("input_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"):
            setattr(self, name, nn.Parameter(torch.zeros(width)))
        for name in ("pre_expert_norm", "post_expert_norm"):
            setattr(self, name, nn.Parameter(torch.zeros(latent)))
        for name in ("post_attention_residual_gate", "post_feedforward_residual_gate"):
            setattr(self, name, nn.Parameter(torch.full((width,), _GATE_START)))
        self.register_buffer("router_bias", torch.zeros(experts))

    def forward(self, s: Tensor, layout: Layout, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Stream float32 [N, H] -> stream after the layer and the load of each expert [E]."""
        s = self._residual(s, self._attention(s, layout, mask), self.post_attention_residual_gate)
        branch, load = self._experts(s)
        return self._residual(s, branch, self.post_feedforward_residual_gate), load

    def _zero_centred(self, x: Tensor, gamma: Tensor) -> Tensor:
        """N1 of specification 2.1, rounded."""
        return (rms(x, self.config.rms_norm_eps) * (1 + gamma.bfloat16().float())).bfloat16()

    def _residual(self, s: Tensor, n: Tensor, gate: Tensor) -> Tensor:
        """A10 and F16."""
        u = gate / self.config.residual_gate_temperature
        beta = torch.sigmoid(u)
        alpha = (torch.sigmoid(-u) * (1 + beta)).clamp(min=GATE_EPS).sqrt()
        return alpha * s + beta * n.float()

    def _attention(self, s: Tensor, layout: Layout, mask: Tensor) -> Tensor:
        """A1 to A9: bf16 [N, H]."""
        config = self.config
        a = self._zero_centred(s, self.input_layernorm)
        q, k, v, g = (
            linear(a, w).unflatten(-1, (-1, config.head_dim))
            for w in (self.q_proj, self.k_proj, self.v_proj, self.gate_proj)
        )
        q, k = (rms(x, config.rms_norm_eps).bfloat16() for x in (q, k))
        theta = config.rope_theta(self.index)
        if theta:
            q, k = (rotate(x, layout.column, theta) for x in (q, k))
        group = config.num_attention_heads // config.num_key_value_heads
        k, v = (x[:, :, None].expand(-1, -1, group, -1).flatten(1, 2) for x in (k, v))
        q, k, v = (layout.pad(x).transpose(1, 2) for x in (q, k, v))
        o = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=config.attention_scale)
        o = layout.flatten(o.transpose(1, 2))
        y = (rms(o, config.rms_norm_eps) * torch.sigmoid(g.float())).bfloat16().flatten(1)
        return rms(linear(y, self.o_proj), config.post_norm_eps).bfloat16()

    def _experts(self, s: Tensor) -> tuple[Tensor, Tensor]:
        """F1 to F15: bf16 [N, H] and the load [E]."""
        config = self.config
        b = self._zero_centred(s, self.pre_feedforward_layernorm)
        omega, load = self._route(b)
        x = self._zero_centred(linear(b, self.pre_expert_proj), self.pre_expert_norm)
        quantised = config.nvfp4_experts(self.index)
        gate_up, down = (
            through(getattr(self, name), p) if quantised else getattr(self, name) for name, p in _EXPERTS.items()
        )
        both = linear(x, gate_up.flatten(0, 1)).unflatten(-1, (config.num_local_experts, -1))
        gate, up = both.float().chunk(2, -1)
        act = (F.silu(gate) * up).bfloat16()
        y = torch.bmm(act.transpose(0, 1), down.bfloat16().transpose(1, 2)).float()  # [E, N, M]
        # F11 and F12 with the row norm's factor moved into the weights: both are float32 throughout.
        scale = 1 + self.post_expert_norm.bfloat16().float()
        inverse = torch.rsqrt(y.square() @ scale.square() / y.shape[-1] + config.post_norm_eps)
        m = ((y * (omega.T * inverse)[..., None]).sum(0) * scale).bfloat16()
        z = linear(m, self.post_expert_proj)
        scaled = ((1 + self.post_feedforward_layernorm.bfloat16().float()) * z.float()).bfloat16()
        return rms(scaled, config.post_norm_eps).bfloat16(), load

    def _route(self, b: Tensor) -> tuple[Tensor, Tensor]:
        """F2 to F5 as a dense float32 matrix of weights [N, E], zero where not selected, and the load [E]."""
        config = self.config
        r = torch.sigmoid(F.linear(b.float(), self.router) * config.output_multiplier)
        selected = (r + self.router_bias).topk(config.num_experts_per_tok, dim=-1).indices
        chosen = torch.zeros_like(r).scatter_(-1, selected, 1.0)
        kept = r * chosen
        omega = kept * (config.routed_scaling_factor / (kept.sum(-1, keepdim=True) + ROUTE_EPS))
        return omega, chosen.sum(0)

    def weights(self) -> LayerWeights:
        """The exported form of this layer, on the CPU."""
        quantised = self.config.nvfp4_experts(self.index)
        tensors = {}
        for field in fields(LayerWeights):
            if field.name == "first_expert":
                continue
            w = getattr(self, field.name).detach().float().cpu()
            if field.name in _EXPERTS and quantised:
                tensors[field.name] = quantize(w, _EXPERTS[field.name])
            else:
                tensors[field.name] = w if field.name in _FLOAT32 else w.bfloat16()
        return LayerWeights(**tensors)


class Target(nn.Module):
    def __init__(self, config: TargetConfig) -> None:
        super().__init__()
        self.config = config
        width = config.hidden_size
        self.embed_tokens = nn.Parameter(torch.randn(config.vocab_size, width) * width**-0.5)
        self.layers = nn.ModuleList(Layer(config, i) for i in range(config.num_hidden_layers))
        self.norm = nn.Parameter(torch.ones(width))
        self.lm_head = nn.Parameter(torch.randn(config.vocab_size, width) * width**-0.5)

    def embed(self, ids: Tensor) -> Tensor:
        """E1: the normed embedding, bf16 [..., H]."""
        return rms(F.embedding(ids, self.embed_tokens).bfloat16(), self.config.rms_norm_eps).bfloat16()

    def forward(self, ids: Tensor, layout: Layout, taps: tuple[int, ...] = ()) -> TrainingOutput:
        """Flat ids int64 [N] -> logits and the residual stream after each of the layers `taps`."""
        s = self.embed(ids).float()
        masks = {window: causal_mask(layout.width, window, ids.device) for window in (self.config.sliding_window, None)}
        streams, loads = {}, []
        for i, layer in enumerate(self.layers):
            s, load = layer(s, layout, masks[self.config.window(i)])
            loads.append(load)
            if i in taps:
                streams[i] = s.bfloat16()
        return TrainingOutput(self.head(self.final_norm(s)), tuple(streams[i] for i in taps), torch.stack(loads))

    def final_norm(self, s: Tensor) -> Tensor:
        """O1: bf16 [N, H]."""
        return (rms(s, self.config.rms_norm_eps) * self.norm.bfloat16().float()).bfloat16()

    def head(self, hf: Tensor) -> Tensor:
        """O2 and O3 in float32."""
        z = F.linear(hf.float(), self.lm_head.bfloat16().float())
        cap = self.config.final_logit_softcapping
        return cap * torch.tanh(z * (self.config.output_multiplier / cap))

    def weights(self) -> TargetWeights:
        """The exported form, on the CPU."""
        embed, norm, head = (w.detach().bfloat16().cpu() for w in (self.embed_tokens, self.norm, self.lm_head))
        return TargetWeights(embed, tuple(layer.weights() for layer in self.layers), norm, head)


def causal_mask(width: int, window: int | None, device: torch.device) -> Tensor:
    """bool [T, T], true where the key (column) is visible to the query (row)."""
    position = torch.arange(width, device=device)
    distance = position[:, None] - position[None]
    visible = distance >= 0
    return visible if window is None else visible & (distance < window)
