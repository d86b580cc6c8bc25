"""The target's forward under SGLang's own model runner: its weights, pools and tables, our kernels in the emulator."""

from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import packed_metadata, paged_metadata, target_config
from kernel_count import KernelCount
from torch import Tensor

from sgl_muse_mega.emulator.machine import Launch
from sgl_muse_mega.emulator.stepper import Emulator
from sgl_muse_mega.serving import hooks
from sgl_muse_mega.serving.spec import build_on, split_head
from sgl_muse_mega.serving.target import TargetMegakernel

PROMPT, NEW = 45, 9  # past the window of 24
IDS = torch.randint(3, 300, (PROMPT + NEW,), generator=torch.Generator().manual_seed(5))


class Immediate(Emulator):
    """Launches run where they are enqueued, as they seem to on a GPU."""

    def enqueue(self, launch: Launch) -> None:
        super().enqueue(launch)
        self.synchronize()


@dataclass
class Sequence:
    """A request in the middle of its decoding, in SGLang's own batch."""

    runner: Any
    batch: Any
    logits: list[Tensor]

    @classmethod
    def prefill(cls, runner: Any, ids: Tensor) -> "Sequence":
        from sglang.benchmark import one_batch
        from sglang.srt.managers.schedule_batch import Req
        from sglang.srt.sampling.sampling_params import SamplingParams

        runner.req_to_token_pool.clear()
        runner.token_to_kv_pool_allocator.clear()
        request = Req(
            rid=0,
            origin_input_text="",
            origin_input_ids=array("q", ids.tolist()),
            sampling_params=SamplingParams(temperature=0, max_new_tokens=64),
        )
        request.full_untruncated_fill_ids = request.origin_input_ids
        request.logprob_start_len = -1
        request.extend_end = len(ids)
        _, logits, batch = one_batch.extend([request], runner)
        return cls(runner, batch, [logits[0]])

    def decode(self, ids: Tensor) -> "Sequence":
        from sglang.benchmark import one_batch

        for token in ids:
            _, logits = one_batch.decode(token[None], self.batch, self.runner)
            self.logits.append(logits[0].clone())
        return self


@pytest.fixture(scope="module")
def stock(runner: Any) -> tuple[Tensor, Tensor]:
    """SGLang's logits of the decoded rows and the streams after layers 0 and 1, one token at a time."""
    layers, streams = runner.model.model.language_model.layers, []
    handles = [layers[i].register_forward_hook(lambda _m, _a, out: streams.append(out[0])) for i in (0, 1)]
    sequence = Sequence.prefill(runner, IDS[:PROMPT])
    streams.clear()
    sequence.decode(IDS[PROMPT:])
    for handle in handles:
        handle.remove()
    taps = torch.cat([torch.cat(streams[i : i + 2], dim=1) for i in range(0, len(streams), 2)])
    return torch.stack(sequence.logits[1:]), taps


