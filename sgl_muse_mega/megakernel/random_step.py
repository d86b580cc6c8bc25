"""Steps over random weights and random contexts, for checks and benchmarks without a checkpoint."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from sgl_muse_mega.checkpoint.random_weights import random_layer
from sgl_muse_mega.checkpoint.target import share_layer
from sgl_muse_mega.config import QuantizationConfig, TargetConfig
from sgl_muse_mega.megakernel.instance import MAX_ROWS
from sgl_muse_mega.megakernel.machine import Machine
from sgl_muse_mega.megakernel.mailbox import LoopBack, Mail
from sgl_muse_mega.megakernel.step import CACHE_DTYPES, Step
from sgl_muse_mega.megakernel.weights import KernelLayer, KernelWeights, prepare_layer

EXPERTS, HEADS, VOCABULARY = 256, 128, 202048
"""Muse Spark's; its other sizes are in `spark_config`."""
NVFP4 = QuantizationConfig(quant_algo="NVFP4", group_size=16, exclude=())


def spark_config(
    layers: int = 2, *, nvfp4: bool = True, experts: int = EXPERTS, heads: int = HEADS // 4, **sizes: int
) -> TargetConfig:
    """Muse Spark's sizes with the heads of one rank of four; `sizes` replaces fields by their HF names.

    Layers alternate between sliding and full attention, so that two of them show both.
    """
    fields: dict[str, object] = {
        "vocab_size": 4096,
        "hidden_size": 8192,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": max(1, heads // 8),
        "head_dim": 64,
        "max_position_embeddings": 1 << 20,
        "rms_norm_eps": 1e-5,
        "post_norm_eps": 1e-8,
        "sliding_window": 2048,
        "layer_types": tuple("full_attention" if i % 2 else "sliding_attention" for i in range(layers)),
        "layer_rope_theta": tuple(0.0 if i % 2 else 500000.0 for i in range(layers)),
        "moe_hidden_size": 4096,
        "moe_intermediate_size": 4096,
        "num_local_experts": experts,
        "num_experts_per_tok": 8,
        "routed_scaling_factor": 1.0,
        "qk_scale_factor": 5.4730064863875,
        "output_multiplier": 0.17677669529663687,
        "final_logit_softcapping": 20.0,
        "residual_gate_temperature": 0.3,
        "eos_token_ids": (1,),
        "quantization": NVFP4 if nvfp4 else None,
    }
    return TargetConfig.model_validate(fields | sizes)


def tiny_config(layers: int = 3, *, nvfp4: bool = True, **sizes: int) -> TargetConfig:
    """A model small enough for the emulator; the window is shorter than the contexts worth testing."""
    small: dict[str, int] = {
        "vocab_size": 512, "hidden_size": 256, "moe_hidden_size": 128, "moe_intermediate_size": 128,
        "num_key_value_heads": 2, "sliding_window": 64, "num_experts_per_tok": 4, "max_position_embeddings": 16384,
    }  # fmt: skip
    return spark_config(layers, nvfp4=nvfp4, experts=16, heads=8, **(small | sizes))


