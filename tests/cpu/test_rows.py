"""The step loop with trees and automatic widths."""

import itertools
import json
import random
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from scripted_backend import ScriptedBackend, cache_distributions, one_hot_block, plain_greedy
from small_models import small_draft, small_target
from test_generate import joint_chi_square

from sgl_muse_mega.checkpoint import tiny
from sgl_muse_mega.checkpoint.draft import load_draft
from sgl_muse_mega.checkpoint.random_weights import random_draft, random_target
from sgl_muse_mega.checkpoint.target import load_target
from sgl_muse_mega.commands.text import Text
from sgl_muse_mega.config import load_draft_config, load_target_config
from sgl_muse_mega.errors import UserError
from sgl_muse_mega.reference.backend import ReferenceBackend
from sgl_muse_mega.reference.selector import walk_sampled
from sgl_muse_mega.speculative import accept, rows, tree
from sgl_muse_mega.speculative import generate as step_loop
from sgl_muse_mega.speculative.backend import DraftBlock
from sgl_muse_mega.speculative.calibration import BINS, GROUPS, State, default_prior
from sgl_muse_mega.speculative.generate import Generation, generate
from sgl_muse_mega.speculative.philox import Purpose, uniform
from sgl_muse_mega.speculative.rows import RowPlan
from sgl_muse_mega.speculative.sampling import SamplingParams, target_distribution
from sgl_muse_mega.speculative.tree import AcceptedPath, Tree, accept_tree
from sgl_muse_mega.speculative.width import chain_maxima, interpolated

PROMPT = [1, 2, 3]
COST = interpolated({1: 4.0, 2: 4.6, 16: 11.0}, 16)  # dear enough that widths differ
PLANS = {
    "tree": RowPlan(nodes=7),
    "auto": RowPlan(cost=COST),
    "tree and auto": RowPlan(nodes=12, cost=COST),
}


class TreeBackend(ScriptedBackend):
    """A scripted backend with a lattice: logits of the model itself, tilted and with noise."""

    def __init__(self, *, noise: float = 1.0, k: int = 4, **options: object) -> None:
        super().__init__(draft=TreeBackend.propose, **options)  # type: ignore[arg-type]
        self._noise = noise
        self._k = min(k, self.vocab_size)
        self._parents: tuple[int, ...] = ()
        self._blocks: dict[tuple[int, ...], tuple[torch.Tensor, torch.Tensor]] = {}

    def propose(self, anchor: int, width: int, temperature: float, uniforms: Sequence[float]) -> DraftBlock:
        key = (*self.committed[-1:], anchor, width)
        if key not in self._blocks:
            generator = np.random.default_rng([self._seed, *key])
            ids = np.stack([generator.permutation(self.vocab_size)[: self._k] for _ in range(width - 1)])
            scores = generator.normal(0, self._noise, (width - 1, self._k, self._k)).astype(np.float32)
            text = [*self.committed, anchor]
            for slot in range(width - 1):
                for p in range(self._k):
                    before = [*text, int(ids[slot - 1, p])] if slot else text
                    scores[slot, p] += self.logits(before[-2:]).numpy()[ids[slot]]
                text = [*text, int(ids[slot, scores[slot, 0].argmax()])]
            scores[0] = scores[0, 0]
            self._blocks[key] = torch.from_numpy(ids), torch.from_numpy(scores)
        candidates, lattice = self._blocks[key]
        if temperature:
            path, q = walk_sampled(lattice, temperature, uniforms)
            return DraftBlock(candidates.gather(1, path[:, None])[:, 0], candidates, q, lattice)
        block = one_hot_block(candidates[:, 0].tolist())
        path = [0]
        for slot in range(width - 1):
            path.append(int(lattice[slot, path[-1]].argmax()))
        tokens = candidates.gather(1, torch.tensor(path[1:])[:, None])[:, 0]
        return DraftBlock(tokens, candidates, block.probabilities, lattice)

    def verify_tree(self, tokens: Sequence[int], parents: Sequence[int]) -> torch.Tensor:
        assert 1 <= len(tokens) == len(parents) <= self.width_limit
        assert self.length + len(tokens) <= self.max_context, "a row past the context"
        assert parents[0] == -1
        assert all(0 <= parent < row for row, parent in enumerate(parents) if row)
        self.widths.append(len(tokens))
        self.pending, self._parents = list(tokens), tuple(parents)
        return torch.stack([self.logits(self.committed + self._path(row)) for row in range(len(tokens))])

    def commit_path(self, rows: Sequence[int]) -> None:
        assert rows[0] == 0
        assert all(self._parents[row] == before for before, row in itertools.pairwise(rows))
        self.committed += [self.pending[row] for row in rows]
        self.pending = []

    def _path(self, row: int) -> list[int]:
        return [] if row < 0 else [*self._path(self._parents[row]), self.pending[row]]


