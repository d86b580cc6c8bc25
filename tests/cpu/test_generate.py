import functools
import itertools
import json
import random
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from scripted_backend import Draft, ScriptedBackend, cache_distributions, one_hot_block, plain_greedy, walk

from sgl_muse_mega.checkpoint import tiny
from sgl_muse_mega.checkpoint.draft import load_draft
from sgl_muse_mega.checkpoint.target import load_target
from sgl_muse_mega.commands.text import Text
from sgl_muse_mega.config import load_draft_config, load_target_config
from sgl_muse_mega.errors import UserError
from sgl_muse_mega.reference.backend import ReferenceBackend
from sgl_muse_mega.speculative import accept
from sgl_muse_mega.speculative import generate as step_loop
from sgl_muse_mega.speculative.backend import DraftBlock
from sgl_muse_mega.speculative.generate import Generation, StepEvent, generate
from sgl_muse_mega.speculative.philox import Purpose
from sgl_muse_mega.speculative.rows import RowPlan
from sgl_muse_mega.speculative.sampling import SamplingParams, target_distribution

PROMPT = [1, 2, 3]


def oracle(right: int) -> Draft:
    """Drafts the target's own greedy continuation, wrong from slot right + 1 on."""

    def draft(b: ScriptedBackend, anchor: int, width: int, temperature: float, uniforms: Sequence[float]) -> DraftBlock:
        tokens = plain_greedy(b, [*b.committed, anchor], width - 1)
        return one_hot_block([t if i < right else (t + 1) % b.vocab_size for i, t in enumerate(tokens)])

    return draft


def noise(seed: int) -> Draft:
    """Any ids, right by chance: sometimes the oracle's."""
    generator = np.random.default_rng(seed)

    def draft(b: ScriptedBackend, anchor: int, width: int, temperature: float, uniforms: Sequence[float]) -> DraftBlock:
        tokens = plain_greedy(b, [*b.committed, anchor], width - 1)
        keep = generator.random(width - 1) < 0.7
        return one_hot_block(
            [t if k else int(generator.integers(b.vocab_size)) for t, k in zip(tokens, keep, strict=True)]
        )

    return draft


def random_q(seed: int, sharpness: float) -> Draft:
    """Samples each slot from some q over four ids that has nothing to do with the target."""

    @functools.cache
    def proposals(anchor: int, width: int, vocab_size: int) -> tuple[torch.Tensor, torch.Tensor]:
        generator = np.random.default_rng([seed, anchor, width])
        rows = np.stack([generator.permutation(vocab_size)[:4] for _ in range(width - 1)])
        q = torch.softmax(torch.from_numpy(generator.normal(0, sharpness, (width - 1, 4))), dim=1)
        return torch.from_numpy(rows), q.float()

    def draft(b: ScriptedBackend, anchor: int, width: int, temperature: float, uniforms: Sequence[float]) -> DraftBlock:
        return walk(*proposals(anchor, width, b.vocab_size), uniforms)

    return draft


def run(backend: ScriptedBackend, params: SamplingParams, **options: object) -> tuple[Generation, list[StepEvent]]:
    """A finished generation and its events, with the invariants every one of them has."""
    generation = generate(backend, PROMPT, params, **options)  # type: ignore[arg-type]
    events = list(generation)
    stats = generation.stats
    assert [token for event in events for token in event.tokens] == generation.tokens
    assert [event.step for event in events] == list(range(stats.steps + 1))
    assert [event.finish_reason is None for event in events] == [True] * stats.steps + [False]
    assert backend.committed + generation.tokens[-1:] == PROMPT + generation.tokens
    assert stats.prompt_tokens == len(PROMPT)
    assert stats.completion_tokens == len(generation.tokens)
    assert sum(stats.tokens_per_step.values()) == stats.steps == len(backend.widths)
    assert sum(n * steps for n, steps in stats.tokens_per_step.items()) == stats.completion_tokens - 1
    assert all(len(event.tokens) <= event.accepted + 1 <= event.drafted + 1 for event in events)
    assert stats.finish_reason == events[-1].finish_reason
    return generation, events


