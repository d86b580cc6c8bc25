"""The whole step's place in SGLang's worker: which batches it takes, and what the scheduler gets back."""

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sgl_muse_mega.checkpoint.draft import save_draft
from sgl_muse_mega.errors import UserError
from sgl_muse_mega.serving import hooks, switches, worker
from sgl_muse_mega.serving.coverage import Coverage
from sgl_muse_mega.serving.draft import draft_weights
from sgl_muse_mega.serving.full_step import StepResult
from sgl_muse_mega.serving.model_config import draft_config
from sgl_muse_mega.speculative.sampling import SamplingParams


def sampling(**changes: Any) -> Any:
    values = {
        "is_all_greedy": True, "has_custom_logit_processor": False, "acc_linear_penalties": None, "grammar_mask": None,
        "penalizer_orchestrator": SimpleNamespace(is_required=False), "logit_bias": None,
        "sampling_mask_batch_indices": None,
    }  # fmt: skip
    return SimpleNamespace(**(values | changes))


def request(**changes: Any) -> Any:
    values = {"temperature": 1.0, "top_p": 1.0, "top_k": 1, "min_p": 0.0, "sampling_seed": None} | changes
    return SimpleNamespace(rid="a request", sampling_params=SimpleNamespace(**values))


def batch(mode: str = "DECODE", requests: int = 1, **changes: Any) -> Any:
    from sglang.srt.model_executor.forward_batch_info import ForwardMode
    from sglang.srt.speculative.dflash_worker_v2 import make_draft_input_v2

    lengths = torch.full((requests,), 40)
    lengths.record_stream = lambda _stream: None
    values = {
        "forward_mode": ForwardMode[mode], "is_extend_in_batch": False, "seq_lens": lengths, "has_grammar": False,
        "req_pool_indices": torch.tensor([2]), "return_logprob": False, "sampling_info": sampling(),
        "reqs": [request() for _ in range(requests)],
        "spec_info": make_draft_input_v2(bonus_tokens=torch.tensor([7]), new_seq_lens=lengths),
    }  # fmt: skip
    return SimpleNamespace(**(values | changes))


@pytest.fixture
def served() -> Any:
    from sglang.srt.speculative.dflash_worker_v2 import DFlashWorkerV2

    made = object.__new__(DFlashWorkerV2)
    runner = SimpleNamespace(shared_read_done_event="before")
    made._target_worker = SimpleNamespace(model_runner=runner)
    made.block_size = 8
    made._selector_sample = "of an earlier step"
    made._block_verification = False
    return made


