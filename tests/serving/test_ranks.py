"""Several ranks: SGLang's shares as the kernels', a step of all ranks together, and how they find each other."""

import json
import logging
import subprocess
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import paged_metadata, target_config
from torch import Tensor

from sgl_muse_mega.checkpoint.target import load_target
from sgl_muse_mega.emulator.stepper import EmulatedRanks
from sgl_muse_mega.errors import UserError
from sgl_muse_mega.megakernel.place import Place
from sgl_muse_mega.megakernel.weights import prepare
from sgl_muse_mega.serving import hooks, ranks, reasons, switches
from sgl_muse_mega.serving.spec import build_on
from sgl_muse_mega.serving.weights import kernel_weights, weight_problems

RANKS, PROMPT, ROWS = 2, 40, 8
IDS = torch.randint(3, 300, (PROMPT + ROWS,), generator=torch.Generator().manual_seed(9))


class Shared:
    """A module of SGLang's with other attributes here and there."""

    def __init__(self, base: Any, **changes: Any) -> None:
        self.__dict__.update(changes, _base=base)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._base, name)


def block(weight: Tensor, rank: int, dim: int = 0) -> Tensor:
    return weight.detach().chunk(RANKS, dim)[rank].contiguous()


def weighing(weight: Tensor) -> Any:
    return SimpleNamespace(weight=weight)


def share(model: Any, rank: int) -> Any:
    """What SGLang's rank `rank` of two would hold of a model that a single rank has loaded."""
    text, c = model.model.language_model, target_config()
    q, kv = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim

    def layer(whole: Any) -> Any:
        attention, moe = whole.self_attn, whole.mlp
        qkv = torch.cat([block(part, rank) for part in attention.qkv_proj.weight.detach().split([q, kv, kv, q])])
        experts = Shared(
            moe.experts,
            gate_up_proj=block(moe.experts.gate_up_proj, rank),
            down_proj=block(moe.experts.down_proj, rank),
        )
        o_proj = weighing(block(attention.o_proj.weight, rank, 1))
        return Shared(whole, self_attn=Shared(attention, qkv_proj=weighing(qkv), o_proj=o_proj),
                      mlp=Shared(moe, experts=experts))  # fmt: skip

    shared = Shared(text, layers=[layer(each) for each in text.layers],
                    embed_tokens=weighing(block(text.embed_tokens.weight, rank)))  # fmt: skip
    return Shared(
        model, model=SimpleNamespace(language_model=shared), lm_head=weighing(block(model.lm_head.weight, rank))
    )


def test_shares_are_those_of_the_checkpoint(runner: Any, checkpoint: Path) -> None:
    config = target_config()
    for rank in range(RANKS):
        made = kernel_weights(share(runner.model, rank), config, rank, RANKS)
        expected = prepare(config, load_target(checkpoint, config, rank=rank, ranks=RANKS))
        assert weight_problems(config, made, RANKS) == []
        pairs = [(made, expected), *zip(made.layers, expected.layers, strict=True)]
        for ours, theirs in pairs:
            for name in (f.name for f in fields(theirs)):
                mine, wanted = getattr(ours, name), getattr(theirs, name)
                if name.endswith(("alpha", "beta")):  # SGLang keeps the stored gate in bf16
                    torch.testing.assert_close(mine, wanted, atol=5e-3, rtol=5e-3)
                elif isinstance(wanted, Tensor):
                    assert torch.equal(mine, wanted), (rank, name)
                elif name != "layers":
                    assert mine == wanted, (rank, name)


def test_a_padded_vocabulary_is_refused(runner: Any) -> None:
    model = share(runner.model, 1)
    padded = torch.zeros(192, target_config().hidden_size, dtype=torch.bfloat16)
    model.model.language_model.embed_tokens.weight = model.lm_head.weight = padded
    config = target_config()
    found = weight_problems(config, kernel_weights(model, config, 1, RANKS), RANKS)
    assert ["shape [192, 128] instead of [160, 128]" in each for each in found] == [True, True]


class Pool:
    """A rank's KV heads of a single rank's pool, in memory of their own."""

    def __init__(self, pool: Any, rank: int) -> None:
        layers = range(target_config().num_hidden_layers)
        self.pairs = [
            (block(pool.get_key_buffer(i), rank, 1), block(pool.get_value_buffer(i), rank, 1)) for i in layers
        ]

    def get_key_buffer(self, layer: int) -> Tensor:
        return self.pairs[layer][0]

    def get_value_buffer(self, layer: int) -> Tensor:
        return self.pairs[layer][1]


