"""The full-size pair of `full_size.py`, made in place on every rank's device, with the memory it takes."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from rank_workers import Tell
from torch import Tensor

from sgl_muse_mega.checkpoint.draft_share import share_draft
from sgl_muse_mega.checkpoint.random_weights import random_draft
from sgl_muse_mega.commands.bench_step import spark_draft
from sgl_muse_mega.config import DraftConfig, QuantizationConfig, TargetConfig
from sgl_muse_mega.megakernel.decode_backend import assemble
from sgl_muse_mega.megakernel.decode_loop import DecodeLoop
from sgl_muse_mega.megakernel.draft_weights import KernelDraft, fragment_order, prepare_draft
from sgl_muse_mega.megakernel.machine import Machine
from sgl_muse_mega.megakernel.place import Place
from sgl_muse_mega.megakernel.random_step import EXPERTS, HEADS, VOCABULARY, random_weights, spark_config, tiny_config
from sgl_muse_mega.megakernel.weights import KernelWeights

LAYERS = 62


@dataclass(frozen=True, slots=True)
class Sizes:
    """tiny: sizes that the emulator runs, to see that the script works."""

    layers: int
    experts: int = EXPERTS
    heads: int = HEADS
    top_k: int = 8
    tiny: bool = False

    def target(self) -> TargetConfig:
        """First and last layer with BF16 experts, the others NVFP4; every fourth layer attends to the whole context."""
        if self.tiny:
            config = tiny_config(
                self.layers, vocab_size=128, hidden_size=128, moe_hidden_size=64, moe_intermediate_size=64,
                num_local_experts=8, num_experts_per_tok=2, num_attention_heads=8, num_key_value_heads=4,
                sliding_window=32,
            )  # fmt: skip
        else:
            config = spark_config(
                self.layers, experts=self.experts, heads=self.heads, vocab_size=VOCABULARY,
                num_experts_per_tok=self.top_k,
            )  # fmt: skip
        ends = (f"model.language_model.layers.{index}.*" for index in (0, self.layers - 1))
        quantization = QuantizationConfig(quant_algo="NVFP4", group_size=16, exclude=tuple(ends))
        lists = {"layer_types": None, "layer_rope_theta": None}  # the published pattern
        fields = config.model_dump() | lists | {"quantization": quantization}
        return TargetConfig.model_validate(fields)

    def stock_shape(self, width: int) -> str:
        """The same sizes for the rival's make_models.py, which knows no tiny ones."""
        return f"{self.layers} {self.experts} {self.top_k} {self.heads} {self.heads // 8} {width}"

    def draft(self, target: TargetConfig) -> DraftConfig:
        if not self.tiny:
            return spark_draft(target)
        small: dict[str, Any] = {
            "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
            "num_key_value_heads": 2, "sliding_window": 40, "selector_rank": 32, "mask_token_id": 7,
            "output_multiplier": 0.5, "layer_types": ("sliding_attention",) * 2, "target_layer_ids": (0, 1),
        }  # fmt: skip
        return spark_draft(target, **small)


@dataclass(slots=True)
class Model:
    """One rank's share, in kernel order."""

    sizes: Sizes
    config: TargetConfig
    weights: KernelWeights
    draft_config: DraftConfig
    draft: KernelDraft
    seed: int

    @classmethod
    def make(cls, sizes: Sizes, machine: Machine, place: Place, seed: int, tell: Tell) -> "Model":
        """The draft first, while there is room for the whole of it; then layer by layer."""
        device, rank, ranks = machine.device, place.rank, place.ranks
        config = sizes.target()
        draft_config = sizes.draft(config)
        share = share_draft(draft_config, random_draft(draft_config, seed, device), rank=rank, ranks=ranks)
        later = torch.zeros(
            64, config.hidden_size, dtype=torch.bfloat16, device=device
        )  # stands for embedding and head
        mask = torch.full((config.hidden_size,), 0.5, dtype=torch.bfloat16, device=device)
        draft = prepare_draft(draft_config, replace(share, mask_embedding=mask), later, later)
        del share
        memory(machine, tell, "draft's share")
        local = config.num_local_experts // ranks
        weights = random_weights(
            config, seed, device, first_expert=rank * local, local_experts=local, rank=rank, ranks=ranks,
            made=lambda index: memory(machine, tell, f"layer {index}"),
        )  # fmt: skip
        draft = replace(draft, embedding=weights.embedding, lm_head=fragment_order(weights.lm_head))
        memory(machine, tell, "embedding and head")
        return cls(sizes, config, weights, draft_config, draft, seed)

    def loop(self, machine: Machine, place: Place, rows: int, context: int, room: int) -> DecodeLoop:
        """Steps of up to `rows` rows behind a random context of `context` positions, with room for as many more."""
        loop = assemble(
            self.config, self.weights, self.draft_config, self.draft, machine=machine, width=rows,
            max_context=context + room, kv_dtype="bf16" if self.sizes.tiny else "fp8", place=place,
        )  # fmt: skip
        assert loop.decode.draft is not None
        loop.length = context
        fill(machine, self.seed, [*loop.caches, *loop.decode.draft.caches])
        loop.decode.declare(loop.caches)
        return loop


def fill(machine: Machine, seed: int, caches: list[tuple[Tensor, Tensor]]) -> None:
    """Random keys and values."""
    generator = torch.Generator(machine.device).manual_seed(seed)
    for cache in (part for pair in caches for part in pair):
        content = torch.randn(cache.shape, generator=generator, device=machine.device)
        cache.view(torch.uint8).copy_(content.to(cache.dtype).view(torch.uint8))


def memory(machine: Machine, tell: Tell, what: str) -> None:
    """Tells what the device holds in GB, what is reserved, and what is free; gives unused reserves back first."""
    if machine.device.type != "cuda":
        tell("memory", {"after": what, "held": 0.0, "reserved": 0.0, "free": 0.0})
        return
    torch.cuda.synchronize(machine.device)
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info(machine.device)
    held, reserved = torch.cuda.memory_allocated(machine.device), torch.cuda.memory_reserved(machine.device)
    tell("memory", {"after": what, "held": held / 1e9, "reserved": reserved / 1e9, "free": free / 1e9})
