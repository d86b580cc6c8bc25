import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sgl_muse_mega.errors import UserError
from sgl_muse_mega.speculative import calibration
from sgl_muse_mega.speculative.backend import DraftBlock
from sgl_muse_mega.speculative.calibration import (
    BINS,
    GROUPS,
    LIMIT,
    ONE,
    calibrated,
    check_prior,
    conditionals,
    default_prior,
    exponential,
    updated,
)
from sgl_muse_mega.speculative.sampling import SamplingParams, argmax
from sgl_muse_mega.speculative.tree import Tree, accept_tree, ancestor_mask, grow
from sgl_muse_mega.speculative.width import (
    chain_maxima,
    chain_rows,
    default_cost,
    interpolated,
    read_cost_table,
    tree_rows,
)

seeds = st.integers(0, 2**32 - 1)


def random_state(generator: np.random.Generator) -> calibration.State:
    return generator.integers(1 << 14, 1 << 20, (GROUPS, BINS, 2)).astype(np.int32)


def random_lattice(generator: np.random.Generator, slots: int, k: int, scale: float = 2.0) -> tuple[torch.Tensor, ...]:
    scores = generator.normal(0, scale, (slots, k, k)).astype(np.float32)
    scores[0] = scores[0, 0]
    candidates = np.stack([generator.permutation(100)[:k] for _ in range(slots)])
    return torch.from_numpy(candidates), torch.from_numpy(scores)


@given(st.lists(st.floats(-79.5, 0, width=32), min_size=1, max_size=16))
def test_exponential(values: list[float]) -> None:
    x = np.array(values, dtype=np.float32)
    assert exponential(x) == pytest.approx(np.exp(x.astype(np.float64)), rel=2**-16)


def test_exponential_at_its_ends() -> None:
    x = np.array([0.0, -80.0, -80.1, -np.inf, np.nan], dtype=np.float32)
    got = exponential(x)
    assert got[0] == 1
    assert got[1] == pytest.approx(math.exp(-80), rel=1e-4)
    assert got[2:].tolist() == [0, 0, 0]
    assert got.dtype == np.float32


@given(seeds, st.integers(1, 16), st.floats(0.05, 4))
def test_conditionals_are_the_softmax(seed: int, k: int, temperature: float) -> None:
    scores = np.random.default_rng(seed).normal(0, 3, k).astype(np.float32)
    want = torch.softmax(torch.from_numpy(scores).double() / temperature, dim=0)
    q = conditionals(scores, temperature)
    assert q == pytest.approx(want.numpy(), rel=1e-4, abs=1e-6)
    assert q.dtype == np.float32
    assert int(q.argmax()) == int(scores.argmax())


@pytest.mark.parametrize(
    ("scores", "want"),
    [
        ([np.nan, 1.0, 1.0], [0, 0.5, 0.5]),
        ([np.nan, np.nan], [0, 0]),
        ([np.inf, 1.0], [0, 0]),
        ([-np.inf, 2.0], [0, 1]),
        ([-np.inf, -np.inf], [0, 0]),
    ],
)
def test_conditionals_of_broken_rows_are_numbers(scores: list[float], want: list[float]) -> None:
    assert conditionals(np.array(scores, dtype=np.float32), 1.0).tolist() == want


@settings(deadline=None, max_examples=60)
@given(seeds, st.integers(1, 3), st.integers(1, 4), st.integers(1, 16))
def test_rows_are_the_best_nodes(seed: int, slots: int, k: int, nodes: int) -> None:
    """Against all paths of the lattice, by brute force."""
    generator = np.random.default_rng(seed)
    candidates, scores = random_lattice(generator, slots, k)
    state = random_state(generator)
    tree = grow(7, candidates, scores, state, nodes=nodes, temperature=0.8)

    every = {(): np.float32(1)}
    for depth in range(1, slots + 1):
        for path in itertools.product(range(k), repeat=depth):
            q = conditionals(scores[depth - 1, path[-2] if depth > 1 else 0].numpy(), 0.8)[path[-1]]
            every[path] = every[path[:-1]] * calibrated(state, depth, q)
    best = sorted(every.values(), reverse=True)[:nodes]
    assert list(tree.probabilities) == [float(p) for p in best]
    assert len(set(paths_of(tree))) == len(tree) == min(nodes, len(every))
    assert all(parent < row for row, parent in enumerate(tree.parents))
    for row in range(1, len(tree)):
        assert tree.depths[row] == tree.depths[tree.parents[row]] + 1
        assert tree.tokens[row] in candidates[tree.depths[row] - 1].tolist()


def paths_of(tree: Tree) -> list[tuple[int, ...]]:
    paths: list[tuple[int, ...]] = [()]
    for row in range(1, len(tree)):
        paths.append((*paths[tree.parents[row]], tree.tokens[row]))
    return paths