@settings(deadline=None)
@given(
    st.integers(0, 2**32),
    st.integers(1, 16),
    st.one_of(st.integers(0, 16).map(oracle), st.integers(0, 2**32).map(noise)),
    st.sampled_from([2, 3, None]),
    st.integers(1, 70),
    st.sets(st.integers(0, 7), max_size=2),
)
def test_greedy_equals_plain_decoding(
    seed: int, width: int, draft: Draft, levels: int | None, max_new_tokens: int, stop_ids: set[int]
) -> None:
    backend = ScriptedBackend(draft=draft, seed=seed, levels=levels)
    generation, _ = run(backend, SamplingParams(), width=width, max_new_tokens=max_new_tokens, stop_ids=stop_ids)
    want = plain_greedy(backend, PROMPT, min(max_new_tokens, backend.max_context - len(PROMPT)))
    stop = next((i for i, token in enumerate(want) if token in stop_ids), None)
    if stop is not None:
        want, reason = want[: stop + 1], "stop"
    else:
        reason = "length" if len(want) == max_new_tokens else "context"
    assert generation.tokens == want
    assert generation.stats.finish_reason == reason


@pytest.mark.parametrize("params", [SamplingParams(1.0, top_k=1), SamplingParams(1.0, top_p=1e-4, seed=5)])
@pytest.mark.parametrize("width", [1, 2, 8])
def test_single_survivor_equals_greedy(params: SamplingParams, width: int) -> None:
    for seed in range(5):
        generation, _ = run(ScriptedBackend(draft=noise(seed), seed=seed), params, width=width, max_new_tokens=50)
        assert generation.tokens == plain_greedy(ScriptedBackend(seed=seed), PROMPT, 50)


def test_a_perfect_draft_fills_every_step() -> None:
    generation, events = run(ScriptedBackend(draft=oracle(99)), SamplingParams(), width=8, max_new_tokens=41)
    assert [len(event.tokens) for event in events] == [1, 8, 8, 8, 8, 8]
    assert generation.stats.accept_length == 8
    assert generation.stats.completion_per_step == 41 / 5
    assert generation.stats.tokens_per_step == {8: 5}


def scripted_stop(stop_at: int, **options: object) -> Generation:
    """The first step accepts six drafts of seven; the id 7 is its token number `stop_at` (1-based)."""
    backend = ScriptedBackend(draft=oracle(6), vocab_size=9)
    text = plain_greedy(ScriptedBackend(vocab_size=9), PROMPT, 20)
    for index, token in enumerate(text):
        backend.forced[len(PROMPT) + index] = 8 if token == 7 else token
    backend.forced[len(PROMPT) + stop_at] = 7
    generation, events = run(backend, SamplingParams(), width=8, **options)
    assert events[1].accepted == 6
    return generation


def test_stop_in_mid_run() -> None:
    generation = scripted_stop(3, max_new_tokens=20, stop_ids=(7,))
    assert len(generation.tokens) == 1 + 3
    assert generation.tokens[-1] == 7
    assert generation.stats.finish_reason == "stop"
    assert generation.stats.accept_length == 3


def test_earliest_event_wins_in_one_run() -> None:
    before_cap = scripted_stop(3, max_new_tokens=6, stop_ids=(7,))
    assert (len(before_cap.tokens), before_cap.stats.finish_reason) == (4, "stop")
    after_cap = scripted_stop(5, max_new_tokens=5, stop_ids=(7,))
    assert (len(after_cap.tokens), after_cap.stats.finish_reason) == (5, "length")
    assert 7 not in after_cap.tokens
    both = scripted_stop(4, max_new_tokens=5, stop_ids=(7,))
    assert (len(both.tokens), both.stats.finish_reason) == (5, "stop")


def test_ignore_eos_runs_to_the_cap() -> None:
    generation = scripted_stop(3, max_new_tokens=20, stop_ids=(7,), ignore_eos=True)
    assert (len(generation.tokens), generation.stats.finish_reason) == (20, "length")
    assert generation.tokens[3] == 7


def test_stop_as_the_first_token_takes_no_step() -> None:
    backend = ScriptedBackend(draft=oracle(9))
    backend.forced[len(PROMPT)] = 5
    generation, events = run(backend, SamplingParams(), width=8, max_new_tokens=9, stop_ids=(5,))
    assert generation.tokens == [5]
    assert len(events) == 1
    assert generation.stats.accept_length == generation.stats.tokens_per_second == 0


