"""The accept kernel on the emulated machine against the step loop's rules, with the same uniforms."""

from dataclasses import fields
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sgl_muse_mega.emulator.machine import PLAIN, racing
from sgl_muse_mega.emulator.stepper import Emulator
from sgl_muse_mega.errors import UserError
from sgl_muse_mega.megakernel.accept_step import AcceptStep
from sgl_muse_mega.megakernel.decode_request import Report, read_report, request_words, state_words
from sgl_muse_mega.megakernel.draft_protocol import STATE
from sgl_muse_mega.megakernel.draft_scratch import DecodeState, DraftActivations
from sgl_muse_mega.megakernel.scratch import StepInputs
from sgl_muse_mega.speculative.accept import accept_greedy, accept_sampled
from sgl_muse_mega.speculative.backend import DraftBlock
from sgl_muse_mega.speculative.philox import uniform
from sgl_muse_mega.speculative.sampling import SamplingParams

VOCAB, ROW_CAP, K = 1000, 8, 4
CONTEXT = 300


class AcceptCase:
    """One verify step's results for the kernel and for the rules."""

    def __init__(self, first_epoch: int = 0, sources: Path | None = None) -> None:
        """sources: another folder than the package's csrc."""
        self.emulator = Emulator(sms=2 * ROW_CAP, sources=sources)  # two CTAs a row
        self.inputs = StepInputs.allocate(ROW_CAP, CONTEXT + ROW_CAP, self.emulator.device)
        self.inputs.full_pages.copy_(torch.arange(CONTEXT + ROW_CAP) * 3 + 1)
        self.inputs.sliding_pages.copy_(torch.arange(CONTEXT + ROW_CAP) * 5 + 2)
        self.logits = torch.zeros(ROW_CAP, VOCAB)
        self.greedy_ids = torch.zeros(ROW_CAP, dtype=torch.int64)
        self.state = DecodeState.allocate(ROW_CAP, self.emulator.device)
        self.draft = _draft_activations()
        self.step = AcceptStep(
            self.emulator, self.inputs, self.logits, self.greedy_ids, self.state, self.draft,
            softcap=20.0, threads=64, first_epoch=first_epoch,
        )  # fmt: skip

    def start(self, params: SamplingParams, length: int, **request: object) -> None:
        limits: dict[str, object] = {"max_new_tokens": 1000, "max_context": CONTEXT, **request}
        self.state.request.copy_(torch.tensor(request_words(params, **limits)))  # type: ignore[arg-type]
        self.state.state.copy_(torch.tensor(state_words(emitted=1)))
        self.state.outputs.zero_()
        self.inputs.length.fill_(length)

    def fill(self, seed: int, rows: int, spread: float, agreement: float) -> DraftBlock:
        """Random logits and a proposal that agrees with them more or less."""
        g = torch.Generator().manual_seed(seed)
        logits = (torch.randn(ROW_CAP, VOCAB, generator=g) * spread).clamp(-19.9, 19.9)
        logits[:, ::7] = logits[:, :1]  # many ties
        self.logits.copy_(logits)
        self.greedy_ids.copy_(torch.tensor([int(row.numpy().argmax()) for row in logits]))
        best = logits.topk(K, dim=1).indices
        drawn = torch.stack([torch.randperm(VOCAB, generator=g)[:K] for _ in range(ROW_CAP)])
        use_best = torch.rand(ROW_CAP, 1, generator=g) < agreement
        candidates = torch.where(use_best, best, drawn)
        q = torch.softmax(torch.randn(ROW_CAP, K, generator=g) * 2, dim=1)
        path = torch.multinomial(q, 1, generator=g)
        self.draft.candidates.copy_(candidates)
        self.draft.probabilities.copy_(q)
        tokens = candidates.gather(1, path)[:, 0]
        self.inputs.token_ids[1:].copy_(tokens[:-1])
        return DraftBlock(tokens[: rows - 1], candidates[: rows - 1], q[: rows - 1])

    def run(self, rows: int, schedule=PLAIN, step: int = 1) -> Report:
        memory = [("fault_record", self.emulator.fault_record, False, True)]
        memory += [(f"inputs.{f.name}", getattr(self.inputs, f.name), False, True) for f in fields(self.inputs)]
        memory += [("logits", self.logits, True, True), ("greedy_ids", self.greedy_ids, True, True)]
        memory += [(name, getattr(self.draft, name), True, True) for name in ("candidates", "probabilities")]
        self.emulator.declare(memory + self.step.memory())
        self.emulator.schedule = schedule
        self.step.launch(rows)
        self.emulator.synchronize()
        report = read_report(self.state, step)
        assert report is not None
        return report


def _draft_activations() -> DraftActivations:
    empty = {f.name: torch.empty(0) for f in fields(DraftActivations)}
    return DraftActivations(
        **{
            **empty,
            "candidates": torch.zeros(ROW_CAP, K, dtype=torch.int64),
            "probabilities": torch.zeros(ROW_CAP, K),
        }
    )


