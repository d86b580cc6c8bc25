"""Whole decode steps over several emulated ranks: equal reports, the rules' verdicts, the reference draft's rows."""

import functools
import re
from unittest import mock

import numpy as np
import pytest
import torch
from decode_rank_case import ACCEPT_THREADS, CONTEXT, PROMPT, WIDTH, DecodeRankCase, Step
from draft_case import draft_config

from sgl_muse_mega.checkpoint import tiny
from sgl_muse_mega.checkpoint.draft import load_draft
from sgl_muse_mega.checkpoint.draft_share import share_draft
from sgl_muse_mega.checkpoint.random_weights import random_draft
from sgl_muse_mega.checkpoint.target import load_target
from sgl_muse_mega.commands.text import Text
from sgl_muse_mega.config import load_draft_config, load_target_config
from sgl_muse_mega.emulator.machine import PLAIN, EmulatorFault, Injection, Schedule, racing
from sgl_muse_mega.emulator.rank_threads import RankEmulator, RankThreads
from sgl_muse_mega.errors import UserError
from sgl_muse_mega.megakernel.accept_step import AcceptStep
from sgl_muse_mega.megakernel.decode_backend import decode_backend
from sgl_muse_mega.megakernel.draft_instance import DraftInstance, TargetEnds
from sgl_muse_mega.megakernel.draft_protocol import ACCEPT_COUNTERS, ACCEPT_LAUNCH, DRAFT_COUNTERS, FIRST_LAUNCH, SITES
from sgl_muse_mega.megakernel.place import Place
from sgl_muse_mega.megakernel.protocol import PEER_SHIFT, RECORD_COMPLETE, FaultRecord, HandOff
from sgl_muse_mega.reference.backend import ReferenceBackend
from sgl_muse_mega.reference.cache import KVCache
from sgl_muse_mega.reference.draft import ReferenceDraft
from sgl_muse_mega.speculative.accept import accept_greedy, accept_sampled
from sgl_muse_mega.speculative.generate import StepEvent, generate
from sgl_muse_mega.speculative.philox import uniform
from sgl_muse_mega.speculative.rows import RowPlan
from sgl_muse_mega.speculative.sampling import SamplingParams

GREEDY = SamplingParams()
SAMPLED = SamplingParams(temperature=3.0, top_p=0.95, top_k=150, min_p=0.001, seed=2**63 + 5)


@functools.cache
def case(ranks: int) -> DecodeRankCase:
    return DecodeRankCase(ranks, draft_layers=2 if ranks == 2 else 1)


def assert_equal(ranks: list[list[Step]], expected: list[Step]) -> None:
    for steps in ranks:
        for ours, theirs in zip(steps, expected, strict=True):
            assert ours.report == theirs.report
            assert ours.greedy_ids == theirs.greedy_ids
            assert torch.equal(ours.block.candidates, theirs.block.candidates)
            drawn_from = [step.block.probabilities.nan_to_num(-1) for step in (ours, theirs)]  # a tree draws from none
            assert torch.equal(*drawn_from)
            assert torch.equal(ours.whole_logits, theirs.whole_logits)


@pytest.mark.parametrize(
    ("ranks", "params", "schedule"),
    [(2, GREEDY, PLAIN), (2, SAMPLED, PLAIN), (4, GREEDY, racing(3)), (4, SAMPLED, PLAIN)],
    ids=["greedy-2", "sampled-2", "greedy-4", "sampled-4"],
)
def test_all_ranks_commit_what_the_rules_say(ranks: int, params: SamplingParams, schedule: Schedule) -> None:
    found = case(ranks).run(schedule, params, batches=(1, 1))
    assert_equal(found, found[0])
    length = len(PROMPT)
    for number, step in enumerate(found[0]):
        logits = torch.cat([steps[number].logits for steps in found], dim=1)
        assert step.greedy_ids == logits.argmax(1).tolist()
        if params.greedy:
            rule = accept_greedy(logits, step.block.tokens.tolist())
        else:
            assert torch.equal(step.whole_logits, logits)
            rule = accept_sampled(logits, step.block, params, length + 1, functools.partial(uniform, params.seed))
        assert step.report.accepted == rule.drafts
        assert step.report.tokens == (*step.block.tokens[: rule.drafts].tolist(), rule.token)
        length = step.report.length


def test_any_schedule_of_all_ranks_gives_the_same_bits() -> None:
    """Two steps at once: packets of a rank that is ahead arrive while another is still in the step before."""
    kernels = case(2)
    expected = kernels.run(PLAIN, SAMPLED, batches=(2,))[0]
    assert_equal(kernels.run(racing(1), SAMPLED, batches=(2,)), expected)


def test_all_ranks_grow_and_judge_the_same_tree() -> None:
    plan = RowPlan(8, np.linspace(1, 1.1, 9, dtype=np.float32))
    found = case(2).run(racing(5), SAMPLED, batches=(1, 1), plan=plan)
    assert_equal(found, found[0])


