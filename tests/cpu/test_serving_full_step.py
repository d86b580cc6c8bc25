"""Whole steps over a server's tables and pools, on the emulated machine, against the step loop on the reference."""

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from kernel_count import KernelCount
from torch import Tensor

from sgl_muse_mega.checkpoint import tiny
from sgl_muse_mega.checkpoint.draft import load_draft
from sgl_muse_mega.checkpoint.target import load_target
from sgl_muse_mega.commands.text import Text
from sgl_muse_mega.config import load_draft_config, load_target_config
from sgl_muse_mega.emulator.machine import Launch
from sgl_muse_mega.emulator.stepper import Emulator
from sgl_muse_mega.megakernel.accept_step import AcceptStep
from sgl_muse_mega.megakernel.decode_loop import CHAIN
from sgl_muse_mega.megakernel.decode_request import read_report
from sgl_muse_mega.megakernel.decode_step import DecodeStep
from sgl_muse_mega.megakernel.draft_instance import TargetEnds
from sgl_muse_mega.megakernel.draft_scratch import DecodeState
from sgl_muse_mega.megakernel.draft_step import DraftStep
from sgl_muse_mega.megakernel.draft_weights import prepare_draft
from sgl_muse_mega.megakernel.step import Step
from sgl_muse_mega.megakernel.weights import prepare
from sgl_muse_mega.reference.backend import ReferenceBackend
from sgl_muse_mega.serving import full_step
from sgl_muse_mega.serving.full_step import FullStep
from sgl_muse_mega.speculative.generate import generate
from sgl_muse_mega.speculative.rows import RowPlan
from sgl_muse_mega.speculative.sampling import SamplingParams

WIDTH, NEW, POSITIONS, SLOTS = 8, 10, 128, 200
PROMPT = "Sam has 3 pens and buys 4 more. How many pens?"


class Immediate(Emulator):
    """Launches run where they are enqueued, as they seem to on a GPU."""

    launches = 0

    def enqueue(self, launch: Launch) -> None:
        self.launches += 1
        super().enqueue(launch)
        self.synchronize()


