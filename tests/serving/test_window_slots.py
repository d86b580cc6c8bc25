"""Whole steps far behind the window: SGLang's hybrid pools with an fp8 cache, slots of the sliding pool given back
while the request runs and taken by another, and a prompt that comes from the prefix cache."""

from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import target_config
from test_whole_step import WIDTH, batch_of, draft_of, served_step, streams  # noqa: F401

from sgl_muse_mega.checkpoint.draft import load_draft, save_draft
from sgl_muse_mega.checkpoint.random_weights import random_draft
from sgl_muse_mega.checkpoint.target import load_target
from sgl_muse_mega.config import load_target_config
from sgl_muse_mega.reference.backend import ReferenceBackend
from sgl_muse_mega.serving import hooks, spec, worker

NAN = 0x7F  # e4m3
NEAR_TIE = 0.02  # of a logit, between the token and the reference's first choice
SLOTS, SLIDING_SLOTS = 2048, 1024


def halves_to_pairs(keys: torch.Tensor) -> torch.Tensor:
    """Rotated dimensions side by side, as SGLang permutes q and k at load."""
    return keys.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)


@dataclass
class Request:
    """One request's row of SGLang's tables, whose slots are scattered among those of others."""

    runner: Any
    row: int
    chance: torch.Generator
    held: int = 0  # positions that have a slot
    evicted: int = 0  # positions whose slot of the sliding pool was given back
    taken: list[torch.Tensor] = field(default_factory=list)

    @property
    def slots(self) -> torch.Tensor:
        table: torch.Tensor = self.runner.req_to_token_pool.req_to_token[self.row]
        return table

    def reserve(self, length: int) -> None:
        if length > self.held:
            new = self.runner.token_to_kv_pool_allocator.alloc(length - self.held)
            self.slots[self.held : length] = new[torch.randperm(len(new), generator=self.chance)].to(torch.int32)
            self.held = length

    def evict(self, request: Any, length: int) -> None:
        """SGLang's own rule for what left the window; somebody else takes the slots, and writes what is no number."""
        from sglang.srt.mem_cache.common import free_swa_out_of_window_slots

        pool, allocator = self.runner.token_to_kv_pool, self.runner.token_to_kv_pool_allocator
        mapped = pool.full_to_swa_index_mapping[self.slots[: self.held].long()]
        free_swa_out_of_window_slots(
            request, length - 1, sliding_window_size=target_config().sliding_window - 1, page_size=1,
            req_to_token_pool=self.runner.req_to_token_pool, token_to_kv_pool_allocator=allocator,
        )  # fmt: skip
        left = mapped[self.evicted : request.kv.swa_evicted]
        self.evicted = request.kv.swa_evicted
        if len(left):
            self.taken.append(allocator.swa_attn_allocator.alloc(len(left)))
            for layer in range(target_config().num_hidden_layers):
                if not target_config().is_full(layer):
                    for buffer in (pool.get_key_buffer(layer), pool.get_value_buffer(layer)):
                        buffer.view(torch.uint8)[torch.cat((left, self.taken[-1]))] = NAN


def held_kv(row: int) -> Any:
    """What the rule reads of a request whose prompt is not protected by the prefix cache."""
    kv = SimpleNamespace(req_pool_idx=row, holds_kv=True, cache_protected_len=0, swa_evicted=0)
    kv.swa_dead_lo = lambda _page_size: 0
    kv.get_evicted_seqlen = lambda _component: kv.swa_evicted
    kv.set_evicted_seqlen = lambda _component, length: setattr(kv, "swa_evicted", length)
    return SimpleNamespace(kv=kv)