def text(backend: ScriptedBackend, params: SamplingParams, **options: object) -> Generation:
    generation = generate(backend, PROMPT, params, **options)  # type: ignore[arg-type]
    events = list(generation)
    assert [event.drafted + 1 for event in events[1:]] == backend.widths
    assert backend.committed + generation.tokens[-1:] == PROMPT + generation.tokens
    assert sum(generation.stats.rows_per_step.values()) == generation.stats.steps
    assert sum(len(event.tokens) for event in events) == len(generation.tokens)
    assert all(len(event.tokens) <= event.accepted + 1 <= event.drafted + 1 for event in events)
    return generation


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS.keys())
@settings(deadline=None, max_examples=25)
@given(st.integers(0, 2**32), st.integers(2, 9), st.integers(1, 70), st.sampled_from([2, None]), st.integers(20, 64))
def test_greedy_equals_plain_decoding(
    plan: RowPlan, seed: int, width: int, max_new_tokens: int, levels: int | None, max_context: int
) -> None:
    backend = TreeBackend(seed=seed, levels=levels, max_context=max_context)
    generation = text(backend, SamplingParams(), width=width, max_new_tokens=max_new_tokens, plan=plan)
    want = plain_greedy(backend, PROMPT, min(max_new_tokens, max_context - len(PROMPT)))
    assert generation.tokens == want


@pytest.mark.parametrize("name", ["tree", "tree and auto"])
@settings(deadline=None, max_examples=15)
@given(st.integers(0, 2**32), st.floats(0.3, 2))
def test_sampled_text_of_a_tree_is_that_of_plain_decoding(name: str, seed: int, temperature: float) -> None:
    params = SamplingParams(temperature, top_p=0.9, seed=seed)
    backend = TreeBackend(seed=seed)
    generation = text(backend, params, width=5, max_new_tokens=40, plan=PLANS[name])
    plain = text(ScriptedBackend(seed=seed), params, width=1, max_new_tokens=40)
    assert generation.tokens == plain.tokens
    assert generation.stats.steps < 40


def test_widths_are_chosen_and_the_draft_is_learnt() -> None:
    for name in ("auto", "tree and auto"):
        backend = TreeBackend(seed=3, max_context=300, noise=0.7)
        generation = text(backend, SamplingParams(1.0, seed=8), width=8, max_new_tokens=200, plan=PLANS[name])
        assert len(generation.stats.rows_per_step) > 2, name
        state = generation.calibration
        assert (state != default_prior()).any()
        again = text(backend, SamplingParams(1.0, seed=8), width=8, max_new_tokens=200, plan=PLANS[name])
        assert again.tokens == generation.tokens
        assert (again.calibration == state).all()
        carried = RowPlan(PLANS[name].nodes, COST, prior=state)
        first = text(backend, SamplingParams(), width=8, max_new_tokens=1, plan=carried)
        assert (first.calibration == state).all()


def test_a_chain_learns_only_where_its_turn_came() -> None:
    """Drafts behind the first rejection leave no trace: they are drawn again with the same uniforms."""
    chain = rows.Chain(5, one_hot_block([1, 2, 3]), [0.9, 0.8, 0.7, 0.6])
    trials = {kept: chain.trials(rows.Kept(tuple(range(kept + 1)), (0,) * (kept + 1))) for kept in range(4)}
    assert trials[0] == [(1, 0.9, False)]
    assert trials[1] == [(1, 0.9, True), (2, 0.8, False)]
    assert trials[3] == [(1, 0.9, True), (2, 0.8, True), (3, 0.7, True)]  # slot 4 was not verified


@pytest.fixture
def one_distribution_per_row(monkeypatch: pytest.MonkeyPatch) -> None:
    cache_distributions(monkeypatch, accept, step_loop, tree)


def small_vocabulary() -> TreeBackend:
    return TreeBackend(vocab_size=4, k=3, scale=1.0, seed=11)


@pytest.mark.usefixtures("one_distribution_per_row")
@pytest.mark.parametrize("name", list(PLANS))
def test_text_follows_the_target(name: str) -> None:
    """Three tokens jointly."""
    draws = 4000 if name == "auto" else 1500
    plan = {"tree": RowPlan(nodes=6), "auto": RowPlan(cost=SPLIT), "tree and auto": RowPlan(nodes=6, cost=COST)}[name]
    assert joint_chi_square(SamplingParams(1.0), small_vocabulary(), 3, draws=draws, plan=plan) > 0.001