@pytest.fixture
def unwrapped() -> Any:
    yield
    hooks.unwrap(hooks.FORWARD)


@pytest.mark.usefixtures("unwrapped")
def test_a_verify_step_of_two_ranks(runner: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind SGLang's own prompt: streams, taps and logits of both are those of one rank, which test_forward.py checks
    against SGLang's."""
    from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardMode
    from test_forward import Immediate, Sequence

    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    sequence = Sequence.prefill(runner, IDS[:PROMPT])
    monkeypatch.setattr(runner.model.model.language_model, "layers_to_capture", [1, 0])
    request = sequence.batch.req_pool_indices
    slots = runner.token_to_kv_pool_allocator.alloc(ROWS)
    runner.req_to_token_pool.req_to_token[int(request[0]), PROMPT : PROMPT + ROWS] = slots.to(torch.int32)
    batch = SimpleNamespace(
        forward_mode=ForwardMode.TARGET_VERIFY, batch_size=1, input_ids=IDS[PROMPT:], lora_ids=None,
        positions=torch.arange(PROMPT, PROMPT + ROWS), seq_lens=torch.tensor([PROMPT]), req_pool_indices=request,
        out_cache_loc=slots, capture_hidden_mode=CaptureHiddenMode.FULL,
    )  # fmt: skip
    metadata = paged_metadata(runner, batch)
    pool, hf_config = runner.token_to_kv_pool, runner.model_config.hf_config

    machines = EmulatedRanks(RANKS)
    asked: list[Tensor] = []

    def logits_processor(input_ids: Tensor, hidden: Tensor, lm_head: Any, forward_batch: Any) -> Any:
        assert forward_batch is batch
        asked.append(hidden)
        return SimpleNamespace(next_token_logits=hidden.float() @ lm_head.weight.float().T, hidden_states=hidden)

    pools = [Pool(pool, rank) for rank in range(RANKS)]
    built = []
    for rank in range(RANKS):
        model = Shared(share(runner.model, rank), logits_processor=logits_processor)
        mail = machines.mail(rank)
        made = build_on(machines.machines[rank], model, hf_config, rows=ROWS, place=Place(mail, None))  # type: ignore[arg-type]
        assert f"rank {rank} of {RANKS}" in made.summary()
        assert made.coverage.rank == rank
        view = SimpleNamespace(metadata=metadata, kv_pool=SimpleNamespace(pool=pools[rank]))
        made.launch(view, batch.input_ids, batch.positions, batch)
        built.append(made)
    machines.attach([made.step for made in built], [each.pairs for each in pools])
    machines.synchronize()
    outputs = [made.output(batch.input_ids, batch) for made in built]

    alone = build_on(Immediate(sms=3), runner.model, hf_config, rows=ROWS)
    view = SimpleNamespace(metadata=metadata, kv_pool=SimpleNamespace(pool=pool))
    alone.launch(view, batch.input_ids, batch.positions, batch)
    single = alone.output(batch.input_ids, batch)
    streams = [made.step.activations.stream[:ROWS] for made in built]
    assert torch.equal(streams[0], streams[1])
    assert torch.equal(asked[0], asked[1])
    difference = (streams[0] - alone.step.activations.stream[:ROWS]).norm(dim=1) / streams[0].norm(dim=1)
    assert difference.median() < 0.01
    assert torch.equal(outputs[0].hidden_states, outputs[1].hidden_states)
    assert outputs[0].hidden_states.shape == single.hidden_states.shape
    softcap, scale = target_config().final_logit_softcapping, target_config().output_multiplier
    logits = torch.cat([output.next_token_logits for output in outputs], dim=1) * scale
    ours, theirs = softcap * torch.tanh(logits / softcap), single.next_token_logits
    assert ((ours - theirs).norm(dim=1) / theirs.norm(dim=1)).median() < 0.01
    for index in range(target_config().num_hidden_layers):  # the rows' keys went to the same slots
        mapping = pool.full_to_swa_index_mapping
        where = slots if target_config().is_full(index) else mapping[slots]
        keys = torch.cat([each.get_key_buffer(index)[where] for each in pools], dim=1)
        assert (keys.float() - pool.get_key_buffer(index)[where].float()).norm() < 0.02 * keys.float().norm()


def test_the_group(monkeypatch: pytest.MonkeyPatch) -> None:
    def gather(found: list[Any], value: Any, group: Any) -> None:
        assert group == "the ranks"
        found[:] = [b"zero", value]

    monkeypatch.setattr(torch.distributed, "all_gather_object", gather)
    group = ranks.ServerGroup(1, 2, "the ranks")
    assert group.gather(b"one") == [b"zero", b"one"]

    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("Connection reset by peer")

    monkeypatch.setattr(torch.distributed, "all_gather_object", fail)
    with pytest.raises(UserError, match=r"Rank 1 waited.*Connection reset by peer.*look at the ranks' logs"):
        group.gather(b"one")


def test_the_place_is_the_servers(runner: Any) -> None:
    assert ranks.place() == (0, 1)


def test_models_are_checked_on_every_rank(runner: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reasons, "place", lambda: (1, RANKS))
    hf_config = runner.model_config.hf_config
    assert reasons.model_disable_reasons(share(runner.model, 1), hf_config) == []
    whole = reasons.model_disable_reasons(runner.model, hf_config)  # as if nothing had been split
    assert any("layers.0.qkv has shape" in reason for reason in whole)


def test_mailboxes_are_connected_at_build(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Several ranks meet over the server's own group before anything is built; a single one asks nobody."""
    import sys

    from sglang.srt import runtime_context

    from sgl_muse_mega.serving import spec

    driver = SimpleNamespace()
    bindings = SimpleNamespace(driver=driver)
    monkeypatch.setitem(sys.modules, "cuda", SimpleNamespace(bindings=bindings))
    monkeypatch.setitem(sys.modules, "cuda.bindings", bindings)
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", driver)
    parallel = SimpleNamespace(tp_rank=1, tp_size=4, tp_group=SimpleNamespace(cpu_group="the ranks"))
    monkeypatch.setattr(runtime_context, "get_parallel", lambda: parallel)
    met: list[Any] = []

    class Memory:
        def __init__(self, group: ranks.ServerGroup, used: Any, arena_bytes: int) -> None:
            met.append((group.rank, group.ranks, group._group, used, arena_bytes >> 20))

        def mail(self) -> str:
            return "mail"

    monkeypatch.setattr(ranks, "PeerMemory", Memory)
    monkeypatch.setattr(spec, "CudaMachine", lambda **_: SimpleNamespace(fault_record=torch.zeros(8)))
    monkeypatch.setattr(spec, "Monitor", lambda *_: SimpleNamespace(start=lambda: None))
    monkeypatch.setattr(spec, "_KEPT", [])
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    places: list[Any] = []

    def build_on(*_: Any, place: Any, **__: Any) -> Any:
        places.append(place)
        return SimpleNamespace(coverage=None)

    monkeypatch.setattr(spec, "build_on", build_on)
    context = SimpleNamespace(deadline_s=60.0, tokens_per_request=8)
    with caplog.at_level(logging.INFO):
        spec.build(None, None, context)
    assert "0 MiB beyond SGLang's weights, which it reads where they are" in caplog.text
    monkeypatch.setenv(switches.STEP, "full")
    spec.build(None, None, context)
    assert met == [(1, 4, "the ranks", driver, 64), (1, 4, "the ranks", driver, 160)]
    assert [place.mail for place in places] == ["mail"] * 2
    assert places[0].group.ranks == 4
    assert "the plugin has never run on 4 GPUs" in caplog.text
    assert isinstance(spec._KEPT[0], Memory)  # or the mailboxes would go while kernels write to them
    parallel.tp_size, parallel.tp_rank = 1, 0
    caplog.clear()
    spec.build(None, None, context)
    assert "never" not in caplog.text
    assert len(met) == 2
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (10, 3))
    spec.build(None, None, context)
    assert "the kernels have never run on a GPU of this kind" in caplog.text
    assert places[2] is None


def test_sglang_ranks(sglang_ranks: "subprocess.Popen[str]") -> None:
    """SGLang's own loader has split the checkpoint as `share` above does, and as the kernels read it."""
    output, _ = sglang_ranks.communicate(timeout=300)
    found = [json.loads(line) for line in output.splitlines() if line.startswith('{"place"')]
    assert sorted(each["place"] for each in found) == [[0, 2], [1, 2]], output[-3000:]
    for each in found:
        assert (each["problems"], each["different"], each["gathered"]) == ([], [], ["rank 0", "rank 1"])
