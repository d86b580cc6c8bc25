"""The field reports' cases that need more than texts side by side: T01, T07, T09's session, T12 (serve_texts.py has the
others). Each is one function from servers to outcomes; a note that begins with "!" fails its case."""

import math
import random
from collections.abc import Iterator
from typing import Any

import serve_texts
import torch
from serve_arms import Arm
from serve_texts import GREEDY, Outcome, Texts

TOPICS = (  # chat, code, data, other languages: the bundled pair knows none of it, and must still answer alike
    "Hello! Could you tell me in two sentences why the sky looks blue in the evening?",
    "def fibonacci(n):\n    a, b = 0, 1\n    for _ in range(n):\n        a, b = b, a + b\n    return",
    '{"name": "Ada", "born": 1815, "works": [{"title": "Notes", "year": 1843}, {"title":',
    "¿Cuántos días tiene febrero en un año bisiesto, y por qué?",
    "Ein Zug fährt um 9 Uhr ab und braucht 3 Stunden. Wann kommt er an?",
    "SELECT city, COUNT(*) FROM people WHERE age > 30 GROUP BY city ORDER BY",
    "1, 1, 2, 3, 5, 8, 13, 21,",
    "Dear Sir or Madam,\n\nI write to complain about the parcel that",
)
TEMPERATURE, KEPT = 6.0, 2  # flat enough that a confident model's second choice comes up, too
CACHED = 0.95  # of what a turn shares with the one before


def other_texts(texts: Texts, stock: Arm, arms: list[Arm]) -> list[Outcome]:
    """T01: texts that the draft guesses badly."""
    prompts = [texts.text.encode(topic, raw=True) for topic in TOPICS]
    sampling = [texts.sampling(max_new_tokens=serve_texts.NEW_TOKENS, ignore_eos=True)] * len(prompts)
    theirs = stock.ask("generate", prompts=prompts, sampling=sampling)
    return [
        serve_texts.compare(
            "T01 other texts", stock, arm, prompts, theirs, arm.ask("generate", prompts=prompts, sampling=sampling)
        )
        for arm in arms
    ]


def two_tokens(texts: Texts, stock: Arm, arms: list[Arm], draws: int) -> list[Outcome]:
    """T07: three tokens, each of a support of two, against the probabilities that stock SGLang states; p > 0.001."""
    prompt = texts.prompts[0]
    sampling = [
        texts.sampling(temperature=TEMPERATURE, top_k=KEPT, max_new_tokens=3, ignore_eos=True, sampling_seed=seed)
        for seed in range(draws)
    ]
    stated: dict[tuple[int, ...], dict[int, float]] = {}

    def support(context: tuple[int, ...]) -> dict[int, float]:
        if context not in stated:
            stated[context] = probabilities(stock, prompt + list(context))
        return stated[context]

    outcomes = []
    for arm in arms:
        outputs = arm.ask("generate", timeout=900.0, prompts=[prompt] * draws, sampling=sampling)
        drawn = [tuple(output["ids"]) for output in outputs]
        outside, p_value = judge(drawn, support)
        bad = outside or p_value <= 0.001
        note = f"{'! ' if bad else ''}{outside} of {3 * draws} tokens outside the support, p {p_value:.3g}"
        outcomes.append(Outcome("T07 support of two", arm.name, draws, draws, note=note))
    return outcomes


def probabilities(stock: Arm, context: list[int]) -> dict[int, float]:
    """The two tokens that may follow, with their probabilities at TEMPERATURE."""
    sampling = [GREEDY | {"max_new_tokens": 1, "ignore_eos": True}]
    (output,) = stock.ask("generate", prompts=[context], sampling=sampling, top_logprobs=20)
    best = sorted(output["top"][0], reverse=True)[:KEPT]
    weights = {token: math.exp((value - best[0][0]) / TEMPERATURE) for value, token in best}
    return {token: weight / sum(weights.values()) for token, weight in weights.items()}