@pytest.fixture(scope="module")
def case() -> AcceptCase:
    return AcceptCase(first_epoch=2**32 - 20)


PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.05, 0.7, 1.0, 4.0]),
    top_p=st.sampled_from([1.0, 1.0, 0.95, 0.5, 0.01]),
    top_k=st.sampled_from([0, 0, 2, 40, 500, 5000]),
    min_p=st.sampled_from([0.0, 0.0, 0.1, 1.0]),
    seed=st.integers(0, 2**64 - 1),
)


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(PARAMS, st.integers(1, ROW_CAP), st.integers(0, 2**30), st.sampled_from([0.02, 1.0, 5.0]), st.integers(0, 3))
def test_verdict(case: AcceptCase, params: SamplingParams, rows: int, seed: int, spread: float, agreement: int) -> None:
    length = 100
    block = case.fill(seed, rows, spread, agreement / 3)
    case.start(params, length)
    report = case.run(rows)
    logits = case.logits[:rows]
    if params.greedy:
        expected = accept_greedy(logits, block.tokens.tolist())
    else:
        expected = accept_sampled(logits, block, params, length + 1, partial(uniform, params.seed))
    assert report.accepted == expected.drafts
    assert report.tokens == (*block.tokens[: expected.drafts].tolist(), expected.token)
    assert (report.reason, report.length) == (None, length + expected.drafts + 1)
    after = report.length + torch.arange(ROW_CAP)
    assert torch.equal(case.inputs.positions, after)
    assert torch.equal(case.inputs.full_slots, after * 3 + 1)
    assert torch.equal(case.inputs.sliding_slots, after * 5 + 2)
    assert case.inputs.token_ids[0] == report.tokens[-1]
    state = dict(zip(STATE, case.state.state.tolist(), strict=True))
    committed = len(report.tokens)
    assert state == {
        "STEPS": 1, "EMITTED": 1 + committed, "REASON": 0, "CONTEXT_START": length, "COMMITTED": committed
    }  # fmt: skip


def _accept_all(case: AcceptCase, rows: int) -> list[int]:
    case.fill(3, rows, 1.0, 1.0)
    case.inputs.token_ids[1:].copy_(case.greedy_ids[:-1])
    return case.greedy_ids[:rows].tolist()


@pytest.mark.parametrize(
    ("request_changes", "length", "count", "reason"),
    [
        ({"max_new_tokens": 6}, 100, 5, "length"),
        ({"max_new_tokens": 1000}, CONTEXT - 4, 3, "context"),
        ({"stop": 2}, 100, 3, "stop"),
        ({"stop": 7}, 100, 8, "stop"),
        ({"max_new_tokens": 9}, 100, 8, "length"),
        ({"max_new_tokens": 10}, 100, 8, None),
    ],
)
def test_end_of_the_text(
    case: AcceptCase, request_changes: dict[str, int], length: int, count: int, reason: str | None
) -> None:
    tokens = _accept_all(case, 8)
    changes: dict[str, object] = dict(request_changes)
    stop = changes.pop("stop", None)
    if stop is not None:
        changes["stop_ids"] = {tokens[int(str(stop))], VOCAB + 5}
    case.start(SamplingParams(), length, **changes)
    report = case.run(8)
    first = tokens.index(tokens[count - 1]) + 1 if reason == "stop" else count
    assert report.tokens == tuple(tokens[:first])
    assert (report.reason, report.length) == (reason, length + first)


def test_steps_after_the_end_change_nothing(case: AcceptCase) -> None:
    _accept_all(case, 8)
    case.start(SamplingParams(), 100, max_new_tokens=4)
    assert case.run(8).reason == "length"
    before = case.inputs.token_ids.clone()
    for step in (2, 3):
        report = case.run(8, step=step)
        assert (report.tokens, report.reason, report.length) == ((), "length", 103)
    assert torch.equal(case.inputs.token_ids, before)
    assert case.state.state[STATE.index("COMMITTED")] == 0


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("damage", ["nan", "infinite", "nobody"])
def test_broken_logits_are_reported(case: AcceptCase, temperature: float, damage: str) -> None:
    _accept_all(case, 3)
    case.start(SamplingParams(temperature=temperature), 100)
    if damage == "nobody":
        case.greedy_ids[0] = VOCAB
    elif damage == "infinite":
        case.logits[0, case.greedy_ids[0]] = float("inf")
    elif temperature:
        case.logits[0, 5] = float("nan")
    else:
        case.logits[0, case.greedy_ids[0]] = float("nan")
    with pytest.raises(UserError, match="no finite maximum"):
        case.run(3)


def test_any_schedule_gives_the_same_report(case: AcceptCase) -> None:
    params = SamplingParams(temperature=0.9, top_p=0.8, top_k=300, min_p=0.01, seed=77)
    reports = set()
    for seed in range(6):
        case.fill(11, 6, 1.0, 1.0)
        case.start(params, 50)
        report = case.run(6, racing(seed) if seed else PLAIN)
        reports.add((report.tokens, report.accepted))
    assert len(reports) == 1
