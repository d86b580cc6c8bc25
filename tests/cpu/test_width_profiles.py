"""The simulation, the costs scaled from measured steps and the bookkeeping behind benchmark/width_profiles.py."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from sgl_muse_mega.errors import UserError
from sgl_muse_mega.speculative.calibration import default_prior
from sgl_muse_mega.speculative.tree import grow
from sgl_muse_mega.speculative.width import COMPOSED_COST, default_cost

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmark"))

import simulated_draft
import step_costs
import width_profiles
from width_profiles import Outcome

RESULTS = Path(__file__).resolve().parents[2] / "benchmark" / "results"
COST = default_cost(16)


def test_the_default_costs_are_those_of_the_measured_steps() -> None:
    costs = step_costs.measured_costs(RESULTS)
    rounded = {most: {rows: round(ms, 2) for rows, ms in points.items()} for most, points in costs.chosen.items()}
    assert rounded == COMPOSED_COST
    assert costs.plain < costs.fixed[1] < costs.chosen[8][1]
    assert costs.of_fixed()[1] == np.float32(costs.plain)
    assert all(np.abs(costs.of_chosen(n) - default_cost(n)).max() < 0.006 for n in (8, 16))


def test_layers_are_scaled_and_the_rest_is_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts of 3 ms besides the layers, which take 1 ms and half a ms a row in 31 of 62 layers; planning half a ms."""

    def file(name: str, content: dict[str, object]) -> str:
        (tmp_path / name).write_text(json.dumps(content))
        return name

    names = {"draft layers": 1, "draft head": 0.5, "verify layers": 9, "head": 0.7, "accept": 0.1, "draft context": 0.6}
    parts = [{"name": name, "us": [ms * 1e3]} for name, ms in names.items()]
    monkeypatch.setattr(step_costs, "STEP_FILE", file("step", {"parts": parts, "gap_us": [100.0]}))
    eight = {"chain of 1": [1.5 + 1.4], "chain of 8": [3 + 4.5], "1": [5, 4, 6], "8": [8]}
    sixteen = {"1": [6], "16": [12], "12": [11], "tree of 12": [10.5], "chain of 8": [99]}
    made = {n: file(str(n), {"options": {"layers": 31}, "ms": ms}) for n, ms in ((8, eight), (16, sixteen))}
    monkeypatch.setattr(step_costs, "COST_FILES", made)
    costs = step_costs.measured_costs(tmp_path)
    assert costs.planning == pytest.approx(0.5)
    assert costs.chosen[8] == pytest.approx({1: 3.5 + 1.5 * 2, 8: 3.5 + 4.5 * 2})
    assert costs.chosen[16] == pytest.approx({1: 3.5 + 2.5 * 2, 12: 3.5 + 7.5 * 2, 16: 3.5 + 8.5 * 2})
    assert costs.fixed == pytest.approx({1: 3 + 1.4 * 2, 8: 3 + 4.5 * 2, 12: 3 + 7.5 * 2, 16: 3 + 8.5 * 2})
    assert costs.plain == pytest.approx(0.9 + 1.4 * 2)
    assert costs.of_fixed()[[1, 8]] == pytest.approx([costs.plain, 12])
    assert costs.of_trees()[8] == pytest.approx(12.5)


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
        outcome = Outcome(COST)
        width_profiles.fixed_chain(text, width, outcome)
        assert outcome.steps == simulated_draft.fixed_steps(text.kept(), width)
        assert outcome.tokens >= 200
        assert dict(outcome.rows) == {width: outcome.steps}


def test_a_tree_of_one_branch_is_a_chain() -> None:
    """Two nodes are the anchor and the most likely draft: a chain of width 2."""
    text = simulated_draft.simulate(2.0, 200, 3)
    chain, tree = Outcome(COST), Outcome(COST)
    width_profiles.fixed_chain(text, 2, chain)
    width_profiles.trees(text, 2, tree)
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
    chains, nodes = (1, 2, 4, 8, 16), (4, 8, 16)
    names = [f"chain {n}" for n in chains] + [f"tree {n}" for n in nodes] + list(width_profiles.RIVALS)
    outcomes = width_profiles.new_outcomes(names, step_costs.measured_costs(RESULTS))
    for n in chains:
        width_profiles.fixed_chain(text, n, outcomes[f"chain {n}"])
    for n in nodes:
        width_profiles.trees(text, n, outcomes[f"tree {n}"])
    for n in (8, 16):
        width_profiles.automatic_chain(text, n, outcomes[f"chain auto {n}"])
        width_profiles.trees(text, n, outcomes[f"tree auto {n}"], automatic=True)
        assert max(outcomes[f"chain auto {n}"].rows) <= n
        assert max(outcomes[f"tree auto {n}"].rows) <= n
    found = width_profiles.ratios(outcomes)
    assert max(ratio for name, ratio in found.items() if name.endswith(" 8")) < 1.1, found
    assert max(found.values()) < 1.2, found  # rows that do not count are dear
    assert outcomes["chain auto 16"].mean_rows() < 16


def test_what_does_not_depend_on_costs_is_taken_from_an_earlier_run(tmp_path: Path) -> None:
    costs = step_costs.measured_costs(RESULTS)
    texts = {"positions": 60, "texts": 1, "problems": 0}
    told: list[str] = []
    level, made = width_profiles.simulated("AIME, rough draft", costs, 60, 1, width_profiles.Earlier(), told.append)
    path = tmp_path / "results.json"
    rows = {name: {"tokens": o.tokens, "rows": o.rows} for name, o in made.items()}
    changed = {**rows, "chain auto 8": {"tokens": 9, "rows": {"9": 1}}, "chain 4": {"tokens": 77, "rows": {"4": 20}}}
    profiles = {"AIME, rough draft": changed}
    path.write_text(json.dumps({"options": texts, "levels": {"AIME, rough draft": level}, "profiles": profiles}))
    earlier = width_profiles.Earlier.read(path, texts)
    again, taken = width_profiles.simulated("AIME, rough draft", costs, 60, 1, earlier, told.append)
    assert again == level
    assert taken.keys() == made.keys()
    assert (taken["chain 4"].tokens, dict(taken["chain 4"].rows)) == (77, {4: 20})
    assert all((o.tokens, o.rows) == (made[n].tokens, made[n].rows) for n, o in taken.items() if n != "chain 4")
    with pytest.raises(UserError, match="make them equal"):
        width_profiles.Earlier.read(path, {**texts, "texts": 2})