@pytest.fixture
def built(runner: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Makes a built megakernel that SGLang dispatches to."""
    from sglang.srt.kernel_plugins.nvidia.binding import MegakernelBinding, _Dispatch

    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)

    def install(rows: int) -> TargetMegakernel:
        made = build_on(Immediate(sms=3), runner.model, runner.model_config.hf_config, rows=rows)
        binding = MegakernelBinding(model=runner.model)
        runner.model.forward = _Dispatch(built=made, original=runner.model.forward, binding=binding).wrapped()
        return made

    yield install
    runner.model.__dict__.pop("forward", None)
    hooks.unwrap(hooks.FORWARD)


def close(ours: Tensor, theirs: Tensor) -> None:
    """Rounding alone; now and then it tips a near tie of the router, and a row goes to another expert."""
    difference = ((ours.double() - theirs.double()).norm(dim=1) / theirs.double().norm(dim=1)).sort().values
    assert difference[len(difference) // 2] < 0.01
    assert difference[int(0.7 * len(difference))] < 0.03


@pytest.mark.parametrize("head", ["the kernels'", "SGLang's"])
def test_decode_steps_of_a_whole_text(
    runner: Any, built: Any, stock: tuple[Tensor, Tensor], monkeypatch: Any, head: str
) -> None:
    """Prefill by SGLang, then every token through plan and forward, reading and writing SGLang's caches; with the head
    of a single rank, and with that of several."""
    backend = runner.attn_backend
    original = backend.init_forward_metadata

    def prepare(forward_batch: Any) -> None:
        original(forward_batch)
        if forward_batch.forward_mode.is_decode():
            backend.forward_metadata = paged_metadata(runner, forward_batch)

    monkeypatch.setattr(backend, "init_forward_metadata", prepare)
    made = built(1)
    count = NEW
    if head == "SGLang's":
        made._head, count = split_head(runner.model), 3
        monkeypatch.setattr(made.step, "launch_head", None)  # it must not be asked
    sequence = Sequence.prefill(runner, IDS[:PROMPT]).decode(IDS[PROMPT : PROMPT + count])
    close(torch.stack(sequence.logits[1:]), stock[0][:count])
    assert made.coverage.kernels == {"decode steps": count}
    assert made.coverage.sglang == {"extend steps": 1}


@pytest.mark.parametrize("tables", ["paged", "packed"])
def test_verify_step(
    runner: Any, built: Any, stock: tuple[Tensor, Tensor], tables: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eight rows at once behind SGLang's prompt: logits and the draft's taps of every row."""
    from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardMode

    made = built(8)
    sequence = Sequence.prefill(runner, IDS[:PROMPT])
    monkeypatch.setattr(runner.model.model.language_model, "layers_to_capture", [1, 0])
    request = sequence.batch.req_pool_indices
    slots = runner.token_to_kv_pool_allocator.alloc(8)
    runner.req_to_token_pool.req_to_token[int(request[0]), PROMPT : PROMPT + 8] = slots.to(torch.int32)
    batch = SimpleNamespace(
        forward_mode=ForwardMode.TARGET_VERIFY,
        batch_size=1,
        input_ids=IDS[PROMPT : PROMPT + 8],
        positions=torch.arange(PROMPT, PROMPT + 8),
        seq_lens=torch.tensor([PROMPT]),
        req_pool_indices=request,
        out_cache_loc=slots,
        capture_hidden_mode=CaptureHiddenMode.FULL,
        lora_ids=None,
    )
    metadata = paged_metadata(runner, batch) if tables == "paged" else packed_metadata(runner, batch, 23)
    view = SimpleNamespace(metadata=metadata, kv_pool=SimpleNamespace(pool=runner.token_to_kv_pool))
    planned = made.plan(batch.input_ids, batch)
    assert (planned.mode, planned.rows) == ("target_verify", 8)
    step = SimpleNamespace(rows=8, view=view)
    made.bind(runner.token_to_kv_pool)
    with KernelCount() as pytorch:  # nothing but kernels of ours
        out = made.forward(step, runner.model.forward, batch.input_ids, batch.positions, batch)
    assert not pytorch.found
    close(out.next_token_logits, stock[0][:8])
    assert out.hidden_states.shape == (8, 2 * target_config().hidden_size)
    close(out.hidden_states, stock[1][:8])


def test_weights_are_those_of_the_server(runner: Any, built: Any) -> None:
    """No second copy: everything but the residual gates' views lies in SGLang's own storage."""
    made = built(1)
    owned = {p.untyped_storage().data_ptr() for p in runner.model.parameters()}
    owned |= {b.untyped_storage().data_ptr() for b in runner.model.buffers()}
    weights = made.step.weights
    held = [weights.embedding, weights.final_norm, weights.lm_head]
    for layer in weights.layers:
        held += [t for name in layer.__slots__ if isinstance(t := getattr(layer, name), Tensor)]
    assert {t.untyped_storage().data_ptr() for t in held} <= owned


def test_batches_that_sglang_runs_itself(runner: Any, built: Any) -> None:
    from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardMode

    def batch(mode: str, rows: int = 1, **changes: Any) -> Any:
        values = {
            "forward_mode": ForwardMode[mode], "batch_size": 1, "input_ids": IDS[:rows], "lora_ids": None,
            "capture_hidden_mode": CaptureHiddenMode.NULL,
        }  # fmt: skip
        return SimpleNamespace(**(values | changes))

    decode, verify = built(1), built(8)
    asked = [
        (decode, batch("DECODE"), None),
        (decode, batch("EXTEND", 5), "extend steps"),
        (decode, batch("TARGET_VERIFY", 8), "target verify steps"),
        (decode, batch("DECODE", 2, batch_size=2), "steps of more than one request"),
        (decode, batch("DECODE", capture_hidden_mode=CaptureHiddenMode.LAST), "decode steps that return hidden states"),
        (decode, batch("DECODE", lora_ids=["adapter"]), "steps with LoRA adapters"),
        (decode, batch("DECODE", lora_ids=[None]), None),
        (verify, batch("TARGET_VERIFY", 8, capture_hidden_mode=CaptureHiddenMode.FULL), None),
        (verify, batch("TARGET_VERIFY", 8, input_ids=None), "steps of another width than 8"),
        # A last piece of a prompt that is as long as a verify step is none: the mode decides, not the shape.
        (verify, batch("EXTEND", 8), "extend steps"),
        (verify, batch("TARGET_VERIFY", 4), "steps of another width than 8"),
    ]
    for made, each, reason in asked:
        assert made.declines(each) == reason
        assert (made.plan(each.input_ids, each) is None) is (reason is not None)
