"""The accept launch on trees and chosen widths against the step loop's rules, and the move of the kept rows."""

from functools import partial

import numpy as np
import pytest
import torch
from test_accept_kernel import CONTEXT, ROW_CAP, VOCAB, AcceptCase
from test_tree_kernel import random_state
from torch import Tensor

from sgl_muse_mega.emulator.machine import PLAIN, Schedule, racing
from sgl_muse_mega.errors import UserError
from sgl_muse_mega.megakernel.decode_request import Report, read_report
from sgl_muse_mega.megakernel.draft_protocol import STATE
from sgl_muse_mega.speculative.accept import accept_greedy, accept_sampled
from sgl_muse_mega.speculative.backend import DraftBlock
from sgl_muse_mega.speculative.calibration import updated
from sgl_muse_mega.speculative.philox import uniform
from sgl_muse_mega.speculative.sampling import SamplingParams
from sgl_muse_mega.speculative.tree import Tree, accept_tree

LENGTH = 100
Caches = list[tuple[Tensor, Tensor]]


class PlanCase(AcceptCase):
    """Launches that keep a path of a tree, or chose how many rows of a chain count."""

    def launch(
        self, rows: int, live: int, *, nodes: int = 0, schedule: Schedule = PLAIN, caches: Caches | None = None
    ) -> Report:
        """caches: of which the kept rows are to move too."""
        self.inputs.live.fill_(live)
        memory = [("fault_record", self.emulator.fault_record, False, True)]
        memory += [
            (f"inputs.{name}", getattr(self.inputs, name), False, True) for name in self.inputs.__dataclass_fields__
        ]
        memory += [("logits", self.logits, True, True), ("greedy_ids", self.greedy_ids, True, True)]
        memory += [(name, getattr(self.draft, name), True, True) for name in ("candidates", "probabilities")]
        if caches is not None:
            self.step.use_caches(caches, [True, False, True])
            memory += [(f"cache {i}.{j}", t, False, True) for i, pair in enumerate(caches) for j, t in enumerate(pair)]
        self.emulator.declare(memory + self.step.memory())
        self.emulator.schedule = schedule
        self.step.launch(rows, nodes=nodes, auto=not nodes)
        if caches is not None:
            self.step.launch_compact()
        self.emulator.synchronize()
        report = read_report(self.state, 1)
        assert report is not None
        return report

    def plant(self, seed: int, rows: int, agreement: float) -> Tree:
        """A random tree, some of whose rows go on with what the target will say."""
        rng = np.random.default_rng(seed)
        self.fill(seed, ROW_CAP, 2.0, 1.0)
        parents, depths = [-1], [0]
        for row in range(1, rows):
            parents.append(int(rng.integers(max(0, row - 3), row)))
            depths.append(depths[parents[row]] + 1)
        tokens = [5] + [
            int(self.greedy_ids[parents[row]]) if rng.random() < agreement else int(rng.integers(0, VOCAB))
            for row in range(1, rows)
        ]
        conditionals = [1.0, *map(float, rng.random(rows - 1).astype(np.float32))]
        tree = Tree(tuple(parents), tuple(depths), tuple(tokens), tuple(conditionals), tuple(conditionals))
        self.inputs.token_ids[:rows].copy_(torch.tensor(tokens))
        for name, values in (("parents", parents), ("depths", depths), ("conditionals", conditionals)):
            getattr(self.state, name)[:rows].copy_(torch.tensor(values))
        return tree


@pytest.fixture(scope="module")
def case() -> PlanCase:
    torch.set_num_threads(1)
    return PlanCase(first_epoch=2**32 - 20)


