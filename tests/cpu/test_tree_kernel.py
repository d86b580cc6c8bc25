"""Trees and automatic widths of the draft's head launch against speculative.tree and speculative.width, to the bit."""

from pathlib import Path

import numpy as np
import pytest
import torch
from draft_case import DraftCase, draft_config

from sgl_muse_mega.emulator.machine import PLAIN, Schedule, racing
from sgl_muse_mega.speculative.backend import DraftBlock
from sgl_muse_mega.speculative.calibration import BINS, GROUPS, LIMIT, State
from sgl_muse_mega.speculative.tree import Tree, grow
from sgl_muse_mega.speculative.width import CostTable, chain_maxima, chain_rows, tree_rows

LENGTH, ANCHOR = 40, 19


@pytest.fixture(scope="module")
def case() -> DraftCase:
    """Sixteen rows; the block's last rows are made once, the head runs over them again and again. The kernels are those
    of test_draft_kernel."""
    torch.set_num_threads(1)
    config = draft_config(is_causal=True, num_hidden_layers=3, num_attention_heads=6, normed_embedding=False)
    made = DraftCase(config, row_cap=16, sms=2, seed=2)
    made.fill(LENGTH, ANCHOR)
    made.declare()
    made.step.launch_block(16)
    made.run()
    return made


def few_candidates(sources: Path | None = None) -> DraftCase:
    return DraftCase(draft_config(num_hidden_layers=1, selector_top_k=4), row_cap=8, sms=2, sources=sources)


def random_state(seed: int) -> State:
    rng = np.random.default_rng(seed)
    accepted = rng.integers(0, LIMIT, (GROUPS, BINS, 1)) >> rng.integers(0, 26, (GROUPS, BINS, 1))
    expected = rng.integers(1, LIMIT, (GROUPS, BINS, 1)) >> rng.integers(0, 20, (GROUPS, BINS, 1))
    return np.concatenate((accepted, expected.clip(1)), axis=-1).astype(np.int32)


def random_cost(seed: int, rows: int) -> CostTable:
    """Rising ms, now cheap and now dear."""
    rng = np.random.default_rng(seed)
    return np.cumsum(rng.random(rows + 1) * rng.choice([0.05, 0.5, 2.0]) + 1e-3).astype(np.float32)


def run_head(
    case: DraftCase, rows: int, nodes: int, state: State, cost: CostTable | None, schedule: Schedule = PLAIN
) -> None:
    """The head launch alone, over buffers that hold nothing else."""
    rows_of_block = case.step.activations.input.clone()
    case.step.activations.poison()
    case.step.activations.input.copy_(rows_of_block)
    memory = [(name, tensor, fixed, name == "draft.input" or known) for name, tensor, fixed, known in case.memory()]
    case.emulator.declare(memory)
    inputs, own = case.inputs, case.state
    inputs.token_ids[1:], inputs.positions[:], inputs.ancestors[:], inputs.live[:] = -1, -1, -1, -1
    inputs.length.fill_(LENGTH)
    own.parents[:], own.depths[:], own.conditionals[:] = -2, -2, -2.0
    own.calibration.copy_(torch.from_numpy(state))
    if cost is not None:
        own.costs[: len(cost)].copy_(torch.from_numpy(cost))
    case.step.launch_head(rows, nodes=nodes, auto=cost is not None)
    case.run(schedule)


def check_tree(case: DraftCase, tree: Tree, nodes: int) -> None:
    inputs, own, count = case.inputs, case.state, len(tree)
    assert inputs.token_ids[:count].tolist() == list(tree.tokens)
    assert own.parents[:count].tolist() == list(tree.parents)
    assert own.depths[:count].tolist() == list(tree.depths)
    assert own.conditionals[:count].tolist() == list(tree.conditionals)
    assert inputs.positions[:count].tolist() == [LENGTH + depth for depth in tree.depths]
    seen = (inputs.ancestors[:count, None] >> torch.arange(count)[None] & 1).bool().numpy()
    assert np.array_equal(seen, tree.ancestors())
    # rows that the lattice has no node for are well formed, and nobody's
    assert bool((inputs.token_ids[count:nodes] >= 0).all())
    assert bool((inputs.positions[count:nodes] > LENGTH).all())
    assert inputs.ancestors[count:nodes].tolist() == [1 | 1 << row for row in range(count, nodes)]