def random_weights(
    config: TargetConfig,
    seed: int,
    device: torch.device,
    *,
    first_expert: int = 0,
    local_experts: int | None = None,
    rank: int = 0,
    ranks: int = 1,
    field_order: bool = False,
    made: Callable[[int], None] = lambda index: None,
) -> KernelWeights:
    """Rank `rank`'s share of random weights; every tensor is away from its neutral value, and layer i depends on the
    seed and i alone.

    With `local_experts` given, one rank's share is drawn directly, the same on every rank but for its rows of embedding
    and head, the experts in the kernels' layout, which is what
    makes full-size layers quick to build. field_order: NVFP4 words in field order; the
    weights are the same as in Marlin's only without `local_experts`. made: called with each layer that is there; those
    with BF16 experts come first, whose making takes more memory than they do.
    """
    layers: dict[int, KernelLayer] = {}
    for index in sorted(range(config.num_hidden_layers), key=config.nvfp4_experts):
        if local_experts is None:
            whole = random_layer(config, index, seed * 1000 + index + 1, device)
            part = share_layer(config, index, whole, rank=rank, ranks=ranks)
            layers[index] = prepare_layer(config, part, field_order=field_order)
        else:
            direct = _direct_layer(config, index, seed, device, first_expert, local_experts, ranks)
            layers[index] = replace(direct, field_order=field_order and direct.nvfp4)
        made(index)
    generator = torch.Generator(device).manual_seed(seed)
    own = torch.Generator(device).manual_seed(seed + 7907 * rank) if ranks > 1 else generator

    def normal(*shape: int, std: float, source: torch.Generator = generator) -> Tensor:
        return torch.randn(*shape, generator=source, device=device).mul_(std).to(torch.bfloat16)

    def share(std: float) -> Tensor:
        if local_experts is not None:
            return normal(config.vocab_size // ranks, config.hidden_size, std=std, source=own)
        return normal(config.vocab_size, config.hidden_size, std=std).chunk(ranks)[rank].contiguous()

    return KernelWeights(
        embedding=share(std=1.0),
        layers=tuple(layers[index] for index in range(config.num_hidden_layers)),
        final_norm=1 + normal(config.hidden_size, std=0.1),
        lm_head=share(std=4 * config.hidden_size**-0.5),
    )


def _direct_layer(
    config: TargetConfig, index: int, seed: int, device: torch.device, first_expert: int, local: int, ranks: int
) -> KernelLayer:
    m, inner = config.moe_hidden_size, config.moe_intermediate_size
    share = {
        "num_attention_heads": config.num_attention_heads // ranks,
        "num_key_value_heads": max(1, config.num_key_value_heads // ranks),
    }
    small = {"moe_hidden_size": 64, "moe_intermediate_size": 64}
    one = TargetConfig.model_validate(config.model_dump() | share | small)
    layer = random_layer(one, index, seed * 1000 + index + 1, device)  # everything but the latent sizes
    generator = torch.Generator(device).manual_seed(seed * 7919 + index)

    def normal(*shape: int, std: float) -> Tensor:
        return (torch.randn(*shape, generator=generator, device=device) * std).to(torch.bfloat16)

    layer = replace(
        layer,
        pre_expert_proj=normal(m // ranks, config.hidden_size, std=config.hidden_size**-0.5),
        pre_expert_norm=normal(m, std=0.1),
        post_expert_norm=normal(m, std=0.1),
        post_expert_proj=normal(config.hidden_size // ranks, m, std=m**-0.5),
        first_expert=first_expert,
    )
    prepared = prepare_layer(config, layer)
    if not config.nvfp4_experts(index):
        gate_up = torch.empty(local, 2 * inner, m, dtype=torch.bfloat16, device=device)
        down = torch.empty(local, m, inner, dtype=torch.bfloat16, device=device)
        for experts in (gate_up, down):
            for expert in experts:
                expert.copy_(normal(*expert.shape, std=expert.shape[1] ** -0.5))
        return replace(prepared, gate_up=gate_up, down=down)

    def words(*shape: int) -> Tensor:
        return torch.randint(-(2**31), 2**31, shape, generator=generator, device=device, dtype=torch.int32)

    def scales(*shape: int) -> Tensor:  # E5M3 bytes of block scales between 1/4 and 4
        exponent = torch.randint(20, 24, shape, generator=generator, device=device, dtype=torch.uint8)
        mantissa = torch.randint(0, 8, shape, generator=generator, device=device, dtype=torch.uint8)
        stored: Tensor = (exponent * 8 + mantissa).view(torch.float8_e4m3fn)
        return stored

    def global_scale(k: int) -> Tensor:  # code times block scale has a root mean square near 4.6
        scale: Tensor = (torch.rand(local, generator=generator, device=device) + 0.5) * k**-0.5
        return scale / 4.6

    return replace(
        prepared,
        gate_up=words(local, m // 16, 4 * inner),
        down=words(local, inner // 16, 2 * m),
        gate_up_block_scale=scales(local, m // 16, 2 * inner),
        down_block_scale=scales(local, inner // 16, m),
        gate_scale=global_scale(m),
        up_scale=global_scale(m),
        down_scale=global_scale(inner),
    )


@dataclass(frozen=True, slots=True)
class RandomStep:
    """A step with caches of `slots` slots per layer."""

    step: Step
    caches: list[tuple[Tensor, Tensor]]
    sequence: "Sequence"

    @classmethod
    def create(
        cls,
        config: TargetConfig,
        weights: KernelWeights,
        machine: Machine,
        *,
        row_cap: int,
        max_context: int,
        kv_dtype: str,
        mail: Mail | None = None,
        tuning: Mapping[str, Any] = MappingProxyType({}),
    ) -> "RandomStep":
        taps = tuple(range(0, config.num_hidden_layers, 2))
        step = Step(
            config,
            weights,
            machine,
            row_cap=row_cap,
            max_context=max_context + MAX_ROWS,
            kv_dtype=kv_dtype,
            taps=taps,
            mail=mail,
            tuning=tuning,
        )
        shape = (max_context + 3 * MAX_ROWS, step.instance.kv_heads, config.head_dim)
        dtype = CACHE_DTYPES[kv_dtype]
        caches = [
            (
                torch.empty(shape, dtype=dtype, device=machine.device),
                torch.empty(shape, dtype=dtype, device=machine.device),
            )
            for _ in weights.layers
        ]
        step.use_caches(caches)
        return cls(step, caches, Sequence())

    def fill(self, length: int, seed: int) -> None:
        """A context of `length` random keys and values at random slots, and random tokens after it.

        Everything that no committed position owns is NaN, and page-table entries past the context are out of range.
        """
        generator = torch.Generator().manual_seed(seed)
        device, rows = self.step.machine.device, self.step.instance.row_cap
        slots = self.caches[0][0].shape[0]
        self.sequence.length = length
        self.sequence.tokens = self.random_tokens((rows,), generator)
        self.sequence.slots = [torch.randperm(slots - 1, generator=generator)[: length + rows] + 1 for _ in range(2)]
        self.seek(0)
        gpu = torch.Generator(device).manual_seed(seed)
        for index, pair in enumerate(self.caches):
            full = self.step.config.is_full(index)
            where = (self.step.inputs.full_pages if full else self.step.inputs.sliding_pages)[:length].long()
            for cache in pair:
                content = torch.randn(length, *cache.shape[1:], generator=gpu, device=device).to(cache.dtype)
                bits = cache.view(torch.uint8)
                bits.fill_(0xFF)
                bits[where] = content.view(torch.uint8)

    def random_tokens(self, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        """Token ids; in loop-back those that this rank holds, since nobody else would send their embeddings."""
        first, count = 0, self.step.config.vocab_size
        if isinstance(self.step.mail, LoopBack):
            first, count = self.step.first_token, self.step.instance.vocab
        return first + torch.randint(0, count, shape, generator=generator)

    def seek(self, rows: int, source: "RandomStep | None" = None) -> None:
        """Sets the inputs to the state after `rows` of the sequence's tokens were committed; theirs come next.

        source: whose sequence to use (another step over the same caches).
        """
        sequence = (source or self).sequence
        inputs, length = self.step.inputs, sequence.length + rows
        left = min(len(sequence.tokens) - rows, len(inputs.token_ids))
        inputs.token_ids[:left].copy_(sequence.tokens[rows : rows + left])
        inputs.positions[:left].copy_(length + torch.arange(left))
        inputs.length.fill_(length)
        for order, pages, own in zip(
            sequence.slots,
            (inputs.full_pages, inputs.sliding_pages),
            (inputs.full_slots, inputs.sliding_slots),
            strict=True,
        ):
            pages.fill_(2**30)
            pages[:length] = order[:length].to(pages.device, torch.int32)
            own[:left] = order[length : length + left].to(own.device)


class Sequence:
    """A random context and the tokens after it."""

    length: int
    tokens: Tensor  # int64 [rows]
    slots: list[Tensor]  # int64 [length + rows] for full and for sliding layers