@given(seeds, st.integers(1, 16))
def test_shorter_plans_are_prefixes(seed: int, nodes: int) -> None:
    candidates, scores = random_lattice(np.random.default_rng(seed), 5, 6)
    longest = grow(1, candidates, scores, default_prior(), nodes=16)
    assert grow(1, candidates, scores, default_prior(), nodes=nodes) == longest.first(nodes)


def test_ties_go_to_the_lower_parent_and_candidate() -> None:
    tree = grow(0, torch.tensor([[5, 6], [7, 8]]), torch.zeros(2, 2, 2), default_prior(), nodes=7)
    assert tree.parents == (-1, 0, 0, 1, 1, 2, 2)
    assert tree.tokens == (0, 5, 6, 7, 8, 7, 8)


def test_hopeless_nodes_fill_the_plan_without_denormal_numbers() -> None:
    scores = torch.full((4, 3, 3), -75.0)
    scores[..., 0] = 0
    tree = grow(0, torch.arange(12).reshape(4, 3), scores, default_prior(), nodes=16)
    assert len(tree) == 16
    assert all(p == 0 or p > 2.0**-101 for p in tree.probabilities)


@given(seeds)
def test_ancestor_mask(seed: int) -> None:
    generator = np.random.default_rng(seed)
    parents = [-1, *(int(generator.integers(0, row)) for row in range(1, 16))]
    mask = ancestor_mask(parents)
    for row in range(16):
        seen, at = set(), row
        while at >= 0:
            seen.add(at)
            at = parents[at]
        assert set(np.flatnonzero(mask[row]).tolist()) == seen


@given(seeds, st.integers(1, 16))
def test_greedy_path(seed: int, nodes: int) -> None:
    generator = np.random.default_rng(seed)
    candidates, scores = random_lattice(generator, 4, 5, scale=1.0)
    tree = grow(3, candidates, scores, default_prior(), nodes=nodes)
    logits = torch.from_numpy(generator.normal(0, 1, (len(tree), 100)).astype(np.float32))
    for row in range(1, len(tree)):  # about half of the rows continue into a child
        if generator.random() < 0.5:
            logits[tree.parents[row], tree.tokens[row]] = 10 + row
    accepted = accept_tree(logits, tree, SamplingParams(), 1, lambda position, purpose: pytest.fail("greedy"))
    row = 0
    for child in accepted.rows:
        assert tree.parents[child] == row
        assert tree.tokens[child] == argmax(logits[row])
        row = child
    assert accepted.token == argmax(logits[row])
    assert accepted.token not in [tree.tokens[r] for r in range(1, len(tree)) if tree.parents[r] == row]


@given(seeds)
def test_trials_are_the_children_of_kept_rows(seed: int) -> None:
    generator = np.random.default_rng(seed)
    candidates, scores = random_lattice(generator, 4, 5)
    tree = grow(3, candidates, scores, default_prior(), nodes=12)
    path, row = [], 0
    while children := [r for r in range(1, 12) if tree.parents[r] == row]:
        row = children[0]
        path.append(row)
    path = path[: int(generator.integers(0, len(path) + 1))]
    trials = tree.trials(path)
    reached = [r for r in range(1, 12) if tree.parents[r] in {0, *path}]
    assert [kept for _, _, kept in trials] == [r in path for r in reached]
    assert [q for _, q, _ in trials] == [tree.conditionals[r] for r in reached]


def test_the_calibration_learns_what_a_probability_is_worth() -> None:
    generator = np.random.default_rng(4)
    state = default_prior()
    for _ in range(4000):
        q = float(generator.random())
        state = updated(state, [(2, q, bool(generator.random() < 0.5 * q))])
    for q in (0.2, 0.5, 0.95):
        assert calibrated(state, 3, q) == pytest.approx(0.5 * q, rel=0.2)  # depth 3 is in the group of depth 2
        assert calibrated(state, 1, q) == pytest.approx(q, rel=1e-6)