class Server:
    """Tables and pools as SGLang has them: slots in any order, the sliding layers in a pool of their own."""

    def __init__(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.row = torch.tensor([2])
        self.req_to_token = torch.zeros(4, POSITIONS, dtype=torch.int32)
        self.req_to_token[2] = (torch.randperm(SLOTS - 1, generator=generator)[:POSITIONS] + 1).int()
        self.full_to_sliding = torch.cat((torch.tensor([0]), torch.randperm(SLOTS - 1, generator=generator) + 1))

    @staticmethod
    def caches(count: int, heads: int, dim: int) -> list[tuple[Tensor, Tensor]]:
        """Full of NaN, but for the slot that takes the rows of nobody."""
        found = []
        for _ in range(count):
            pair = torch.full((2, SLOTS, heads, dim), float("nan"), dtype=torch.bfloat16)
            pair[:, 0] = 0
            found.append((pair[0], pair[1]))
        return found


SAMPLED = SamplingParams(temperature=0.9, top_k=40, top_p=0.97, seed=5)
COST = (1 + 0.05 * np.arange(9)).astype(np.float32)


WRONG = (1 + 5 * np.arange(9)).astype(np.float32)


def test_what_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Medians behind the warm-up, every step from where the real one starts, and nothing is learnt from them."""
    monkeypatch.setattr(full_step, "REPEATS", 3)
    learnt, plans, calls = torch.tensor([5, 3]), [], []
    state = SimpleNamespace(calibration=learnt.clone())

    def take(plan: RowPlan) -> None:
        state.calibration.zero_()
        assert plan.cost is not None
        plans.append(plan)

    def step() -> None:
        calls.append("step")
        state.calibration += 1

    def timer(enqueue: Callable[[], None]) -> float:
        enqueue()
        rows = int(plans[-1].cost[1:].argmin()) + 1  # all others cost too much
        repeat = calls.count("step") % 6
        return (5.0 + rows) + (-1.0 if repeat == 5 else 100.0 if repeat in (1, 2, 3) else 0.0)

    full = object.__new__(full_step.FullStep)
    full._plan, full._width, full._replay = RowPlan(6, WRONG), WIDTH, step
    full._decode = SimpleNamespace(state=state, take=take)  # type: ignore[assignment]
    full._measure(timer, lambda: calls.append("begin"))
    assert calls == ["begin", "step"] * 4 * 6
    assert [plan.nodes for plan in plans] == [6] * 5
    assert plans[-1] is full._plan
    assert plans[-1].cost.tolist() == [0, 6, 7, 8, 9, 10, 11]
    assert torch.equal(state.calibration, learnt)


@pytest.mark.parametrize(
    ("seed", "params", "plan", "measures"),
    [
        (1, SamplingParams(), CHAIN, False),
        (2, SAMPLED, CHAIN, False),
        (3, SAMPLED, RowPlan(WIDTH, COST), True),
        (4, SAMPLED, RowPlan(cost=COST), True),
    ],
)
def test_text_of_a_request(
    seed: int, params: SamplingParams, plan: RowPlan, measures: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also when the first step measures the costs that are then gone by: nothing of the request is disturbed."""
    torch.set_num_threads(1)
    monkeypatch.setattr(full_step, "TIMED_ROWS", (1,))
    monkeypatch.setattr(full_step, "REPEATS", 1)
    monkeypatch.setattr(full_step, "WARM_UP", 0)
    timed: list[int] = []

    def timer(enqueue: Callable[[], None]) -> float:
        enqueue()
        report = read_report(state, 1)
        assert report is not None
        timed.append(report.rows)
        return float(COST[report.rows])

    config, draft_config = load_target_config(tiny.target_directory()), load_draft_config(tiny.draft_directory())
    weights, draft_weights = (
        load_target(tiny.target_directory(), config),
        load_draft(tiny.draft_directory(), draft_config),
    )
    ids = Text(tiny.target_directory()).encode(PROMPT, raw=True)
    reference = ReferenceBackend(config, weights, draft_config, draft_weights, max_context=POSITIONS)
    expected = generate(reference, ids, params, width=WIDTH, max_new_tokens=NEW, stop_ids=(), plan=plan)
    steps = [event.tokens for event in expected]

    machine, server = Immediate(sms=3), Server(seed)
    taps = tuple(draft_config.target_layer_ids)
    step = Step(config, prepare(config, weights), machine, row_cap=8, max_context=POSITIONS + 16, taps=taps)
    caches = server.caches(config.num_hidden_layers, config.num_key_value_heads, config.head_dim)
    step.use_caches(caches)
    state = DecodeState.allocate(8, machine.device)
    kernel_draft = prepare_draft(draft_config, draft_weights, weights.embed_tokens, weights.lm_head)
    draft = DraftStep(draft_config, kernel_draft, machine, step.inputs, step.taps, state, target=TargetEnds.of(config))
    c = draft_config
    draft.use_caches(server.caches(c.num_hidden_layers, c.num_key_value_heads, c.head_dim))
    activations = step.activations
    accept = AcceptStep(
        machine, step.inputs, activations.logits, activations.greedy_ids, state, draft.activations,
        softcap=config.final_logit_softcapping,
    )  # fmt: skip
    accept.use_caches(caches, [config.is_full(index) for index in range(config.num_hidden_layers)])
    decode = DecodeStep(step, draft, accept, state)
    full = FullStep(
        decode, width=WIDTH, req_to_token=server.req_to_token, full_to_sliding=server.full_to_sliding,
        plan=replace(plan, cost=WRONG) if measures else plan, timer=timer if measures else None,
    )  # fmt: skip
    decode.declare(caches)
    full.capture()  # runs a step of nobody
    full.use(params)

    # The prompt, as the server's own prefill would leave it.
    slots = server.req_to_token[2]
    step.inputs.full_pages[:POSITIONS].copy_(slots)
    step.inputs.sliding_pages[:POSITIONS].copy_(server.full_to_sliding[slots.long()])
    for start in range(0, len(ids), 8):
        chunk = ids[start : start + 8]
        decode.seek(chunk, start)
        decode.launch_prompt(len(chunk))
    anchor = torch.tensor(steps[0][:1])
    step.inputs.full_pages.fill_(2**30)  # every step reads the server's tables anew
    step.inputs.sliding_pages.fill_(2**30)

    length, read = torch.tensor([len(ids)]), []
    told = []
    emitted = [int(anchor)]
    while len(emitted) < NEW:
        before = machine.launches
        with KernelCount() as pytorch:
            result = full(server.row, length, anchor, lambda: told.append(True))
        if not measures or read:  # the first of these measures
            # Beginning, draft and its head, embedding, layers, head, accept, the draft's context, end; a tree's move.
            assert machine.launches - before == 8 + config.num_hidden_layers + (plan.nodes is not None)
        assert not pytorch.found or (measures and not read)
        count = int(result.committed)
        emitted += result.tokens[:count].tolist()
        assert int(result.anchor) == emitted[-1]
        assert int(result.length) == int(length) + count
        read.append(result)
        length, anchor = result.length, result.anchor
    flat = [token for tokens in steps for token in tokens]
    assert emitted[:NEW] == flat[:NEW]
    assert step.inputs.ancestors.tolist() == [(2 << row) - 1 for row in range(8)]  # as the server's own steps need it
    assert int(step.inputs.live) == 8
    assert len(told) == len(read)
    assert timed == ([1, WIDTH] if measures else [])
    assert len(read) == len(steps) - 1  # as many drafts are kept, so the draft's context is right, too
