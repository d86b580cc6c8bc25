"""Whole decode steps over several emulated ranks: equal reports, the rules' verdicts, the reference draft's rows."""

import functools

import pytest
import torch
from decode_rank_case import PROMPT, DecodeRankCase, Step

from sgl_muse_mega.emulator.machine import PLAIN, racing
from sgl_muse_mega.speculative.accept import accept_greedy, accept_sampled
from sgl_muse_mega.speculative.philox import uniform
from sgl_muse_mega.speculative.sampling import SamplingParams

SAMPLED = SamplingParams(temperature=3.0, top_p=0.95, top_k=150, min_p=0.001, seed=2**63 + 5)


@functools.cache
def case(ranks: int, draft_layers: int = 2) -> DecodeRankCase:
    return DecodeRankCase(ranks, draft_layers=draft_layers)


def assert_equal(ranks: list[list[Step]], expected: list[Step]) -> None:
    for steps in ranks:
        for ours, theirs in zip(steps, expected, strict=True):
            assert ours.report == theirs.report
            assert ours.greedy_ids == theirs.greedy_ids
            assert torch.equal(ours.block.candidates, theirs.block.candidates)
            assert torch.equal(ours.block.probabilities, theirs.block.probabilities)
            assert torch.equal(ours.whole_logits, theirs.whole_logits)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("params", [SamplingParams(), SAMPLED], ids=["greedy", "sampled"])
def test_all_ranks_commit_what_the_rules_say(ranks: int, params: SamplingParams) -> None:
    found = case(ranks).run(PLAIN, params, batches=(1, 1))
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


@pytest.mark.parametrize(("ranks", "seeds"), [(2, 3), (4, 1)])
@pytest.mark.parametrize("params", [SamplingParams(), SAMPLED], ids=["greedy", "sampled"])
def test_every_schedule_of_all_ranks_gives_the_same_bits(ranks: int, seeds: int, params: SamplingParams) -> None:
    """Two steps at once: packets of a rank that is ahead arrive while another is still in the step before."""
    kernels = case(ranks)
    expected = kernels.run(PLAIN, params, batches=(2,))[0]
    for seed in range(1, seeds + 1):
        assert_equal(kernels.run(racing(seed), params, batches=(2,)), expected)