def test_stop_id_that_was_drafted_but_rejected_does_not_stop() -> None:
    def stop_everywhere(b: ScriptedBackend, anchor: int, width: int, *_: object) -> DraftBlock:
        return one_hot_block([7] * (width - 1))

    backend = ScriptedBackend(draft=stop_everywhere, vocab_size=8)
    backend.forced = dict.fromkeys(range(64), 2)
    generation, _ = run(backend, SamplingParams(), width=8, max_new_tokens=12, stop_ids=(7,))
    assert generation.tokens == [2] * 12


@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(1.0, seed=3)])
@pytest.mark.parametrize("width", [1, 2, 7, 16])
@pytest.mark.parametrize("room", range(1, 20))
def test_context_limit(room: int, width: int, params: SamplingParams) -> None:
    """The backend asserts that no row passes the limit; the output fills the context to the last position."""
    draft = oracle(5) if params.greedy else random_q(room, 1.0)
    backend = ScriptedBackend(draft=draft, max_context=len(PROMPT) + room)
    generation, events = run(backend, params, width=width, max_new_tokens=100)
    assert len(generation.tokens) == room
    assert generation.stats.finish_reason == "context"
    assert all(
        event.drafted + 1 == min(width, room - sum(len(e.tokens) for e in events[:i]))
        for i, event in enumerate(events)
        if i
    )


def test_same_seed_same_text_and_other_seed_other_text() -> None:
    def text(seed: int, width: int, max_new_tokens: int = 40) -> list[int]:
        params = SamplingParams(1.0, top_p=0.95, seed=seed)
        draft = random_q(1, 1.0) if width > 1 else None
        return run(ScriptedBackend(draft=draft), params, width=width, max_new_tokens=max_new_tokens)[0].tokens

    seed = int(np.random.default_rng().integers(2**63))
    for width in (1, 2, 8):
        assert text(seed, width) == text(seed, width)
        assert text(seed, width) != text(seed + 1, width)
        assert text(seed, width, 17) == text(seed, width, 40)[:17]


def test_zero_coins_never_leave_the_support(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_loop, "uniform", lambda seed, position, purpose: 0.0)
    for params in (SamplingParams(1.0, top_k=2), SamplingParams(1.0, top_p=0.5), SamplingParams(0.7, min_p=0.5)):
        backend = ScriptedBackend(draft=random_q(2, 1.0))
        generation, _ = run(backend, params, width=8, max_new_tokens=50)
        text = PROMPT + generation.tokens
        for position in range(len(PROMPT), len(text)):
            assert target_distribution(backend.logits(text[:position]), params)[text[position]] > 0


def joint_chi_square(
    params: SamplingParams,
    draft: Draft | ScriptedBackend | None,
    width: int,
    draws: int = 8000,
    plan: RowPlan | None = None,
) -> float:
    """p-value of the first three new tokens, together, over `draws` seeds against the target's joint distribution."""
    scripted = isinstance(draft, ScriptedBackend)
    backend = draft if scripted else ScriptedBackend(vocab_size=4, draft=draft, scale=1.0, seed=11)
    expected = {}
    for tokens in itertools.product(range(4), repeat=3):
        probability = 1.0
        for i, token in enumerate(tokens):
            probability *= float(target_distribution(backend.logits([*PROMPT, *tokens[:i]]), params)[token])
        expected[tokens] = probability
    counts = dict.fromkeys(expected, 0)
    for seed in range(draws):
        seeded = SamplingParams(params.temperature, params.top_p, params.top_k, params.min_p, seed)
        generation = generate(backend, PROMPT, seeded, width=width, max_new_tokens=3, plan=plan)
        for _ in generation:
            pass
        counts[tuple(generation.tokens)] += 1  # type: ignore[index]
    assert all(probability > 0 or counts[tokens] == 0 for tokens, probability in expected.items())
    pairs = np.array([(counts[tokens], probability * draws) for tokens, probability in expected.items() if probability])
    rare = pairs[:, 1] < 5  # chi-square needs a handful in every cell
    cells = np.concatenate([pairs[~rare], pairs[rare].sum(axis=0, keepdims=True)]) if rare.any() else pairs
    return float(stats.chisquare(*cells.T).pvalue)


@pytest.fixture
def one_distribution_per_row(monkeypatch: pytest.MonkeyPatch) -> None:
    cache_distributions(monkeypatch, accept, step_loop)


