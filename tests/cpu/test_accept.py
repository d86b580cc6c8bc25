from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from scripted_backend import cache_distributions, one_hot_block, walk
from torch import Tensor

from sgl_muse_mega.errors import UserError
from sgl_muse_mega.speculative import accept
from sgl_muse_mega.speculative.accept import accept_greedy, accept_sampled, residual
from sgl_muse_mega.speculative.backend import DraftBlock
from sgl_muse_mega.speculative.philox import Purpose, uniform
from sgl_muse_mega.speculative.sampling import SamplingParams, target_distribution

VOCAB = 6
DRAWS = 20_000
ROW = torch.tensor([1.1, 0.4, 1.1, -0.6, 0.9, -2.0])


@settings(deadline=None)
@given(st.integers(0, 6), st.integers(2, 9), st.data())
def test_greedy_keeps_the_longest_matching_prefix(slots: int, vocab: int, data: st.DataObject) -> None:
    logits = torch.tensor(
        data.draw(
            st.lists(
                st.lists(st.integers(0, 3).map(float), min_size=vocab, max_size=vocab),
                min_size=slots + 1,
                max_size=slots + 1,
            )
        )
    )
    best = [row.index(max(row)) for row in logits.tolist()]
    drafts = [data.draw(st.one_of(st.just(token), st.integers(0, vocab - 1))) for token in best[:slots]]
    accepted = accept_greedy(logits, drafts)
    assert drafts[: accepted.drafts] == best[: accepted.drafts]
    assert accepted.drafts == slots or drafts[accepted.drafts] != best[accepted.drafts]
    assert accepted.token == best[accepted.drafts]


@pytest.fixture
def one_distribution_per_row(monkeypatch: pytest.MonkeyPatch) -> None:
    cache_distributions(monkeypatch, accept)


def counts_at_one_position(
    params: SamplingParams,
    q: list[float],
    candidates: list[int],
    first_seed: int = 0,
    accept_purpose: Purpose = Purpose.ACCEPT,
) -> Tensor:
    """Tokens at the first drafted position over DRAWS seeds, drafted and settled as in the step loop."""
    ids, probabilities = torch.tensor([candidates]), torch.tensor([q], dtype=torch.float32)
    logits = torch.stack([ROW, ROW.flip(0)])
    counts = torch.zeros(VOCAB)
    for seed in range(first_seed, first_seed + DRAWS):
        block = walk(ids, probabilities, [uniform(seed, 5, Purpose.DRAFT)])

        def coin(position: int, purpose: Purpose, seed: int = seed) -> float:
            return uniform(seed, position, accept_purpose if purpose is Purpose.ACCEPT else purpose)

        accepted = accept_sampled(logits, block, params, 5, coin)
        counts[int(block.tokens[0]) if accepted.drafts else accepted.token] += 1
    return counts


def chi_square(counts: Tensor, p: Tensor) -> float:
    """p-value of the counts under p; ids that cannot occur must not have occurred."""
    support = p > 0
    assert counts[~support].sum() == 0
    expected = p[support] / p[support].sum() * counts.sum()
    return float(stats.chisquare(counts[support].numpy(), expected.numpy()).pvalue) if support.sum() > 1 else 1.0


@pytest.mark.usefixtures("one_distribution_per_row")
@pytest.mark.parametrize(
    ("params", "q", "candidates"),
    [
        (SamplingParams(1.0), [0.25, 0.25, 0.25, 0.25], [3, 0, 5, 1]),
        (SamplingParams(0.7, top_k=3), [0.1, 0.2, 0.7], [0, 2, 3]),  # mostly an id outside the support
        (SamplingParams(1.3, top_p=0.6), [0.02, 0.98], [4, 0]),  # overconfident
        (SamplingParams(1.0, min_p=0.4), [1.0], [2]),  # deterministic draft: q is one-hot
        (SamplingParams(2.0, top_p=0.9, top_k=5, min_p=0.1), [0.6, 0.3, 0.1], [1, 1, 4]),  # an id listed twice
        (SamplingParams(1.0, top_k=2), [0.5, 0.5], [0, 2]),  # support of two tied ids, q equals p
    ],
)
def test_tokens_follow_the_target(params: SamplingParams, q: list[float], candidates: list[int]) -> None:
    p = target_distribution(ROW, params)
    assert chi_square(counts_at_one_position(params, q, candidates), p) > 0.001


@pytest.mark.usefixtures("one_distribution_per_row")
def test_tokens_follow_the_target_fresh() -> None:
    seed = int(torch.seed()) >> 2
    generator = torch.Generator().manual_seed(seed)
    candidates = torch.randperm(VOCAB, generator=generator)[:4].tolist()
    q = torch.rand(4, generator=generator)
    params = SamplingParams(0.3 + 2 * float(torch.rand(1, generator=generator)), top_p=0.95)
    counts = counts_at_one_position(params, (q / q.sum()).tolist(), candidates, first_seed=seed)
    assert chi_square(counts, target_distribution(ROW, params)) > 1e-6, seed


def not_subtracted(p: Tensor, candidates: Tensor, q: Tensor) -> Tensor:
    return p


def rejected_id_removed(p: Tensor, candidates: Tensor, q: Tensor) -> Tensor:
    return p.index_fill(0, candidates[q.argmax()], 0.0)