def test_the_split_draft_proposes_what_the_reference_does() -> None:
    """Over the ranks' own last rows the reference's head chooses the same, and those rows are the reference's but for
    rounding; so is the context that the step before has left."""
    kernels = case(2)
    drafts = [loop.decode.draft for loop in kernels.loops]
    first, second = kernels.run(PLAIN, GREEDY)[0]
    length, anchor, config = first.report.length, first.report.tokens[-1], kernels.draft_config
    weights = kernels.weights
    reference = ReferenceDraft(
        config, kernels.draft_weights, weights.embed_tokens, weights.lm_head, kernels.embedding_eps
    )
    slots = torch.arange(1, CONTEXT)
    caches = []
    for index in range(config.num_hidden_layers):
        keys, values = (torch.cat([d.caches[index][part] for d in drafts], dim=1) for part in (0, 1))
        cache = KVCache(len(keys), *keys.shape[1:], torch.bfloat16, torch.device("cpu"))
        cache.write(torch.arange(len(keys)), keys, values)
        caches.append(cache)
    ids = torch.full((WIDTH,), config.mask_token_id)
    ids[0] = anchor
    rows = reference.block(ids, length, slots[:length], 0, caches)
    ours = drafts[0].activations.residual[:WIDTH]
    assert all(torch.equal(d.activations.residual[:WIDTH], ours) for d in drafts)
    assert distance(ours, rows) < 0.02
    chosen = reference.candidates(ours.float(), anchor)
    assert torch.equal(second.block.candidates, chosen.candidates)
    assert torch.allclose(drafts[0].activations.lattice[: WIDTH - 1], chosen.lattice, atol=1e-5)
    taps = kernels.loops[0].decode.step.taps[:1].float().transpose(0, 1)
    written = [KVCache(len(keys), *keys.shape[1:], torch.bfloat16, torch.device("cpu")) for _ in caches]
    last = torch.tensor([length])
    reference.write_context(reference.context(taps), last, slots[last], written)
    for ours_of, theirs in zip(caches, written, strict=True):
        for mine, reference_row in zip(
            ours_of.read(slots[last], torch.float32), theirs.read(slots[last], torch.float32), strict=True
        ):
            assert distance(mine, reference_row) < 0.02


def distance(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return float((ours.double() - theirs.double()).norm() / theirs.double().norm())


def test_the_tiny_pairs_text_is_the_references() -> None:
    """On two ranks; four take the emulator minutes."""
    ranks, tokens = 2, 8
    config, draft_config = load_target_config(tiny.target_directory()), load_draft_config(tiny.draft_directory())
    draft_weights = load_draft(tiny.draft_directory(), draft_config)
    ids = Text(tiny.target_directory()).encode("Sam has 3 pens and buys 4 more.", raw=True)
    limit = len(ids) + tokens + 8

    def work(machine: RankEmulator, place: Place) -> tuple[list[int], list[StepEvent]]:
        weights = load_target(tiny.target_directory(), config, rank=place.rank, ranks=ranks)
        loop = decode_backend(
            config, weights, draft_config, draft_weights, machine=machine, width=8, max_context=limit, place=place
        )
        made = generate(loop, ids, GREEDY, width=8, max_new_tokens=tokens, stop_ids=())
        return made.tokens, list(made)

    small = functools.partial(AcceptStep, threads=ACCEPT_THREADS)
    with mock.patch("sgl_muse_mega.megakernel.decode_backend.AcceptStep", small):
        found = RankThreads(ranks, sms=2).run(work)
    assert all(rank == found[0] for rank in found)
    backend = ReferenceBackend(
        config, load_target(tiny.target_directory(), config), draft_config, draft_weights, max_context=limit
    )
    reference = generate(backend, ids, GREEDY, width=8, max_new_tokens=tokens, stop_ids=())
    list(reference)
    assert found[0][0] == reference.tokens
    assert any(event.accepted for event in found[0][1])


@pytest.mark.parametrize(
    ("launch", "counters", "site", "words"),
    [
        (FIRST_LAUNCH + 1, DRAFT_COUNTERS, "CANDIDATE_MAIL", "the best draft scores of rank 3 (CANDIDATE_MAIL: "),
        (
            FIRST_LAUNCH,
            DRAFT_COUNTERS,
            "DRAFT_DOWN_MAIL",
            "the part of the draft's down_proj of rank 3 (DRAFT_DOWN_MAIL",
        ),
        (ACCEPT_LAUNCH, ACCEPT_COUNTERS, "LOGITS_MAIL", "the logits of rank 3 (LOGITS_MAIL: expected 77, saw 75)"),
    ],
)
def test_a_record_names_point_and_rank(launch: int, counters: tuple[HandOff, ...], site: str, words: str) -> None:
    number = len(counters) + [name for name, _ in SITES].index(site)
    record = FaultRecord.read([0, 1, 5, number + (4 << PEER_SHIFT), 77, 75, launch, RECORD_COMPLETE])
    assert record is not None
    assert f"on rank 1, CTA 5 of launch {launch}" in record.sentence()
    assert words in record.sentence()


def test_a_draft_that_does_not_divide_is_refused() -> None:
    config = draft_config(num_attention_heads=6, num_key_value_heads=3)
    with pytest.raises(UserError, match="num_attention_heads = 6"):
        DraftInstance.for_config(config, TargetEnds(1e-5, 1.0, 20.0), row_cap=8, sms=2, ranks=4)
    with pytest.raises(UserError, match=r"does not divide among 2 ranks: num_key_value_heads = 3"):
        share_draft(config, random_draft(config, 1), rank=0, ranks=2)


def test_a_rank_that_stops_stops_the_others() -> None:
    with pytest.raises(EmulatorFault) as fault:
        DecodeRankCase(2).run(racing(3, injection=Injection.EARLY_EXIT, injection_address=1 << 32), batches=(1,))
    assert "past the deadline for " in fault.value.text
    assert re.search(r"waiting for rank 0 \w+\.mailbox\+\d+ ", fault.value.text)