@pytest.mark.parametrize("seed", range(24))
def test_path_of_a_tree(case: PlanCase, seed: int) -> None:
    rng = np.random.default_rng(seed)
    rows = int(rng.integers(2, ROW_CAP + 1))
    live = int(rng.integers(1, rows + 1)) if seed % 3 else ROW_CAP
    tree = case.plant(seed, rows, 0.8)
    params = SamplingParams(temperature=float(rng.choice([0.0, 0.2, 1.0])), top_k=int(rng.choice([0, 20])), seed=seed)
    state = random_state(seed)
    case.start(params, LENGTH)
    case.state.calibration.copy_(torch.from_numpy(state))
    case.state.path.fill_(-5)
    report = case.launch(rows, live, nodes=rows, schedule=racing(seed) if seed > 18 else PLAIN)
    counted = tree.first(min(live, rows))
    expected = accept_tree(case.logits[:rows], counted, params, LENGTH + 1, partial(uniform, params.seed))
    assert report.tokens == (*(tree.tokens[row] for row in expected.rows), expected.token)
    assert (report.accepted, report.rows) == (len(expected.rows), len(counted))
    assert case.state.path[: len(report.tokens)].tolist() == [0, *expected.rows]
    trials = counted.trials(expected.rows)
    assert np.array_equal(case.state.calibration.numpy(), updated(state, trials))
    assert case.inputs.token_ids[0] == report.tokens[-1]
    assert int(case.inputs.length) == LENGTH + len(report.tokens)


@pytest.mark.parametrize("seed", range(12))
def test_chosen_rows_of_a_chain(case: PlanCase, seed: int) -> None:
    """The last row that counts gives the token behind it; what comes later is nobody's."""
    rng = np.random.default_rng(seed)
    rows = int(rng.integers(2, ROW_CAP + 1))
    live = int(rng.integers(1, rows + 1))
    block = case.fill(seed, rows, 2.0, 1.0)
    if seed % 2:
        case.inputs.token_ids[1:].copy_(case.greedy_ids[:-1])
        block = DraftBlock(case.greedy_ids[: rows - 1].clone(), block.candidates, block.probabilities)
    params = SamplingParams(temperature=0.0 if seed % 2 else 0.7, seed=seed)
    maxima = rng.random(rows - 1).astype(np.float32)
    state = random_state(seed)
    case.start(params, LENGTH)
    case.state.calibration.copy_(torch.from_numpy(state))
    case.state.conditionals[1:rows].copy_(torch.from_numpy(maxima))
    report = case.launch(rows, live, schedule=racing(seed) if seed > 8 else PLAIN)
    logits, drafts = case.logits[:live], live - 1
    if params.greedy:
        expected = accept_greedy(logits, block.tokens[:drafts].tolist())
    else:
        first = DraftBlock(block.tokens[:drafts], block.candidates[:drafts], block.probabilities[:drafts])
        expected = accept_sampled(logits, first, params, LENGTH + 1, partial(uniform, params.seed))
    assert report.tokens == (*block.tokens[: expected.drafts].tolist(), expected.token)
    assert (report.accepted, report.rows) == (expected.drafts, live)
    trials = [(s, float(maxima[s - 1]), s <= expected.drafts) for s in range(1, min(expected.drafts + 2, live))]
    assert np.array_equal(case.state.calibration.numpy(), updated(state, trials))


def whole_path(case: PlanCase) -> None:
    """Rows 1, 3, 5 and 7 are the target's own text, the others are siblings of theirs."""
    case.plant(1, ROW_CAP, 0.0)
    parents, depths = [-1, 0, 0, 1, 1, 3, 3, 5], [0, 1, 1, 2, 2, 3, 3, 4]
    tokens = [5] + [
        (int(case.greedy_ids[parent]) + (row % 2 == 0)) % VOCAB for row, parent in enumerate(parents) if row
    ]
    case.inputs.token_ids.copy_(torch.tensor(tokens))
    case.state.parents.copy_(torch.tensor(parents))
    case.state.depths.copy_(torch.tensor(depths))