def test_full_bins_are_halved_once_a_step() -> None:
    state = default_prior()
    state[0, 15] = (LIMIT - 1, 7)
    new = updated(state, [(1, 1.0, True), (1, 1.0, True)])
    assert new[0, 15].tolist() == [(LIMIT - 1 + 2 * ONE + 1) // 2, (7 + 2 * ONE + 1) // 2]
    assert state[0, 15].tolist() == [LIMIT - 1, 7]
    new[0, 15] = state[0, 15]
    assert (new == state).all()


@pytest.mark.parametrize("spoil", [lambda s: s[:2], lambda s: s.astype(np.int64), lambda s: s * 0, lambda s: s * LIMIT])
def test_priors_that_cannot_be_used_are_refused(spoil: object) -> None:
    assert callable(spoil)
    check_prior(default_prior())
    with pytest.raises(UserError, match="calibration"):
        check_prior(spoil(default_prior()))


@given(st.lists(st.floats(0, 1, width=32), max_size=15), st.lists(st.floats(0.5, 3), min_size=16, max_size=16))
def test_tree_rows_maximise_the_rate(probabilities: list[float], increments: list[float]) -> None:
    probabilities = [1.0, *sorted(probabilities, reverse=True)]
    n = len(probabilities)
    tree = Tree((-1,) * n, (0,) * n, (0,) * n, (1.0,) * n, tuple(probabilities))
    cost = np.array([0, *np.cumsum(increments)], dtype=np.float32)
    rates = [sum(probabilities[: i + 1]) / float(cost[i + 1]) for i in range(n)]
    assert rates[tree_rows(tree, cost) - 1] >= max(rates) * (1 - 1e-5)


@given(st.lists(st.floats(0, 1, width=32), min_size=1, max_size=15), seeds)
def test_chain_rows_stop_before_they_look(maxima: list[float], seed: int) -> None:
    """Whether slot i is verified depends on maxima[: i] alone: others behind it change nothing."""
    generator = np.random.default_rng(seed)
    cost = np.array([0, *np.cumsum(generator.uniform(0.05, 1, len(maxima) + 1)) + 2], dtype=np.float32)
    state = random_state(generator)
    rows = chain_rows(state, maxima, cost)
    for slot in range(1, len(maxima) + 1):
        other = [*maxima[:slot], *generator.random(len(maxima) - slot).tolist()]
        assert (chain_rows(state, other, cost) > slot) == (rows > slot)


def test_chain_rows_follow_the_price() -> None:
    state = default_prior()
    cheap = np.array([0, 10, 10.1, 10.2, 10.3, 10.4], dtype=np.float32)
    dear = np.array([0, 10, 19, 28, 37, 46], dtype=np.float32)
    assert chain_rows(state, [0.9, 0.8, 0.7, 0.6], cheap) == 5
    assert chain_rows(state, [0.9, 0.8, 0.7, 0.6], dear) in (1, 2)
    assert chain_rows(state, [0.1, 0.9, 0.9, 0.9], dear) == 1
    assert chain_rows(state, [], cheap) == 1
    bump = np.array([0, 10, 14, 14, 14, 14], dtype=np.float32)  # the second row alone does not pay, four do
    assert chain_rows(state, [0.25, 0.99, 0.99, 0.99], bump) == 1
    assert chain_rows(state, [0.99, 0.99, 0.99, 0.99], bump) == 5


def test_chain_maxima_follow_the_path() -> None:
    candidates, scores = random_lattice(np.random.default_rng(1), 3, 4)
    tokens = torch.tensor([int(candidates[0, 2]), int(candidates[1, 1]), int(candidates[2, 3])])
    block = DraftBlock(tokens, candidates, torch.ones(3, 4), scores)
    rows = [scores[0, 0], scores[1, 2], scores[2, 1]]
    assert chain_maxima(block, scores, 0.5) == [float(conditionals(row.numpy(), 0.5).max()) for row in rows]


def test_cost_tables(tmp_path: object) -> None:
    table = interpolated({1: 10.0, 8: 17.0, 16: 21.0}, 12)
    assert table.tolist() == [0, *(10.0 + n for n in range(8)), 17.5, 18, 18.5, 19]
    assert table.dtype == np.float32
    for points in ({}, {2: 1.0, 16: 2.0}, {1: 1.0, 4: 2.0}, {1: 1.0, 16: -2.0}, {1: 1.0, 16: math.nan}):
        with pytest.raises(UserError, match="cost table"):
            interpolated(points, 8)


@pytest.mark.parametrize("content", ["[1, 2]", "{", '{"a": 1}', '{"1": null}'])
def test_cost_files_that_cannot_be_read(content: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("cost") / "cost.json"
    with pytest.raises(UserError, match="cannot be read"):
        read_cost_table(path)
    path.write_text(content)
    with pytest.raises(UserError, match="not a JSON object"):
        read_cost_table(path)
    path.write_text('{"1": 9.5, "16": 12}')
    assert read_cost_table(path) == {1: 9.5, 16: 12.0}
    path.write_text('{"options": {"layers": 14}, "ms": {"chain of 8": [9, 9], "1": [3, 1, 2], "8": [4.0]}}')
    assert read_cost_table(path) == {1: 2.0, 8: 4.0}
    path.write_text('{"ms": {"1": 3}}')
    with pytest.raises(UserError, match="not a JSON object of rows and ms"):
        read_cost_table(path)


def test_default_costs_are_those_of_the_launch() -> None:
    eight, more = default_cost(8), default_cost(9)
    assert (len(eight), len(more), len(default_cost(16))) == (9, 10, 17)
    assert all(0 < low < high for low, high in zip(eight[1:], more[1:], strict=False))
    assert (np.diff(default_cost(16)[1:]) > 0).all()
    with pytest.raises(UserError, match="17 rows"):
        default_cost(17)