@pytest.mark.parametrize("seed", range(10))
def test_plan_of_a_tree(case: DraftCase, seed: int) -> None:
    rng = np.random.default_rng(seed)
    rows, nodes = int(rng.integers(2, 17)), int(rng.integers(2, 17))
    temperature = float(rng.choice([0.0, 0.03, 0.3, 1.0, 8.0]))
    state = random_state(seed)
    cost = random_cost(seed, nodes) if seed % 2 else None
    case.request(temperature=temperature)
    run_head(case, rows, nodes, state, cost, racing(seed) if seed > 5 else PLAIN)
    activations = case.step.activations
    tree = grow(
        ANCHOR, activations.candidates[: rows - 1], activations.lattice[: rows - 1], state, nodes=nodes,
        temperature=temperature or 1.0,
    )  # fmt: skip
    check_tree(case, tree, nodes)
    assert int(case.inputs.live) == (len(tree) if cost is None else tree_rows(tree, cost))


def test_equal_nodes_go_to_the_lower_row_and_candidate(case: DraftCase) -> None:
    """Every score is the same; and a lattice that cannot fill the tree."""
    weights = case.step.weights
    kept = [t.clone() for t in (weights.successors, weights.lm_head)]
    try:
        weights.successors.zero_()
        weights.lm_head.zero_()
        case.request()
        state = np.full((GROUPS, BINS, 2), 7, dtype=np.int32)
        run_head(case, 2, 16, state, None)
        assert bool((case.step.activations.lattice[0] == 0).all())
        assert case.state.parents.tolist() == [-1] + [0] * 15
        assert case.inputs.token_ids[1:].tolist() == list(range(15))
    finally:
        weights.successors.copy_(kept[0])
        weights.lm_head.copy_(kept[1])


def test_a_lattice_with_fewer_nodes() -> None:
    small = few_candidates()
    small.fill(LENGTH, ANCHOR)
    small.declare()
    small.step.launch_block(2)
    small.run()
    small.request()
    state = random_state(1)
    run_head(small, 2, 8, state, None)
    tree = grow(ANCHOR, small.step.activations.candidates[:1], small.step.activations.lattice[:1], state, nodes=8)
    assert len(tree) == 5 == int(small.inputs.live)
    check_tree(small, tree, 8)


@pytest.mark.parametrize("seed", range(10))
def test_rows_of_a_chain(case: DraftCase, seed: int) -> None:
    rng = np.random.default_rng(100 + seed)
    rows = int(rng.integers(2, 17))
    temperature = float(rng.choice([0.0, 0.1, 1.0]))
    state, cost = random_state(seed), random_cost(seed, rows)
    case.request(temperature=temperature, seed=seed)
    run_head(case, rows, 0, state, cost, racing(seed) if seed > 5 else PLAIN)
    a, slots = case.step.activations, rows - 1
    block = DraftBlock(case.inputs.token_ids[1:rows], a.candidates[:slots], a.probabilities[:slots])
    maxima = chain_maxima(block, a.lattice[:slots], temperature or 1.0)
    assert case.state.conditionals[1:rows].tolist() == maxima
    assert int(case.inputs.live) == chain_rows(state, maxima, cost)


def test_a_chain_of_fixed_width_leaves_the_plan_alone(case: DraftCase) -> None:
    case.request()
    run_head(case, 8, 0, random_state(0), None)
    assert int(case.inputs.live) == -1
    assert bool((case.inputs.positions == -1).all())
    assert bool((case.state.parents == -2).all())
