import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sgl_muse_mega.errors import UserError
from sgl_muse_mega.speculative.sampling import SamplingParams, argmax, draw, target_distribution

logits_rows = st.lists(st.floats(-20, 20, width=32), min_size=1, max_size=12)
tied_rows = st.lists(st.integers(-3, 3).map(float), min_size=1, max_size=12)


def by_hand(logits: list[float], temperature: float, top_k: int, top_p: float, min_p: float) -> dict[int, float]:
    """The filters one after the other over (probability, id) pairs, in plain Python."""
    weights = [math.exp((z - max(logits)) / temperature) for z in logits]
    kept = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    kept = kept[: top_k or None]
    mass = sum(weights[i] for i in kept)
    if top_p < 1:
        nucleus, reached = [], 0.0
        for i in kept:
            if reached >= top_p * mass:
                break
            nucleus.append(i)
            reached += weights[i]
        kept = nucleus
    kept = [i for i in kept if weights[i] >= min_p * weights[kept[0]]]
    mass = sum(weights[i] for i in kept)
    return {i: weights[i] / mass for i in kept}


@settings(deadline=None)
@given(
    st.one_of(logits_rows, tied_rows),
    st.floats(0.05, 5),
    st.integers(0, 14).filter(lambda k: k != 1),
    st.sampled_from([0.07, 0.31, 0.55, 0.83, 0.97, 1.0]),
    st.sampled_from([0.0, 0.013, 0.21, 0.77]),
)
def test_filters_in_order(row: list[float], temperature: float, top_k: int, top_p: float, min_p: float) -> None:
    p = target_distribution(torch.tensor(row), SamplingParams(temperature, top_p, top_k, min_p))
    want = by_hand(row, temperature, top_k, top_p, min_p)
    assert p.dtype == torch.float64
    assert p.sum().item() == pytest.approx(1)
    for i in range(len(row)):
        # a mass within rounding of top_p or min_p may fall on either side; no example hits one of the odd fractions
        assert p[i].item() == pytest.approx(want.get(i, 0.0), abs=1e-9)
        assert i in want or p[i].item() == 0


def test_order_of_the_filters_matters() -> None:
    """top-p acts on what top-k left: 0.4 of (0.4 + 0.3) passes 0.55 alone, 0.4 of 1 would need the second id."""
    logits = torch.tensor([0.4, 0.3, 0.2, 0.1]).log()
    assert target_distribution(logits, SamplingParams(1.0, top_p=0.55, top_k=2)).tolist() == [1, 0, 0, 0]
    assert target_distribution(logits, SamplingParams(1.0, top_p=0.55)).count_nonzero() == 2


@settings(deadline=None)
@given(st.one_of(logits_rows, tied_rows), st.floats(0.1, 3))
def test_single_survivor_is_the_argmax(row: list[float], temperature: float) -> None:
    logits = torch.tensor(row)
    best = row.index(max(row))
    assert argmax(logits) == best
    settings = (
        SamplingParams(0.0),
        SamplingParams(1e-9),
        SamplingParams(temperature, top_k=1),
        SamplingParams(temperature, top_p=1e-4),
        SamplingParams(temperature, top_p=1e-300),
    )
    for params in settings:
        p = target_distribution(logits, params)
        assert p[best] == 1
        assert p.count_nonzero() == 1


def test_extreme_temperatures() -> None:
    logits = torch.tensor([1.0, 3.0, 3.0, -float("inf")])
    cold = target_distribution(logits, SamplingParams(2e-6))
    assert cold.tolist() == [0, 0.5, 0.5, 0]
    hot = target_distribution(logits, SamplingParams(1e300))
    assert hot.tolist() == pytest.approx([1 / 3, 1 / 3, 1 / 3, 0])


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(1.0)])
def test_broken_logits_are_reported(bad: float, params: SamplingParams) -> None:
    with pytest.raises(UserError, match="weights or the kernels"):
        target_distribution(torch.tensor([0.0, bad, 1.0]), params)
    with pytest.raises(UserError, match="-inf"):
        target_distribution(torch.full((3,), -float("inf")), params)


@settings(deadline=None)
@given(st.lists(st.one_of(st.just(0.0), st.floats(1e-6, 1)), min_size=1, max_size=20).filter(any), st.data())
def test_draw_inverts_the_running_sum(weights: list[float], data: st.DataObject) -> None:
    u = data.draw(st.one_of(st.just(0.0), st.integers(0, 2**24 - 1).map(lambda n: n / 2**24)))
    token = draw(torch.tensor(weights, dtype=torch.float64), u)
    running = torch.tensor(weights, dtype=torch.float64).cumsum(0).tolist()
    assert weights[token] > 0
    assert token == next(i for i, value in enumerate(running) if value > u * running[-1])


@pytest.mark.parametrize(
    "field",
    [
        {"temperature": -0.1},
        {"temperature": float("nan")},
        {"temperature": float("inf")},
        {"top_p": 0.0},
        {"top_p": 1.01},
        {"top_p": float("nan")},
        {"top_k": -1},
        {"min_p": -0.1},
        {"min_p": 1.5},
        {"min_p": float("nan")},
        {"seed": -1},
        {"seed": 2**64},
    ],
)
def test_out_of_range_is_refused(field: dict[str, float]) -> None:
    with pytest.raises(UserError, match=str(next(iter(field.values())))):
        SamplingParams(**field)
