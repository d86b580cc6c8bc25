"""A small draft on the emulator beside the reference draft, over a random paged context."""

from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sgl_muse_mega.checkpoint.random_weights import random_draft
from sgl_muse_mega.config import DraftConfig
from sgl_muse_mega.emulator.machine import PLAIN, Schedule
from sgl_muse_mega.emulator.stepper import Emulator
from sgl_muse_mega.megakernel.decode_request import request_words
from sgl_muse_mega.megakernel.draft_instance import TargetEnds
from sgl_muse_mega.megakernel.draft_scratch import DecodeState
from sgl_muse_mega.megakernel.draft_step import DraftStep
from sgl_muse_mega.megakernel.draft_weights import prepare_draft
from sgl_muse_mega.megakernel.scratch import StepInputs
from sgl_muse_mega.reference.cache import KVCache
from sgl_muse_mega.reference.draft import ReferenceDraft
from sgl_muse_mega.speculative.sampling import SamplingParams

EMBEDDING_EPS = 1e-5


def draft_config(**changes: Any) -> DraftConfig:
    layers = changes.get("num_hidden_layers", 2)
    small: dict[str, Any] = {
        "vocab_size": 320, "hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": layers,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 128, "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "sliding_window": 90,
        "layer_types": ("sliding_attention",) * layers, "is_causal": False, "block_size": 8, "conv_kernel_size": 2,
        "conv_group_size": 16, "selector_rank": 32, "selector_top_k": 16, "target_layer_ids": (0, 2, 3),
        "mask_token_id": 7, "output_multiplier": 0.5, "final_logit_softcapping": 20.0, "num_target_layers": 6,
    }  # fmt: skip
    return DraftConfig.model_validate({**small, **changes})


class DraftCase:
    """The kernels, the reference and what both start from."""

    def __init__(
        self, config: DraftConfig, *, row_cap: int = 8, sms: int = 3, seed: int = 1, max_context: int = 400,
        first_epoch: int = 0, sources: Path | None = None,
    ) -> None:  # fmt: skip
        """sources: another folder than the package's csrc."""
        generator = torch.Generator().manual_seed(seed)
        self.config, self.row_cap, self.generator = config, row_cap, generator
        vocabulary = (config.vocab_size, config.hidden_size)
        embedding = torch.randn(vocabulary, generator=generator).to(torch.bfloat16)
        lm_head = (torch.randn(vocabulary, generator=generator) * 4 * config.hidden_size**-0.5).to(torch.bfloat16)
        weights = random_draft(config, seed)
        self.reference = ReferenceDraft(config, weights, embedding, lm_head, EMBEDDING_EPS)
        self.emulator = Emulator(sms=sms, sources=sources)
        device = self.emulator.device
        self.inputs = StepInputs.allocate(row_cap, max_context + row_cap, device)
        shape = (row_cap, len(config.target_layer_ids), config.hidden_size)
        self.taps = torch.randn(shape, generator=generator).to(torch.bfloat16)
        self.state = DecodeState.allocate(row_cap, device)
        self.step = DraftStep(
            config, prepare_draft(config, weights, embedding, lm_head), self.emulator, self.inputs, self.taps,
            self.state, target=TargetEnds(EMBEDDING_EPS, 0.5, 20.0), first_epoch=first_epoch,
        )  # fmt: skip
        slots = max_context + row_cap + 40
        cache_shape = (slots, config.num_key_value_heads, config.head_dim)
        self.caches = [
            (torch.empty(cache_shape, dtype=torch.bfloat16), torch.empty(cache_shape, dtype=torch.bfloat16))
            for _ in range(config.num_hidden_layers)
        ]
        self.step.use_caches(self.caches)
        self.slots = torch.randperm(slots - 1, generator=generator)[: max_context + row_cap] + 1
        self.step.pages.copy_(self.slots[: len(self.step.pages)])

    def fill(self, length: int, anchor: int) -> None:
        """Random context of `length` positions; what no position owns is NaN."""
        self.inputs.length.fill_(length)
        self.inputs.token_ids.fill_(-1)
        self.inputs.token_ids[0] = anchor
        for pair in self.caches:
            for cache in pair:
                cache.fill_(float("nan"))
                content = torch.randn(length, *cache.shape[1:], generator=self.generator)
                cache[self.slots[:length]] = content.to(torch.bfloat16)

    def request(self, *, temperature: float = 0.0, seed: int = 0) -> None:
        params = SamplingParams(temperature=temperature, seed=seed)
        self.state.request.copy_(torch.tensor(request_words(params, max_new_tokens=100, max_context=400)))

    def run(self, schedule: Schedule = PLAIN) -> None:
        """Runs what was launched, over declared memory."""
        self.emulator.schedule = schedule
        self.emulator.synchronize()

    def declare(self) -> None:
        self.step.activations.poison()
        self.emulator.fault_record.zero_()
        self.emulator.declare(self.memory())

    def memory(self) -> list[tuple[str, Tensor, bool, bool]]:
        step = self.step
        memory: list[tuple[str, Tensor, bool, bool]] = [("fault_record", self.emulator.fault_record, False, True)]
        memory += [(f"inputs.{f.name}", getattr(self.inputs, f.name), False, True) for f in fields(self.inputs)]
        memory += [(f"state.{f.name}", getattr(self.state, f.name), False, True) for f in fields(self.state)]
        memory += step.memory()
        memory.append(("taps", self.taps, True, True))
        return memory

    # ---- the reference ----

    def reference_caches(self) -> list[KVCache]:
        caches = []
        for keys, values in self.caches:
            cache = KVCache(keys.shape[0], keys.shape[1], keys.shape[2], torch.bfloat16, torch.device("cpu"))
            every = torch.arange(keys.shape[0])
            cache.write(every, keys.clone(), values.clone())
            caches.append(cache)
        return caches

    def reference_block(self, anchor: int, length: int, rows: int) -> Tensor:
        start = max(0, length + 1 - self.config.sliding_window)
        ids = torch.full((rows,), self.config.mask_token_id)
        ids[0] = anchor
        return self.reference.block(ids, length, self.slots[start:length], start, self.reference_caches())
