"""Random weights of realistic scale for any configuration, for tests and for benchmarks without a checkpoint."""

import torch
from torch import Tensor

from sgl_muse_mega.checkpoint.nvfp4 import quantize
from sgl_muse_mega.checkpoint.weights import ConvWeights, DraftLayerWeights, DraftWeights, LayerWeights, TargetWeights
from sgl_muse_mega.config import DraftConfig, TargetConfig


class _Source:
    def __init__(self, seed: int, device: torch.device | str) -> None:
        self.device = torch.device(device)
        self.generator = torch.Generator(self.device).manual_seed(seed)

    def normal(self, *shape: int, std: float, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        values = torch.randn(*shape, generator=self.generator, device=self.device)
        return (values * std).to(dtype)

    def matrix(self, rows: int, columns: int) -> Tensor:
        """[rows, columns] bf16 that keeps the scale of its input."""
        return self.normal(rows, columns, std=columns**-0.5)

    def around_one(self, *shape: int) -> Tensor:
        return (1 + self.normal(*shape, std=0.1, dtype=torch.float32)).to(torch.bfloat16)


def random_layer(config: TargetConfig, layer: int, seed: int, device: torch.device | str = "cpu") -> LayerWeights:
    """One decoder layer; every norm, gate and bias is away from its neutral value so that no term can be left out."""
    source = _Source(seed, device)
    c = config
    queries, keys = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
    experts, latent, inner = c.num_local_experts, c.moe_hidden_size, c.moe_intermediate_size
    gate_up = source.normal(experts, 2 * inner, latent, std=latent**-0.5)
    down = source.normal(experts, latent, inner, std=inner**-0.5)
    gate_up[:, inner:] *= 1.5  # separate scales of gate and up differ visibly
    quantised = c.nvfp4_experts(layer)
    return LayerWeights(
        input_layernorm=source.normal(c.hidden_size, std=0.1),
        q_proj=source.matrix(queries, c.hidden_size),
        k_proj=source.matrix(keys, c.hidden_size),
        v_proj=source.matrix(keys, c.hidden_size),
        gate_proj=source.matrix(queries, c.hidden_size),
        o_proj=source.matrix(c.hidden_size, queries),
        post_attention_residual_gate=source.normal(c.hidden_size, std=0.3, dtype=torch.float32),
        pre_feedforward_layernorm=source.normal(c.hidden_size, std=0.1),
        router=source.normal(experts, c.hidden_size, std=8 * c.hidden_size**-0.5, dtype=torch.float32),
        router_bias=source.normal(experts, std=0.05, dtype=torch.float32),
        pre_expert_proj=source.matrix(latent, c.hidden_size),
        pre_expert_norm=source.normal(latent, std=0.1),
        gate_up_proj=quantize(gate_up, 2) if quantised else gate_up,
        down_proj=quantize(down, 1) if quantised else down,
        post_expert_norm=source.normal(latent, std=0.1),
        post_expert_proj=source.matrix(c.hidden_size, latent),
        post_feedforward_layernorm=source.normal(c.hidden_size, std=0.1),
        post_feedforward_residual_gate=source.normal(c.hidden_size, std=0.3, dtype=torch.float32),
    )


def random_target(config: TargetConfig, seed: int) -> TargetWeights:
    """A whole target in the host's memory; layer i depends on the seed and i alone."""
    source = _Source(seed, "cpu")
    return TargetWeights(
        embed_tokens=source.normal(config.vocab_size, config.hidden_size, std=1.0),
        layers=tuple(random_layer(config, i, seed * 1000 + i + 1) for i in range(config.num_hidden_layers)),
        norm=source.around_one(config.hidden_size),
        lm_head=source.normal(config.vocab_size, config.hidden_size, std=4 * config.hidden_size**-0.5),
    )


def random_draft(config: DraftConfig, seed: int, device: torch.device | str = "cpu") -> DraftWeights:
    """A whole draft; base kernels scatter round the identity, so that both taps count."""
    source = _Source(seed, device)
    c = config
    groups = c.hidden_size // c.conv_group_size

    def conv() -> ConvWeights:
        base = source.normal(2, 2, c.hidden_size, std=0.1, dtype=torch.float32)
        base[:, 0] += 1
        return ConvWeights(
            base.to(torch.bfloat16), source.normal(4 * groups, c.hidden_size, std=0.3 * c.hidden_size**-0.5)
        )

    def layer() -> DraftLayerWeights:
        queries, keys = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
        return DraftLayerWeights(
            input_layernorm=source.around_one(c.hidden_size),
            q_proj=source.matrix(queries, c.hidden_size),
            k_proj=source.matrix(keys, c.hidden_size),
            v_proj=source.matrix(keys, c.hidden_size),
            o_proj=source.matrix(c.hidden_size, queries),
            q_norm=source.around_one(c.head_dim),
            k_norm=source.around_one(c.head_dim),
            post_attention_layernorm=source.around_one(c.hidden_size),
            gate_proj=source.matrix(c.intermediate_size, c.hidden_size),
            up_proj=source.matrix(c.intermediate_size, c.hidden_size),
            down_proj=source.matrix(c.hidden_size, c.intermediate_size),
            attention_conv=conv(),
            mlp_conv=conv(),
        )

    return DraftWeights(
        layers=tuple(layer() for _ in range(c.num_hidden_layers)),
        fc=source.matrix(c.hidden_size, len(c.target_layer_ids) * c.hidden_size),
        hidden_norm=source.around_one(c.hidden_size),
        norm=source.around_one(c.hidden_size),
        predecessor_codebook=source.normal(c.vocab_size, c.selector_rank, std=1.0),
        successor_codebook=source.normal(c.vocab_size, c.selector_rank, std=c.selector_rank**-0.5),
        hidden_projection=source.matrix(c.selector_rank, c.hidden_size),
    )