def fp8_pools(runner: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang wants a particular CPU for an fp8 cache of its own; its pools do not."""
    from sglang.srt.mem_cache.allocator.swa import SWATokenToKVPoolAllocator
    from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool

    config, dtype = target_config(), torch.float8_e4m3fn
    layers = range(config.num_hidden_layers)
    pool = SWAKVPool(
        size=SLOTS, size_swa=SLIDING_SLOTS, page_size=1, dtype=dtype, head_num=config.num_key_value_heads,
        head_dim=config.head_dim, swa_attention_layer_ids=[i for i in layers if not config.is_full(i)],
        full_attention_layer_ids=[i for i in layers if config.is_full(i)], device="cpu",
    )  # fmt: skip
    allocator = SWATokenToKVPoolAllocator(SLOTS, SLIDING_SLOTS, 1, dtype, "cpu", pool, need_sort=False)
    monkeypatch.setattr(runner, "token_to_kv_pool", pool)
    monkeypatch.setattr(runner, "token_to_kv_pool_allocator", allocator)
    monkeypatch.setitem(spec.KV_DTYPES, "bfloat16", "fp8")


@pytest.mark.parametrize(("prompt", "new"), [(120, 45), (400, 16)])
def test_tokens_behind_evicted_slots(
    prompt: int, new: int, runner: Any, checkpoint: Path, tmp_path: Path, plugins: None, streams: None,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Every token is the reference's over the same fp8 cache, given the tokens before it."""
    fp8_pools(runner, monkeypatch)
    config, draft = load_target_config(checkpoint), draft_of()
    save_draft(tmp_path, draft, random_draft(draft, 5))
    _, draft_pool, served, full = served_step(runner, tmp_path, draft, monkeypatch)
    target_pool = runner.token_to_kv_pool
    for pool, layers in ((target_pool, config.num_hidden_layers), (draft_pool, draft.num_hidden_layers)):
        for layer in range(layers):  # slot 0, which is nobody's, included: no row of this request may need it
            for buffer in (pool.get_key_buffer(layer), pool.get_value_buffer(layer)):
                buffer.copy_(torch.full(buffer.shape, float("nan")).to(buffer.dtype))

    ids = torch.randint(10, 300, (prompt,), generator=torch.Generator().manual_seed(prompt)).tolist()
    reference = ReferenceBackend(
        config, load_target(checkpoint, config), draft, load_draft(tmp_path, draft), max_context=512, kv_dtype="fp8"
    )
    anchor = reference.prefill(ids).argmax()[None]
    request, chance = held_kv(1), torch.Generator().manual_seed(9)
    runner.token_to_kv_pool_allocator.swa_attn_allocator.alloc(37)  # so that the pools' slots are not the same
    others = runner.token_to_kv_pool_allocator.alloc(300)
    runner.token_to_kv_pool_allocator.free(others[torch.randperm(300, generator=chance)[:200]])
    mine = Request(runner, 1, chance)
    mine.reserve(prompt)
    copy_prompt(reference, target_pool, draft_pool, mine.slots[:prompt].long())
    mine.evict(request, prompt)  # the prompt came from the prefix cache, which kept the window alone

    length, text, scheduled = torch.tensor([prompt]), [int(anchor)], prompt
    while len(text) < new:
        mine.evict(request, scheduled)  # the scheduler's length is that of the step before
        scheduled = int(length)
        mine.reserve(scheduled + 2 * WIDTH)
        result = worker.run(full, served, batch_of(1, length, anchor), None)
        tokens = result.next_token_ids[: int(result.accept_lens)]
        assert len(tokens), "a step commits one token at least"
        logits = reference.verify([text[-1], *tokens[:-1].tolist()])
        reference.commit(len(tokens))
        behind = logits.max(dim=1).values - logits.gather(1, tokens[:, None])[:, 0]
        assert behind.max() <= NEAR_TIE, (len(text), behind)
        text += tokens.tolist()
        length, anchor = result.new_seq_lens, result.next_draft_input.bonus_tokens
        assert int(length) == prompt + len(text) - 1
    assert mine.evicted >= prompt + new - 2 * WIDTH - config.sliding_window
    hooks.unwrap(hooks.FORWARD)


def copy_prompt(reference: ReferenceBackend, pool: Any, draft_pool: Any, slots: torch.Tensor) -> None:
    """The reference's keys and values of the prompt into SGLang's pools; of what left the window nothing."""
    config, mapping = target_config(), pool.full_to_swa_index_mapping
    places = torch.arange(len(slots))
    windowed = places[max(0, len(slots) + 1 - config.sliding_window) :]
    for layer, cache in enumerate(reference._caches):
        seen = places if config.is_full(layer) else windowed
        target = slots[seen] if config.is_full(layer) else mapping[slots[seen]]
        keys, values = cache.read(reference._full_or_sliding(layer).slots(seen), torch.float32)
        for buffer, rows in (
            (pool.get_key_buffer(layer), halves_to_pairs(keys)),
            (pool.get_value_buffer(layer), values),
        ):
            buffer.view(torch.uint8)[target] = rows.to(buffer.dtype).view(torch.uint8)
    windowed = places[max(0, len(slots) + 1 - draft_of().sliding_window) :]
    for layer, cache in enumerate(reference._draft_caches):
        keys, values = cache.read(reference._draft_table.slots(windowed), torch.bfloat16)
        draft_pool.get_key_buffer(layer)[slots[windowed]] = keys
        draft_pool.get_value_buffer(layer)[slots[windowed]] = values