def test_batches_that_run_whole(served: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.speculative import spec_utils

    assert worker.declines(served, batch()) is None
    assert worker.declines(served, batch(sampling_info=None)) is None
    assert worker.declines(served, batch(sampling_info=sampling(is_all_greedy=False))) is None
    other = "grammar, log-probabilities, penalties or bias"
    refused = {
        other: [
            batch(has_grammar=True), batch(return_logprob=True),
            batch(sampling_info=sampling(logit_bias=torch.ones(1))),
            batch(sampling_info=sampling(penalizer_orchestrator=SimpleNamespace(is_required=True))),
            batch(sampling_info=sampling(has_custom_logit_processor=True)),
        ],
        "more than one request": [batch(requests=2)],
        "idle batches": [batch("IDLE")],
        "no draft state": [batch(spec_info=None)],
    }  # fmt: skip
    for reason, batches in refused.items():
        assert [worker.declines(served, each) for each in batches] == [reason] * len(batches)
    served._block_verification = True
    assert worker.declines(served, batch()) is None
    assert "block-verification" in str(worker.declines(served, batch(sampling_info=sampling(is_all_greedy=False))))
    monkeypatch.setattr(spec_utils, "SIMULATE_ACC_LEN", 4.0)
    assert worker.declines(served, batch()) == "SGLANG_SIMULATE_ACC_LEN is set"


def test_what_the_scheduler_gets(served: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: None)
    monkeypatch.setattr(torch.cuda, "Event", lambda: SimpleNamespace(record=lambda: events.append("tables read")))
    tokens = torch.arange(8)
    result = StepResult(tokens, torch.tensor([3], dtype=torch.int32), tokens[2:3], torch.tensor([43]))

    def full(row: Any, length: Any, anchor: Any, tables_read: Any) -> StepResult:
        assert (row.tolist(), length.tolist(), anchor.tolist()) == ([2], [40], [7])
        tables_read()
        events.append("step")
        return result

    published: list[Any] = []
    out = worker.run(full, served, batch(), published.append)  # type: ignore[arg-type]
    assert events == ["tables read", "step"]
    assert served.target_worker.model_runner.shared_read_done_event != "before"
    assert published == [result.length]
    assert out.next_token_ids is tokens
    assert out.accept_lens is result.committed
    assert (out.can_run_cuda_graph, out.speculative_num_draft_tokens) == (True, 8)
    assert out.new_seq_lens is result.length
    assert out.next_draft_input.bonus_tokens.tolist() == [2]
    assert out.next_draft_input.new_seq_lens is result.length
    assert out.logits_output.hidden_states is None


def test_the_class_is_wrapped_and_steps_are_counted(
    served: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from sglang.srt.speculative.dflash_worker_v2 import DFlashWorkerV2

    stock: list[Any] = []
    monkeypatch.setattr(DFlashWorkerV2, "init_cuda_graphs", lambda self: stock.append("graphs"))
    monkeypatch.setattr(
        DFlashWorkerV2, "forward_batch_generation", lambda self, batch, on_publish=None, *a, **k: stock.append(batch)
    )
    used: list[SamplingParams] = []
    full = SimpleNamespace(use=used.append)
    monkeypatch.setattr(worker, "build_step", lambda built, made: full)
    monkeypatch.setattr(worker, "run", lambda *arguments: arguments)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 0)
    counts = Coverage()
    step = SimpleNamespace(config=SimpleNamespace(vocab_size=1024))
    worker.install(SimpleNamespace(coverage=counts, step=step))  # type: ignore[arg-type]
    first = batch()
    served.forward_batch_generation(first)
    assert stock == [first]  # nothing is built yet
    with caplog.at_level(logging.INFO):
        served.init_cuda_graphs()
    assert "MiB for the whole step" in caplog.text
    assert (
        "steps of one request, greedy or sampled, run whole (draft, verify, accept, cache) as one graph" in caplog.text
    )
    assert stock[1:] == ["graphs"]
    mine, prompt, grammar = batch(), batch("EXTEND"), batch(has_grammar=True)
    for _ in range(2):
        assert served.forward_batch_generation(mine, on_publish="publish") == (full, served, mine, "publish")
    assert [params.greedy for params in used] == [True]  # told once
    served.forward_batch_generation(batch(reqs=[request(top_k=1 << 30, temperature=0.7)]))
    assert (used[1].temperature, used[1].top_k) == (0.7, 0)
    served.forward_batch_generation(prompt, on_publish=None)
    served.forward_batch_generation(grammar)
    assert stock[2:] == [prompt, grammar]
    assert counts.kernels == {"whole steps": 3}
    assert counts.sglang.total() == 1
    for target in (hooks.GRAPHS, hooks.STEP):
        hooks.unwrap(target)


def test_sampling_of_a_request() -> None:
    def made(**changes: Any) -> SamplingParams:
        return worker.sampling_params(request(**changes), 1024)

    assert made().greedy
    asked = {"temperature": 0.8, "top_p": 0.9, "top_k": 50, "min_p": 0.1}
    assert made(**asked, sampling_seed=-3) == SamplingParams(**asked, seed=2**64 - 3)
    assert made(**asked) == made(**asked)
    assert made(**asked).seed != 0
    assert [made(temperature=1.0, top_k=k).top_k for k in (-1, 1 << 30, 1024, 20)] == [0, 0, 0, 20]


def test_the_bundled_draft(plugins: None) -> None:
    """SGLang's draft configuration and module names, as ours."""
    from sglang.srt.utils.hf_transformers_utils import get_config

    from sgl_muse_mega.checkpoint import tiny
    from sgl_muse_mega.config import load_draft_config

    ours = load_draft_config(tiny.draft_directory())
    served_config = get_config(str(tiny.draft_directory()), trust_remote_code=False)
    assert draft_config(served_config, layers_to_capture=ours.target_layer_ids) == ours
    served_config.is_causal = None  # SGLang's sliding layers are causal then
    assert draft_config(served_config, layers_to_capture=ours.target_layer_ids).is_causal
    served_config.dflash_config["conv_kernel_size"] = 3
    with pytest.raises(UserError, match="conv_kernel_size is 3"):
        draft_config(served_config, layers_to_capture=ours.target_layer_ids)


def test_draft_weights_by_name(runner: Any, tmp_path: Path) -> None:
    """The weights of SGLang's own draft model, loaded by its own loader, are the checkpoint's."""
    import models
    import sglang_draft

    expected = models.draft_weights(3)
    save_draft(tmp_path / "draft", models.DRAFT, expected)
    made = draft_weights(sglang_draft.load(tmp_path / "draft", runner.model))
    for name in ("fc", "hidden_norm", "norm", "predecessor_codebook", "successor_codebook", "hidden_projection"):
        assert torch.equal(getattr(made, name), getattr(expected, name)), name
    for ours, theirs in zip(made.layers, expected.layers, strict=True):
        for name in theirs.__slots__:
            mine, wanted = getattr(ours, name), getattr(theirs, name)
            pairs = [(mine, wanted)]
            if name.endswith("conv"):
                pairs = [(getattr(mine, part), getattr(wanted, part)) for part in wanted.__slots__]
            assert all(torch.equal(a, b) for a, b in pairs), name


def test_rows_that_the_switches_ask_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert not worker.row_plan(8).learns
    assert worker.cost_timer() is None
    monkeypatch.setenv(switches.TREE, "1")
    plan = worker.row_plan(8)
    assert (plan.nodes, plan.cost) == (8, None)
    monkeypatch.setenv(switches.WIDTH, "auto")
    plan = worker.row_plan(8)
    plan.check(8)
    assert plan.cost is not None
    assert plan.cost[8] > plan.cost[1] > 0
    assert worker.cost_timer() is worker.gpu_ms
    (tmp_path / "costs.json").write_text('{"1": 2.0, "8": 9.0}')
    monkeypatch.setenv(switches.COST_TABLE, str(tmp_path / "costs.json"))
    monkeypatch.delenv(switches.TREE)
    assert worker.cost_timer() is None
    plan = worker.row_plan(8)
    assert plan.nodes is None
    assert plan.cost is not None
    assert plan.cost.tolist() == [0, 2, 3, 4, 5, 6, 7, 8, 9]


def test_time_on_the_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            events.append("event")

        def synchronize(self) -> None:
            events.append("waited")

        def elapsed_time(self, _end: Any) -> float:
            return 6.25

    monkeypatch.setattr(torch.cuda, "Event", Event)
    assert worker.gpu_ms(lambda: events.append("step")) == 6.25
    assert events == ["event", "step", "event", "waited"]


def test_a_step_that_cannot_be_built(monkeypatch: pytest.MonkeyPatch) -> None:
    """A draft whose embedding the kernels would have to scale, and one that is no DFlash2 draft."""
    monkeypatch.setattr(worker, "draft_config", lambda *_args, **_kwargs: None)
    runner = SimpleNamespace(token_to_kv_pool=None, model_config=SimpleNamespace(hf_config=None))
    made = SimpleNamespace(
        target_worker=SimpleNamespace(model_runner=runner), draft_model_runner=runner, draft_model=SimpleNamespace(),
        _noise_embed_scale=0.5,
    )  # fmt: skip
    built: Any = SimpleNamespace(place=None, step=SimpleNamespace(taps_after=()), bind=lambda _pool: None)
    with pytest.raises(UserError, match=r"by 0\.5, which the kernels do not.*STEP=target"):
        worker.build_step(built, made)
    made._noise_embed_scale = 1.0
    with pytest.raises(UserError, match=r"not a DFlash2 draft.*candidate_selector.*STEP=target"):
        worker.build_step(built, made)


def test_ranks_go_on_alike() -> None:
    """What one rank cannot build no rank uses, and a rank says whose problem it is."""
    asked: list[str | None] = []

    def other_rank(problem: str | None) -> str | None:
        asked.append(problem)
        return problem or "rank 1: no memory"

    place: Any = SimpleNamespace(first_problem=other_rank)
    with pytest.raises(UserError, match="rank 1: no memory"):
        worker._together(place, lambda: "a step")

    def full() -> str:
        raise torch.OutOfMemoryError("CUDA out of memory.\nMore about it")

    with pytest.raises(UserError, match=r"memory does not suffice for it \(CUDA out of memory\.\); give SGLang less"):
        worker._together(place, full)
    assert asked[0] is None
    assert "memory does not suffice" in str(asked[1])
    assert worker._together(None, lambda: "a step") == "a step"


def test_a_server_without_whole_steps_still_serves(
    served: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from sglang.srt.speculative.dflash_worker_v2 import DFlashWorkerV2

    def refuse(*_: Any) -> None:
        raise UserError("The draft has 40 layers.")

    stock: list[Any] = []
    monkeypatch.setattr(DFlashWorkerV2, "init_cuda_graphs", lambda self: stock.append("graphs"))
    monkeypatch.setattr(
        DFlashWorkerV2, "forward_batch_generation", lambda self, batch, on_publish=None, *a, **k: stock.append(batch)
    )
    monkeypatch.setattr(worker, "build_step", refuse)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 0)
    worker.install(SimpleNamespace(coverage=Coverage()))  # type: ignore[arg-type]
    served.init_cuda_graphs()
    mine = batch()
    served.forward_batch_generation(mine)
    assert stock == ["graphs", mine]
    said = "Muse megakernel: no step runs whole, as SGLANG_MUSE_MEGA_STEP=target. The draft has 40 layers."
    assert [record.message for record in caplog.records] == [said]
    for target in (hooks.GRAPHS, hooks.STEP):
        hooks.unwrap(target)


@pytest.mark.parametrize("ranks", [1, 2])
def test_how_a_step_is_put_together(ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With several ranks all parts get the rank's mail, the mask's row comes from who has it, and ranks meet before
    their first steps."""
    events: list[Any] = []
    made: dict[str, Any] = {}

    class Mail:
        rank, session = ranks - 1, 3

    Mail.ranks = ranks  # type: ignore[attr-defined]
    place = SimpleNamespace(
        mail=Mail, meet=lambda: events.append("met"), first_problem=lambda problem: problem,
        vocabulary_row=lambda table, token: events.append((table, token)) or "the mask's row",
    )  # fmt: skip

    def part(name: str) -> Any:
        def create(*args: Any, **kwargs: Any) -> Any:
            made[name] = (args, kwargs)
            return SimpleNamespace(use_caches=lambda *_: None, declare=lambda *_: None, activations="rows")

        return create

    def shares(draft: Any, rank: int, of: int) -> Any:
        return (draft, rank, of)

    config = SimpleNamespace(mask_token_id=9, num_hidden_layers=0)
    monkeypatch.setattr(worker, "draft_config", lambda *_args, **_kwargs: config)
    monkeypatch.setattr(worker, "draft_weights", shares)
    monkeypatch.setattr(worker, "TargetEnds", SimpleNamespace(of=lambda _config: "ends"))
    monkeypatch.setattr(worker, "DecodeState", SimpleNamespace(allocate=lambda *_: "state"))
    for name in ("prepare_draft", "DraftStep", "AcceptStep", "DecodeStep"):
        monkeypatch.setattr(worker, name, part(name))
    full = SimpleNamespace(capture=lambda: events.append("captured"))
    monkeypatch.setattr(worker, "FullStep", lambda *_args, **_kwargs: full)
    activations = SimpleNamespace(logits="logits", greedy_ids="ids", greedy_logits="their logits")
    step = SimpleNamespace(
        taps_after=(), taps=None, machine=SimpleNamespace(device="cpu"), inputs=None, activations=activations,
        instance=SimpleNamespace(row_cap=8), config=SimpleNamespace(final_logit_softcapping=20.0),
        weights=SimpleNamespace(embedding="embedding", lm_head="head"),
    )  # fmt: skip
    pool = SimpleNamespace(full_to_swa_index_mapping=None)
    runner = SimpleNamespace(
        token_to_kv_pool=pool, model_config=SimpleNamespace(hf_config=None),
        req_to_token_pool=SimpleNamespace(req_to_token=None),
    )  # fmt: skip
    served = SimpleNamespace(
        target_worker=SimpleNamespace(model_runner=runner), draft_model_runner=runner, draft_model="draft",
        _noise_embed_scale=1.0,
    )  # fmt: skip
    built: Any = SimpleNamespace(
        step=step, rows=8, bind=lambda _pool: None, place=place if ranks > 1 else None, caches=[]
    )
    assert worker.build_step(built, served) is full
    assert made["prepare_draft"][0][1] == ("draft", ranks - 1, ranks)
    mails = [made[name][1]["mail"] for name in ("DraftStep", "AcceptStep")]
    assert [mail.ranks for mail in mails] == [ranks] * 2
    assert made["AcceptStep"][1]["greedy_logits"] == "their logits"
    if ranks == 1:
        assert (made["prepare_draft"][0][4], events) == (None, ["captured"])
    else:
        assert made["prepare_draft"][0][4] == "the mask's row"
        assert events == [("embedding", 9), "met", "captured"]