@pytest.mark.usefixtures("one_distribution_per_row")
@pytest.mark.parametrize(
    ("params", "sharpness", "width"),
    [(SamplingParams(1.0), 0.5, 3), (SamplingParams(0.8, top_p=0.9), 2.0, 2), (SamplingParams(1.0), 0.0, 1)],
)
def test_text_follows_the_target(params: SamplingParams, sharpness: float, width: int) -> None:
    """Three tokens jointly: positions that are drafted again after a rejection reuse their uniforms without a trace."""
    draft = random_q(4, sharpness) if width > 1 else None
    assert joint_chi_square(params, draft, width) > 0.001


@pytest.mark.usefixtures("one_distribution_per_row")
def test_the_joint_chi_square_catches_one_stream_for_two_purposes(monkeypatch: pytest.MonkeyPatch) -> None:
    real = step_loop.uniform
    monkeypatch.setattr(step_loop, "uniform", lambda seed, position, purpose: real(seed, position, Purpose.DRAFT))
    assert joint_chi_square(SamplingParams(1.0), random_q(4, 0.5), 3, draws=3000) < 1e-6


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"prompt_ids": []}, "prompt is empty"),
        ({"prompt_ids": [1, 8]}, "Token 1 of the prompt is 8"),
        ({"prompt_ids": [-1]}, "Token 0 of the prompt is -1"),
        ({"prompt_ids": [1] * 64}, "64 tokens and the context 64"),
        ({"width": 0}, "between 1 and 16, found 0"),
        ({"width": 17}, "between 1 and 16, found 17"),
        ({"max_new_tokens": 0}, "at least 1, found 0"),
    ],
)
def test_requests_that_do_not_fit_are_refused(options: dict[str, object], words: str) -> None:
    request: dict[str, object] = {"prompt_ids": PROMPT, "width": 8, "max_new_tokens": 5} | options
    with pytest.raises(UserError, match=words):
        generate(ScriptedBackend(draft=oracle(1)), params=SamplingParams(), **request)  # type: ignore[arg-type]


def test_width_without_a_draft_is_refused() -> None:
    with pytest.raises(UserError, match="needs a draft"):
        generate(ScriptedBackend(), PROMPT, SamplingParams(), width=8, max_new_tokens=5)


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 2**32), st.integers(2, 16))
def test_broken_logits_end_the_text_with_a_sentence(seed: int, width: int) -> None:
    backend = ScriptedBackend(draft=noise(seed), seed=seed)
    sound = backend.logits
    backend.logits = lambda context: sound(context) * (float("nan") if len(context) == 20 else 1.0)  # type: ignore[method-assign]
    for params in (SamplingParams(), SamplingParams(1.0)):
        generation = generate(backend, PROMPT, params, width=width, max_new_tokens=40)
        with pytest.raises(UserError, match="broken"):
            list(generation)
        assert len(generation.tokens) <= 20 - len(PROMPT)


def test_bundled_pair_speculates_without_a_trace_in_the_text() -> None:
    """Greedy text of the trained pair with drafts equals its plain text, up to a tie that batched rounding may turn."""
    config, draft = load_target_config(tiny.target_directory()), load_draft_config(tiny.draft_directory())
    weights = load_target(tiny.target_directory(), config), load_draft(tiny.draft_directory(), draft)
    backend = ReferenceBackend(config, weights[0], draft, weights[1], max_context=400)
    text = Text(tiny.target_directory())
    questions = [json.loads(line)["question"] for line in tiny.problems_path().read_text(encoding="utf-8").splitlines()]
    steps = tokens = 0
    for question in random.sample(questions, 3):
        prompt = text.encode(question, raw=False)
        runs = []
        for width in (8, 1):
            generation = generate(
                backend, prompt, SamplingParams(), width=width, max_new_tokens=120, stop_ids=config.eos_token_ids
            )
            runs.append([token for event in generation for token in event.tokens])
            if width == 8:
                steps, tokens = steps + generation.stats.steps, tokens + len(generation.tokens) - 1
        drafted, plain = runs
        if drafted != plain:
            same = next(i for i, (a, b) in enumerate(zip(drafted, plain, strict=False)) if a != b)
            top = backend.prefill([*prompt, *plain[:same]]).topk(2).values
            assert top[0] - top[1] < 0.05, question
    assert tokens > 3 * steps
