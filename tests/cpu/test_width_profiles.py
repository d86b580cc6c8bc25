"""The simulation, the composed costs and the bookkeeping behind benchmark/width_profiles.py."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from sgl_muse_mega.speculative.calibration import default_prior
from sgl_muse_mega.speculative.tree import grow
from sgl_muse_mega.speculative.width import COMPOSED_COST, interpolated

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmark"))

import simulated_draft
import width_profiles
from width_profiles import Outcome

RESULTS = Path(__file__).resolve().parents[2] / "benchmark" / "results"
COST = interpolated(COMPOSED_COST, 16)


def test_the_default_costs_are_composed_from_the_measured_parts() -> None:
    points, plain = width_profiles.composed_cost(RESULTS)
    assert {rows: round(ms, 2) for rows, ms in points.items()} == COMPOSED_COST
    assert plain < points[1]


def test_a_simulated_draft_says_something_about_the_text() -> None:
    seed = int(np.random.default_rng().integers(2**31))
    text = simulated_draft.simulate(2.2, 400, seed)
    again = simulated_draft.simulate(2.2, 400, seed)
    assert (text.lattice == again.lattice).all()
    assert (text.truth == again.truth).all()
    first = torch.softmax(torch.from_numpy(text.lattice[:, 0, 0]), dim=1).numpy()
    right = text.chain[:, 0] == text.truth[:, 0]
    likely = first.max(axis=1) > np.median(first.max(axis=1))
    assert right[likely].mean() > right[~likely].mean(), seed
    assert 0.5 < right.mean() < 0.95
    harder = simulated_draft.simulate(0.5, 400, seed)
    assert harder.kept().mean() < text.kept().mean()


def test_fixed_steps_are_those_of_the_step_by_step_count() -> None:
    text = simulated_draft.simulate(2.0, 200, 1)
    for width in (1, 3, 16):
        outcome = Outcome()
        width_profiles.fixed_chain(text, width, outcome)
        assert outcome.steps == simulated_draft.fixed_steps(text.kept(), width)
        assert outcome.tokens >= 200
        assert dict(outcome.rows) == {width: outcome.steps}


def test_a_tree_of_one_branch_is_a_chain() -> None:
    """Two nodes are the anchor and the most likely draft: a chain of width 2."""
    text = simulated_draft.simulate(2.0, 200, 3)
    chain, tree = Outcome(), Outcome()
    width_profiles.fixed_chain(text, 2, chain)
    width_profiles.trees(text, 2, None, tree)
    assert (chain.tokens, chain.rows) == (tree.tokens, tree.rows)


def test_followed_rows_agree_with_the_text() -> None:
    text = simulated_draft.simulate(1.5, 60, 4)
    for at in range(60):
        ids = torch.arange(simulated_draft.K).expand(7, -1)
        tree = grow(0, ids, torch.from_numpy(text.lattice[at, :7]), default_prior(), nodes=16)
        path = width_profiles.followed(tree, text.truth[at].tolist())
        assert [tree.tokens[row] for row in path] == text.truth[at, : len(path)].tolist()
        row = path[-1] if path else 0
        children = [tree.tokens[r] for r in range(1, 16) if tree.parents[r] == row]
        assert len(path) == 7 or text.truth[at, len(path)] not in children


@pytest.mark.parametrize("level", [1.0, 2.5])
def test_automatic_widths_hold_their_own(level: float) -> None:
    """Not far behind the best fixed ones on a short text, from a calibration that knows nothing."""
    text = simulated_draft.simulate(level, 300, 7)
    outcomes = {f"chain {n}": Outcome() for n in (1, 2, 4, 8, 16)} | {"chain auto": Outcome()}
    for n in (1, 2, 4, 8, 16):
        width_profiles.fixed_chain(text, n, outcomes[f"chain {n}"])
    width_profiles.automatic_chain(text, COST, outcomes["chain auto"])
    for n in (4, 8, 16):
        width_profiles.trees(text, n, None, outcomes.setdefault(f"tree {n}", Outcome()))
    width_profiles.trees(text, 16, COST, outcomes.setdefault("tree auto", Outcome()))
    found = width_profiles.ratios(outcomes, COST, 7.3)
    assert max(found.values()) < 1.1, found
    assert outcomes["chain auto"].mean_rows() < 16