SPLIT = interpolated({1: 4.0, 16: 37.0}, 16)  # slots of about even odds are verified or not


@pytest.mark.usefixtures("one_distribution_per_row")
def test_the_joint_chi_square_catches_a_width_that_looks_at_the_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    """Verifying a slot because its drawn token is a likely one prefers likely tokens."""

    def peek(block: DraftBlock, lattice: torch.Tensor, temperature: float) -> list[float]:
        chosen = block.candidates == block.tokens[:, None]
        likely = block.probabilities[chosen] >= block.probabilities.amax(dim=1)
        return [1.0 if yes else 0.0 for yes in likely.tolist()]

    monkeypatch.setattr(rows, "chain_maxima", peek)
    plan = RowPlan(cost=SPLIT)
    assert joint_chi_square(SamplingParams(1.0), small_vocabulary(), 3, draws=1500, plan=plan) < 1e-6


def children_in_turn(
    logits: torch.Tensor, plan: Tree, params: SamplingParams, position: int, uniforms: Callable[[int, Purpose], float]
) -> AcceptedPath:
    """Wrong: every child gets a coin of p(x), although the coins before it have ruled out others."""
    row, path = 0, []
    while True:
        p = tree.target_distribution(logits[row], params)
        children = [r for r in range(1, len(plan)) if plan.parents[r] == row]
        for child in children:
            if uniforms(position + plan.depths[row] + 1000 * child, Purpose.ACCEPT) < float(p[plan.tokens[child]]):
                path.append(child)
                row = child
                break
        else:
            rest = p.index_fill(0, torch.tensor([plan.tokens[r] for r in children], dtype=torch.int64), 0.0)
            return AcceptedPath(tuple(path), tree.draw(rest, uniforms(position + plan.depths[row], Purpose.SAMPLE)))


@pytest.mark.usefixtures("one_distribution_per_row")
@pytest.mark.parametrize(("rule", "exact"), [(accept_tree, True), (children_in_turn, False)])
def test_two_tokens_of_one_tree_follow_the_target(rule: Callable[..., AcceptedPath], exact: bool) -> None:
    generator = np.random.default_rng(5)
    plan = Tree((-1, 0, 0, 1, 1, 2), (0, 1, 1, 2, 2, 2), (0, 3, 1, 0, 2, 1), (1.0,) * 6, (1.0,) * 6)
    logits = torch.from_numpy(generator.normal(0, 1, (6, 4)).astype(np.float32))
    params, draws = SamplingParams(0.9, top_p=0.95), 20_000
    first = target_distribution(logits[0], params)
    counts = {}
    for seed in range(draws):
        path = rule(logits, plan, params, 40, lambda position, purpose, seed=seed: uniform(seed, position, purpose))
        tokens = (*(plan.tokens[row] for row in path.rows), path.token)[:2]
        counts[tokens] = counts.get(tokens, 0) + 1
    rows_behind = {3: 1, 1: 2}  # tokens of the root's children
    expected = {}
    for x in range(4):
        if x not in rows_behind:
            expected[(x,)] = float(first[x])
            continue
        for y, probability in enumerate(target_distribution(logits[rows_behind[x]], params).tolist()):
            expected[(x, y)] = float(first[x]) * probability
    assert all(expected[tokens] > 0 for tokens in counts)
    cells = np.array([(counts.get(t, 0), p * draws) for t, p in expected.items() if p > 0])
    pvalue = stats.chisquare(*cells.T).pvalue
    assert pvalue > 0.001 if exact else pvalue < 1e-9


@pytest.mark.parametrize(
    ("plan", "width", "words"),
    [
        (RowPlan(nodes=17), 8, "between 2 and 16 nodes, found 17"),
        (RowPlan(nodes=1), 8, "between 2 and 16 nodes, found 1"),
        (RowPlan(nodes=4), 1, "A token tree needs drafts"),
        (RowPlan(cost=COST), 1, "An automatic width needs drafts"),
        (RowPlan(cost=COST[:8]), 8, "ends at 7 rows, but a step can have 8"),
        (RowPlan(nodes=8, prior=np.zeros((GROUPS, BINS, 2), dtype=np.int32)), 8, "calibration"),
    ],
)
def test_plans_that_do_not_fit_are_refused(plan: RowPlan, width: int, words: str) -> None:
    with pytest.raises(UserError, match=words):
        generate(TreeBackend(), PROMPT, SamplingParams(), width=width, max_new_tokens=5, plan=plan)