@pytest.mark.parametrize(
    ("changes", "length", "count", "reason"),
    [
        ({}, LENGTH, 5, None),
        ({"max_new_tokens": 4}, LENGTH, 3, "length"),
        ({"max_new_tokens": 6}, LENGTH, 5, "length"),
        ({}, CONTEXT - 3, 2, "context"),
        ({"stop": 2}, LENGTH, 3, "stop"),
    ],
)
def test_end_of_the_text_inside_a_path(
    case: PlanCase, changes: dict[str, int], length: int, count: int, reason: str | None
) -> None:
    whole_path(case)
    rest = dict(changes)
    stop = rest.pop("stop", None)
    last = [int(case.greedy_ids[row]) for row in (0, 1, 3, 5, 7)]
    case.start(SamplingParams(), length, **rest, stop_ids=set() if stop is None else {last[stop]})
    report = case.launch(ROW_CAP, ROW_CAP, nodes=ROW_CAP)
    assert report.accepted == 4
    assert (report.tokens, report.reason, report.length) == (tuple(last[:count]), reason, length + count)
    assert int(case.state.state[STATE.index("COMMITTED")]) == count
    assert case.state.path[:count].tolist() == [0, 1, 3, 5, 7][:count]


@pytest.mark.parametrize("temperature", [0.0, 0.001])
def test_a_broken_row_on_the_path_is_reported(case: PlanCase, temperature: float) -> None:
    whole_path(case)
    case.start(SamplingParams(temperature=temperature, top_k=9), LENGTH)
    case.greedy_ids[4] = VOCAB  # not on it
    case.launch(ROW_CAP, ROW_CAP, nodes=ROW_CAP)
    whole_path(case)
    case.start(SamplingParams(temperature=temperature, top_k=9), LENGTH)
    case.greedy_ids[3] = VOCAB
    with pytest.raises(UserError, match="no finite maximum"):
        case.launch(ROW_CAP, ROW_CAP, nodes=ROW_CAP)


# ---- the move ----


def some_caches(case: PlanCase, dtype: torch.dtype) -> Caches:
    slots = int(max(case.inputs.full_pages.max(), case.inputs.sliding_pages.max())) + 1
    generator = torch.Generator().manual_seed(3)

    def cache() -> Tensor:
        return torch.randint(0, 120, (slots, 2, 64), generator=generator).to(torch.float32).to(dtype)

    return [(cache(), cache()) for _ in range(3)]


def _run_move(case: PlanCase, caches: Caches, path: list[int], schedule: Schedule) -> None:
    full = [True, False, True]
    case.step.use_caches(caches, full)
    case.state.path[: len(path)].copy_(torch.tensor(path))
    case.state.state[STATE.index("CONTEXT_START")] = LENGTH
    case.state.state[STATE.index("COMMITTED")] = len(path)
    memory = [("fault_record", case.emulator.fault_record, False, True)]
    memory += [(name, getattr(case.inputs, name), True, True) for name in ("full_pages", "sliding_pages")]
    memory += [(f"cache {i}.{j}", t, False, True) for i, pair in enumerate(caches) for j, t in enumerate(pair)]
    case.emulator.declare(memory + case.step.memory())
    case.emulator.schedule = schedule
    case.step.launch_compact()
    case.emulator.synchronize()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("path", [[], [0], [0, 1, 2], [0, 1, 2, 4], [0, 2, 3, 5, 7], [0, 7], [0, 3, 4, 5, 6, 7]])
def test_kept_rows_move_together(case: PlanCase, dtype: torch.dtype, path: list[int]) -> None:
    caches = some_caches(case, dtype)
    expected = [tuple(t.clone() for t in pair) for pair in caches]
    for pair, pages in zip(
        expected, (case.inputs.full_pages, case.inputs.sliding_pages, case.inputs.full_pages), strict=True
    ):
        for cache in pair:
            bits = cache.view(torch.uint8)
            old = [bits[int(pages[LENGTH + row])].clone() for row in path]
            for place, values in enumerate(old):
                bits[int(pages[LENGTH + place])] = values
    _run_move(case, caches, path, racing(len(path) + 1))
    for ours, theirs in zip(caches, expected, strict=True):
        for cache, other in zip(ours, theirs, strict=True):
            assert torch.equal(cache.view(torch.uint8), other.view(torch.uint8))