def judge(drawn: list[tuple[int, ...]], support: Any) -> tuple[int, float]:
    """Tokens outside their support, and the p-value of all others (chi-square over every context, one degree each)."""
    outside, statistic, cells = 0, 0.0, 0
    contexts = {ids[:place] for ids in drawn for place in range(len(ids))}
    for context in contexts:
        next_ids = [ids[len(context)] for ids in drawn if ids[: len(context)] == context and len(ids) > len(context)]
        p = support(context)
        outside += sum(token not in p for token in next_ids)
        inside = [token for token in next_ids if token in p]
        expected = [len(inside) * value for value in p.values()]
        if min(expected) >= 5:  # below that the statistic does not follow its distribution
            counts = [inside.count(token) for token in p]
            statistic += sum((count - e) ** 2 / e for count, e in zip(counts, expected, strict=True))
            cells += 1
    if not cells:
        return outside, 1.0
    half = torch.tensor([cells / 2, statistic / 2], dtype=torch.float64)
    return outside, float(torch.special.gammaincc(half[0], half[1]))


def session(texts: Texts, stock: Arm, arms: list[Arm], turns: int = 6) -> list[Outcome]:
    """T09: a conversation of six turns; what a turn shares with the one before must come from the prefix cache."""
    history: list[int] = []
    prompts, theirs, shared = [], [], []
    sampling = texts.sampling(max_new_tokens=24, ignore_eos=True)
    for turn in range(turns):
        shared.append(len(history))
        prompts.append(history + texts.prompts[turn % len(texts.prompts)][:40])
        theirs += stock.ask("generate", prompts=[prompts[-1]], sampling=[sampling])
        history = prompts[-1] + theirs[-1]["ids"]
    outcomes = []
    for arm in arms:
        ours = [arm.ask("generate", prompts=[prompt], sampling=[sampling])[0] for prompt in prompts]
        outcome = serve_texts.compare("T09 six turns", stock, arm, prompts, theirs, ours)
        cached = [output["cached_tokens"] for output in ours]
        # The last token of a turn has no keys yet when the turn ends.
        cold = [c for c, s in zip(cached, shared, strict=True) if c < CACHED * (s - 1)]
        alike = outcome.equal == turns  # after another text, the history is not what this server has cached
        outcome.note = outcome.note or f"{'! ' if cold and alike else ''}cached {cached} of {shared}"
        outcomes.append(outcome)
    return outcomes


def aborts(texts: Texts, stock: Arm, arms: list[Arm], count: int = 30, seed: int = 12) -> list[Outcome]:
    """T12: requests that end at random moments, while the prompt runs, too; no page is lost, the next text is right."""
    chance = random.Random(seed)
    prompts = [texts.prompts[i % len(texts.prompts)] for i in range(count)]
    long = texts.sampling(max_new_tokens=serve_texts.CONTEXT - max(map(len, prompts)) - 20, ignore_eos=True)
    after = texts.prompts[:4]
    theirs = stock.ask("generate", prompts=after, sampling=[texts.sampling()] * len(after))
    outcomes = []
    for arm in arms:
        whole = arm.ask("step_time", prompt=prompts[0], new=64)
        seconds = whole["ms"] * whole["steps"] * 1e-3
        delays = [chance.uniform(0, seconds) if i % 3 else chance.uniform(0, 0.01) for i in range(count)]
        found = arm.ask("abort", prompts=prompts, sampling=long, delays=delays)
        ended = [output["finish_reason"] for output in found["outputs"]]
        aborted = sum("abort" in str(reason) for reason in ended)
        ours = arm.ask("generate", prompts=after, sampling=[texts.sampling()] * len(after))
        outcome = serve_texts.compare("T12 aborts", stock, arm, after, theirs, ours)
        failing = not found["flushed"] or aborted < count / 3
        outcome.note = outcome.note or (
            f"{'! ' if failing else ''}{aborted} of {count} aborted, cache emptied: {found['flushed']}"
        )
        outcomes.append(outcome)
    return outcomes


def run(texts: Texts, stock: Arm, arms: list[Arm], draws: int) -> Iterator[Outcome]:
    """All of them, one after the other as they are asked for, the longest last."""
    yield from session(texts, stock, arms)
    yield from other_texts(texts, stock, arms)
    yield from aborts(texts, stock, arms)
    yield from two_tokens(texts, stock, arms, draws)