def test_a_backend_of_chains_refuses_plans() -> None:
    backend = ScriptedBackend(draft=lambda b, anchor, width, *rest: one_hot_block([1] * (width - 1)))
    with pytest.raises(UserError, match="chains of a fixed width"):
        generate(backend, PROMPT, SamplingParams(), width=4, max_new_tokens=5, plan=RowPlan(nodes=4))


@pytest.mark.parametrize("kv_dtype", ["bf16", "fp8"])
def test_reference_tree_rows_are_those_of_their_chains(kv_dtype: str) -> None:
    """Logits of every node, then the committed path's caches and draft context, on random models and trees."""
    config = small_target()
    draft_config = small_draft(config)
    seed = random.randrange(2**32)
    generator = np.random.default_rng(seed)
    weights, draft_weights = random_target(config, seed=3), random_draft(draft_config, seed=4)
    branched, chained = (
        ReferenceBackend(config, weights, draft_config, draft_weights, max_context=128, page_size=4, kv_dtype=kv_dtype)
        for _ in range(2)
    )
    prompt = generator.integers(0, 96, 7).tolist()
    branched.prefill(prompt)
    chained.prefill(prompt)
    for _ in range(4):
        tokens = generator.integers(0, 96, 12).tolist()
        parents = [-1, *(int(generator.integers(0, row)) for row in range(1, 12))]
        logits = branched.verify_tree(tokens, parents)
        paths: list[list[int]] = []
        for row, parent in enumerate(parents):
            paths.append([*(paths[parent] if row else []), row])
        for path in paths:
            alone = chained.verify([tokens[row] for row in path])
            torch.testing.assert_close(logits[path], alone, rtol=0, atol=2e-3, msg=str(seed))
        path = max(paths, key=len)
        chained.verify([tokens[row] for row in path])
        chained.commit(len(path))
        branched.commit_path(path)
        assert branched.length == chained.length
        a, b = (backend.draft(5, 6, 0.0, ()) for backend in (branched, chained))
        assert torch.equal(a.candidates, b.candidates), seed
        torch.testing.assert_close(a.lattice, b.lattice, rtol=0, atol=2e-2)


def test_bundled_pair_gives_the_same_text_with_every_plan() -> None:
    """Greedy text of the trained pair, up to a tie that another order of keys may turn; sampled trees as plain."""
    config, draft = load_target_config(tiny.target_directory()), load_draft_config(tiny.draft_directory())
    weights = load_target(tiny.target_directory(), config), load_draft(tiny.draft_directory(), draft)
    backend = ReferenceBackend(config, weights[0], draft, weights[1], max_context=400)
    tokenizer = Text(tiny.target_directory())
    lines = tiny.problems_path().read_text(encoding="utf-8").splitlines()
    state: State | None = None
    for question in random.sample([json.loads(line)["question"] for line in lines], 2):
        prompt = tokenizer.encode(question, raw=False)
        texts = []
        cost = interpolated({1: 9.0, 16: 20.0}, 16)
        for plan in (None, RowPlan(nodes=12, prior=state), RowPlan(cost=cost), RowPlan(nodes=16, cost=cost)):
            generation = generate(
                backend, prompt, SamplingParams(), width=8, max_new_tokens=90, stop_ids=config.eos_token_ids, plan=plan
            )
            texts.append([token for event in generation for token in event.tokens])
            if plan is not None and plan.nodes:
                state = generation.calibration
                assert generation.stats.accept_length > 3
        for other in texts[1:]:
            if other != texts[0]:
                same = next(i for i, (a, b) in enumerate(zip(other, texts[0], strict=False)) if a != b)
                top = backend.prefill([*prompt, *texts[0][:same]]).topk(2).values
                assert top[0] - top[1] < 0.05, question


def test_chain_maxima_of_a_walk() -> None:
    """The largest conditional behind a sampled path is what the walk could have drawn best."""
    lattice = torch.randn(5, 6, 6)
    lattice[0] = lattice[0, :1]
    candidates = torch.stack([torch.randperm(50)[:6] for _ in range(5)])
    path, q = walk_sampled(lattice, 0.7, torch.rand(5).tolist())
    block = DraftBlock(candidates.gather(1, path[:, None])[:, 0], candidates, q, lattice)
    assert chain_maxima(block, lattice, 0.7) == pytest.approx(q.amax(dim=1).tolist(), rel=1e-4)
