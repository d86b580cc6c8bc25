"""The whole step as a server builds it, from SGLang's own parts: loaded target and draft, configurations, pools, tables
and worker class. The kernels run in the emulator; one prompt runs in SGLang, the long ones in the reference."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import sglang_draft
import torch
from conftest import target_config
from kernel_count import KernelCount
from test_forward import Immediate, Sequence

from sgl_muse_mega.checkpoint.draft import load_draft, save_draft
from sgl_muse_mega.checkpoint.random_weights import random_draft
from sgl_muse_mega.checkpoint.target import load_target
from sgl_muse_mega.config import DraftConfig, load_target_config
from sgl_muse_mega.reference.backend import ReferenceBackend
from sgl_muse_mega.serving import hooks, worker
from sgl_muse_mega.serving.spec import build_on
from sgl_muse_mega.speculative.generate import generate
from sgl_muse_mega.speculative.sampling import SamplingParams

WIDTH, NEW, PROMPT = 8, 6, 40
TAPS = (0, 1)


def draft_of(**changes: Any) -> DraftConfig:
    target = target_config()
    values: dict[str, Any] = {
        "vocab_size": target.vocab_size, "hidden_size": target.hidden_size, "intermediate_size": 192,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 128,
        "max_position_embeddings": 1024, "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "sliding_window": 20,
        "layer_types": ("sliding_attention",) * 2, "is_causal": False, "block_size": WIDTH, "conv_kernel_size": 2,
        "conv_group_size": 16, "selector_rank": 32, "selector_top_k": 16, "target_layer_ids": TAPS, "mask_token_id": 7,
        "output_multiplier": 0.6, "final_logit_softcapping": 20.0, "num_target_layers": target.num_hidden_layers,
    }  # fmt: skip
    return DraftConfig.model_validate(values | changes)


class Stream:
    """What SGLang's bookkeeping asks of a CUDA stream and an event."""

    def record(self) -> None:
        pass


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: None)
    monkeypatch.setattr(torch.cuda, "Event", Stream)


def served_step(runner: Any, folder: Path, draft: DraftConfig, monkeypatch: pytest.MonkeyPatch) -> Any:
    """(SGLang's draft module, its pool, its worker, our step): what there is when SGLang calls init_cuda_graphs."""
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
    from sglang.srt.speculative.dflash_worker_v2 import DFlashWorkerV2
    from sglang.srt.utils.hf_transformers_utils import get_config

    monkeypatch.setattr(runner.model.model.language_model, "layers_to_capture", list(TAPS))
    module = sglang_draft.load(folder, runner.model, draft)
    pool = MHATokenToKVPool(
        size=runner.token_to_kv_pool.size, page_size=1, dtype=torch.bfloat16, head_num=2, head_dim=128, layer_num=2,
        device="cpu", enable_memory_saver=False,
    )  # fmt: skip
    served = object.__new__(DFlashWorkerV2)
    served._target_worker = SimpleNamespace(model_runner=runner)
    hf_config = get_config(str(folder), trust_remote_code=False)
    served.draft_model_runner = SimpleNamespace(
        model_config=SimpleNamespace(hf_config=hf_config), token_to_kv_pool=pool
    )
    served.draft_model, served._noise_embed_scale, served.block_size = module, 1.0, WIDTH
    served._selector_sample, served._block_verification = None, False
    built = build_on(Immediate(sms=3), runner.model, runner.model_config.hf_config, rows=WIDTH)
    return module, pool, served, worker.build_step(built, served)


def batch_of(row: int, length: torch.Tensor, anchor: torch.Tensor) -> Any:
    from sglang.srt.speculative.dflash_worker_v2 import make_draft_input_v2

    seen = length.clone()
    seen.record_stream = lambda _stream: None  # type: ignore[method-assign]
    return SimpleNamespace(
        req_pool_indices=torch.tensor([row]), seq_lens=seen,
        spec_info=make_draft_input_v2(bonus_tokens=anchor, new_seq_lens=seen),
    )  # fmt: skip


def test_steps_of_a_request(
    runner: Any, checkpoint: Path, tmp_path: Path, plugins: None, streams: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sglang.srt.speculative.dflash_info_v2 import DFlashDraftInputV2

    config, draft = load_target_config(checkpoint), draft_of()
    save_draft(tmp_path, draft, random_draft(draft, 5))
    ids = torch.randint(10, 300, (PROMPT,), generator=torch.Generator().manual_seed(8))
    reference = ReferenceBackend(
        config, load_target(checkpoint, config), draft, load_draft(tmp_path, draft), max_context=256
    )
    steps = [
        event.tokens
        for event in generate(reference, ids.tolist(), SamplingParams(), width=WIDTH, max_new_tokens=NEW, stop_ids=())
    ]

    module, pool, served, full = served_step(runner, tmp_path, draft, monkeypatch)
    language_model = runner.model.model.language_model

    # A prompt by SGLang, its taps in the draft's cache as SGLang's own modules compute them.
    taken: list[torch.Tensor] = []
    watched = [language_model.layers[i].register_forward_hook(lambda _m, _a, out: taken.append(out[0])) for i in TAPS]
    language_model.layers_to_capture = []
    sequence = Sequence.prefill(runner, ids)
    for handle in watched:
        handle.remove()
    row = int(sequence.batch.req_pool_indices[0])
    table = runner.req_to_token_pool.req_to_token
    past = sglang_draft.context(module, torch.stack([stream.to(torch.bfloat16) for stream in taken]))
    for layer, (keys, values) in enumerate(zip(past.keys, past.values, strict=True)):
        pool.get_key_buffer(layer)[table[row, :PROMPT].long()] = keys
        pool.get_value_buffer(layer)[table[row, :PROMPT].long()] = values
    ahead = NEW + 2 * WIDTH
    table[row, PROMPT : PROMPT + ahead] = runner.token_to_kv_pool_allocator.alloc(ahead).to(torch.int32)

    published: list[torch.Tensor] = []
    length, anchor, emitted, counts = torch.tensor([PROMPT]), sequence.logits[0].argmax()[None], [], []
    assert int(anchor) == steps[0][0]
    while len(emitted) < NEW - 1:
        batch = batch_of(row, length, anchor)
        with KernelCount() as pytorch:  # all of a step is kernels of ours
            result = worker.run(full, served, batch, published.append)
        assert not pytorch.found
        counts.append(int(result.accept_lens))
        emitted += result.next_token_ids[: counts[-1]].tolist()
        assert isinstance(result.next_draft_input, DFlashDraftInputV2)
        length, anchor = result.new_seq_lens, result.next_draft_input.bonus_tokens
        assert published[-1] is length
    flat = [token for tokens in steps[1:] for token in tokens]
    assert emitted[: NEW - 1] == flat[: NEW - 1]
    assert counts[:-1] == [len(tokens) for tokens in steps[1:]][: len(counts) - 1]
    hooks.unwrap(hooks.FORWARD)