@pytest.mark.usefixtures("one_distribution_per_row")
@pytest.mark.parametrize("rule", [not_subtracted, rejected_id_removed])
def test_the_chi_square_catches_a_biased_residual(
    monkeypatch: pytest.MonkeyPatch, rule: Callable[[Tensor, Tensor, Tensor], Tensor]
) -> None:
    monkeypatch.setattr(accept, "residual", rule)
    params = SamplingParams(1.0)
    counts = counts_at_one_position(params, [0.5, 0.3, 0.2], [3, 0, 4])
    assert chi_square(counts, target_distribution(ROW, params)) < 1e-9


@pytest.mark.usefixtures("one_distribution_per_row")
def test_the_chi_square_catches_shared_coins() -> None:
    """Drafting and accepting with the same uniform biases the output."""
    params = SamplingParams(1.0)
    q, candidates = [0.25, 0.25, 0.25, 0.25], [3, 0, 5, 1]
    counts = counts_at_one_position(params, q, candidates, accept_purpose=Purpose.DRAFT)
    assert chi_square(counts, target_distribution(ROW, params)) < 1e-9


@pytest.mark.parametrize("u", [0.0, 1 - 2.0**-24])
@settings(deadline=None)
@given(
    st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=5),
    st.sampled_from([SamplingParams(1.0, top_k=2), SamplingParams(0.5, top_p=0.5), SamplingParams(1.0, min_p=0.9)]),
)
def test_extreme_coins_stay_in_the_support(u: float, drafts: list[int], params: SamplingParams) -> None:
    logits = torch.stack([ROW.roll(i) for i in range(len(drafts) + 1)])
    accepted = accept_sampled(logits, one_hot_block(drafts), params, 9, lambda position, purpose: u)
    for row, token in enumerate([*drafts[: accepted.drafts], accepted.token]):
        assert target_distribution(logits[row], params)[token] > 0


def test_zero_coin_keeps_any_possible_draft_and_no_impossible_one() -> None:
    params = SamplingParams(1.0, top_k=2)  # support 0 and 2
    logits = torch.stack([ROW] * 3)
    accepted = accept_sampled(logits, one_hot_block([2, 4]), params, 1, lambda position, purpose: 0.0)
    assert (accepted.drafts, accepted.token) == (1, 0)


def test_full_acceptance_draws_the_bonus_from_the_target() -> None:
    params = SamplingParams(1.0)
    logits = torch.stack([ROW, ROW.flip(0)])
    p = target_distribution(logits[1], params)
    u = float(p[:3].sum()) + 1e-9
    coins = {(7, Purpose.ACCEPT): 0.0, (8, Purpose.SAMPLE): u}
    accepted = accept_sampled(logits, one_hot_block([3]), params, 7, lambda *key: coins[key])
    assert (accepted.drafts, accepted.token) == (1, 3)


def test_rejection_looks_at_no_later_coin() -> None:
    params = SamplingParams(1.0, top_k=2)
    logits = torch.stack([ROW] * 4)
    seen: list[tuple[int, Purpose]] = []

    def coin(position: int, purpose: Purpose) -> float:
        seen.append((position, purpose))
        return 0.3

    accepted = accept_sampled(logits, one_hot_block([0, 5, 0]), params, 20, coin)
    assert accepted.drafts == 1
    assert seen == [(20, Purpose.ACCEPT), (21, Purpose.ACCEPT), (21, Purpose.SAMPLE)]


def test_token_with_zero_proposal_probability_is_not_kept() -> None:
    """The walk can end on a candidate without mass when the running sum stays below 1; 0 * u < p must not pass it."""
    block = DraftBlock(torch.tensor([4]), torch.tensor([[0, 4]]), torch.tensor([[1.0, 0.0]]))
    accepted = accept_sampled(torch.stack([ROW, ROW]), block, SamplingParams(1.0), 1, lambda position, purpose: 0.0)
    assert accepted.drafts == 0


@settings(deadline=None)
@given(st.lists(st.floats(0, 1), min_size=VOCAB, max_size=VOCAB), st.lists(st.floats(0, 1), min_size=3, max_size=3))
def test_residual(p: list[float], q: list[float]) -> None:
    candidates = [4, 0, 4]
    target = torch.tensor(p, dtype=torch.float64)
    rest = residual(target, torch.tensor(candidates), torch.tensor(q, dtype=torch.float64))
    want = list(p)
    for token, value in zip(candidates, q, strict=True):
        want[token] -= value
    want = [max(value, 0.0) for value in want]
    assert rest.tolist() == pytest.approx(want if sum(want) > 0 else p, abs=1e-12)
    assert target.tolist() == p, "the caller's p was changed"


def test_empty_residual_falls_back_to_the_target() -> None:
    p = torch.tensor([0.25, 0.75], dtype=torch.float64)
    assert residual(p, torch.tensor([0, 1]), p + 1e-9).tolist() == p.tolist()


def test_block_that_breaks_its_contract() -> None:
    logits = torch.stack([ROW, ROW])
    stranger = DraftBlock(torch.tensor([3]), torch.tensor([[0, 1]]), torch.tensor([[0.5, 0.5]]))
    too_much = DraftBlock(torch.tensor([0]), torch.tensor([[0, 1]]), torch.tensor([[1.5, 0.5]]))
    for block in (stranger, too_much):
        with pytest.raises(ValueError, match="slot 1"):
            accept_sampled(logits, block, SamplingParams(1.0), 1, lambda position, purpose: 0.5)


def test_draft_of_nan_is_refused_in_one_sentence() -> None:
    block = DraftBlock(torch.tensor([0]), torch.tensor([[0]]), torch.tensor([[float("nan")]]))
    with pytest.raises(UserError, match="draft's probability of id 0 is not a number"):
        accept_sampled(torch.stack([ROW, ROW]), block, SamplingParams(1.0), 1, lambda position, purpose: 0.5)
