"""The bundled pair under SGLang with and without the plugin: texts, accept lengths, and what else a request may ask.

A text differs only where it may: at the first token in which two servers differ, the two candidates must be a near tie,
that is, at most NEAR_TIE nats apart in stock SGLang's own log-probabilities at that place. The bound was set before any
run, for a bf16 cache: over an fp8 cache stock's Triton attention rounds q and the probabilities to e4m3, too. Texts
that differ are kept with their ids, and the reference says which token it would have chosen (serve_judge.py): where it
puts ours first or within the same bound, and stock's beyond it, the text that is wrong is stock's.
"""

import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from serve_arms import Arm
from serve_judge import Judge

from sgl_muse_mega.checkpoint import tiny
from sgl_muse_mega.commands.problems import Problem, final_number, read_problems
from sgl_muse_mega.commands.text import Text
from sgl_muse_mega.config import load_target_config

NEAR_TIE = 0.25  # nats
NEVER = 99.0  # nats, for a candidate that is not among stock's best 20
ACCEPT_LENGTH = 0.03  # of stock's
NEW_TOKENS = 160
CONTEXT = 512
GREEDY = {"temperature": 0.0}


@dataclass
class Outcome:
    """One comparison of a server with another."""

    case: str
    arm: str
    texts: int
    equal: int
    gaps: list[float | None] = field(default_factory=list)  # nats, of each text that differs; None: not measured
    note: str = ""
    cache: str = "bf16"  # of both servers
    differing: list[dict[str, Any]] = field(default_factory=list)  # ids of the texts that differ, and where they part

    @property
    def passed(self) -> bool:
        """Texts differ at near ties or where stock's is wrong; where logits are changed, in at most one of ten."""
        measured = [
            gap <= NEAR_TIE or stock_is_wrong(text)
            for gap, text in zip(self.gaps, self.differing, strict=True)
            if gap is not None
        ]
        others = len(self.gaps) - len(measured)
        return all(measured) and others <= self.texts / 10 and not self.note.startswith("!")

    def line(self) -> str:
        gaps = ", ".join("-" if gap is None else f"{gap:.3f}" for gap in self.gaps[:6])
        equal = f"{self.equal:>4} of {self.texts} equal"
        return f"{'ok  ' if self.passed else 'FAIL'} {self.case:<24}{self.arm:<10}{equal}  {gaps} {self.note}"


def stock_is_wrong(text: dict[str, Any]) -> bool:
    """Of a text that differs: the reference has been asked, and would have chosen ours and not stock's."""
    opinion = text.get("reference")
    return opinion is not None and opinion["ours_behind"] <= NEAR_TIE < opinion["stock_behind"]


class Texts:
    """Questions, and what the servers made of them."""

    def __init__(self, problems: int) -> None:
        self.problems: list[Problem] = read_problems(tiny.problems_path(), problems)
        self.text = Text(tiny.target_directory())
        self.prompts = [self.text.encode(problem.question, raw=False) for problem in self.problems]
        self.stops = list(load_target_config(tiny.target_directory()).eos_token_ids)
        self.judge = Judge()

    def sampling(self, **changes: Any) -> dict[str, Any]:
        return GREEDY | {"max_new_tokens": NEW_TOKENS, "stop_token_ids": self.stops} | changes

    def answer_all(self, arm: Arm) -> list[dict[str, Any]]:
        """Every question alone, greedy; each server has seen every prompt once before, so prefixes are cached alike."""
        every = [self.sampling()] * len(self.prompts)
        found: list[dict[str, Any]] = arm.ask("generate", prompts=self.prompts, sampling=every)
        return found

    def exact(self, outputs: list[dict[str, Any]]) -> float:
        """Fraction of questions with the right number."""
        pairs = zip(self.problems, outputs, strict=True)
        return statistics.mean(final_number(self.text.decode(o["ids"])) == p.expected for p, o in pairs)

    def cases(self, reference: list[dict[str, Any]]) -> list[tuple[str, list[list[int]], list[dict[str, Any]], bool]]:
        """(name, prompts, sampling, whether two tokens stay as far apart as the model has them): the field reports'
        cases that need no clock, those first whose texts the pair was trained on."""
        prompts = self.prompts[:12]
        fourth = [o["ids"][4] for o in reference[:12]]
        some = self.prompts[0] * 20
        lengths = [*range(1, 12), *range(55, 75), *range(120, 136)]
        near_end = [some[:n] for n in (CONTEXT - 40, CONTEXT - 17, CONTEXT - 16, CONTEXT - 9, CONTEXT - 2)]

        def each(count: int, **changes: Any) -> list[dict[str, Any]]:
            return [self.sampling(**changes) for _ in range(count)]

        return [
            ("T03 stop inside a run", prompts, [self.sampling(stop_token_ids=[t, *self.stops]) for t in fourth], True),
            ("T03 five tokens", prompts, each(12, max_new_tokens=5), True),
            ("T04 top_k 1", prompts, each(12, temperature=1.0, top_k=1), True),
            ("T04 top_p 1e-4", prompts, each(12, temperature=1.0, top_p=1e-4), True),
            ("T04 penalties", prompts, each(12, frequency_penalty=0.4, presence_penalty=0.2), False),
            ("T04 repetition", prompts, each(12, repetition_penalty=1.2), False),
            ("T04 bias -100", prompts, [self.sampling(logit_bias={str(t): -100.0}) for t in fourth], True),
            ("T03 ignore_eos", prompts, each(12, max_new_tokens=90, ignore_eos=True), True),
            ("T09 long prompt, twice", [some[:400]] * 2, each(2, max_new_tokens=24), True),
            ("T10 prompt lengths", [some[:n] for n in lengths], each(len(lengths), max_new_tokens=12), True),
            ("T11 end of the context", near_end, each(len(near_end), max_new_tokens=16, ignore_eos=True), True),
        ]


def compare(
    case: str, stock: Arm, arm: Arm, prompts: list[list[int]], theirs: list[Any], ours: list[Any], plain: bool = True,
    banned: list[int] | None = None,
) -> Outcome:  # fmt: skip
    """Where the ids differ, asks stock SGLang how near the two candidates are. plain: logits are not changed, but for
    one token of each prompt that is `banned`."""
    outcome = Outcome(case, arm.name, len(prompts), 0)
    for number, (prompt, left, right) in enumerate(zip(prompts, theirs, ours, strict=True)):
        if left["ids"] == right["ids"] and left["finish_reason"] == right["finish_reason"]:
            outcome.equal += 1
            continue
        shared = next(
            (i for i, pair in enumerate(zip(left["ids"], right["ids"], strict=False)) if pair[0] != pair[1]), None
        )
        if shared is None:
            outcome.note = f"! one text ends earlier: {left['finish_reason']} and {right['finish_reason']}"
            outcome.gaps.append(None)
        else:
            candidates = left["ids"][shared], right["ids"][shared]
            outcome.gaps.append(_gap(stock, prompt + left["ids"][:shared], candidates) if plain else None)
        outcome.differing.append(
            {
                "prompt": prompt, "stock": left["ids"], "ours": right["ids"], "place": shared, "plain": plain,
                "banned": banned[number] if banned else None,
            }
        )  # fmt: skip
    return outcome


def _gap(stock: Arm, context: list[int], candidates: tuple[int, int]) -> float:
    """Nats between two candidates for the next token."""
    sampling = [GREEDY | {"max_new_tokens": 1, "ignore_eos": True}]
    (output,) = stock.ask("generate", prompts=[context], sampling=sampling, top_logprobs=20)
    scores = {token: value for value, token in output["top"][0]}
    lowest = min(scores.values())
    first, second = (scores.get(token, lowest) for token in candidates)
    return abs(first - second) if candidates[1] in scores else NEVER


def sampled(texts: Texts, stock: Arm, others: list[Arm], record: dict[str, Any], say: Callable[[str], None]) -> None:
    """Texts at temperature 0.8: other tokens, but as many per verify step and as many right answers, within chance."""
    every = [texts.sampling(temperature=0.8, top_p=0.95)] * len(texts.prompts)
    found = {arm.name: arm.ask("generate", prompts=texts.prompts, sampling=every) for arm in (stock, *others)}
    record["sampled"] = {name: (accept_length(out), texts.exact(out)) for name, out in found.items()}
    say(f"temperature 0.8 (accept length, exact answers): {record['sampled']}")
    length, exact = record["sampled"][stock.name]
    for arm in others:
        ours = record["sampled"][arm.name]
        near = abs(ours[0] - length) <= 0.1 * length and abs(ours[1] - exact) <= 0.1
        outcome = Outcome("temperature 0.8", arm.name, 0, 0, note="" if near else "! not as stock's")
        note(texts, outcome, record, say)


def min_p(texts: Texts, stock: Arm, arm: Arm, greedy: list[dict[str, Any]]) -> Outcome:
    """T04: a min-p that leaves the likeliest token alone gives the greedy text at any temperature."""
    prompts = texts.prompts[:12]
    sampling = [texts.sampling(temperature=1.0, min_p=0.999)] * len(prompts)
    ours = arm.ask("generate", prompts=prompts, sampling=sampling)
    return compare("T04 min_p 0.999", stock, arm, prompts, greedy[:12], ours)


def accept_length(outputs: list[dict[str, Any]]) -> float:
    """Tokens per verify step, pooled."""
    verified = sum(o.get("spec_verify_ct") or 0 for o in outputs)
    return sum(o["completion_tokens"] for o in outputs) / verified if verified else 0.0


def note(texts: Texts, outcome: Outcome, record: dict[str, Any], say: Callable[[str], None]) -> None:
    """At once, so that a server that ends later takes nothing with it."""
    opinion = texts.judge.fill(outcome.differing, outcome.cache)
    outcome.note = "; ".join(filter(None, (outcome.note, opinion)))
    say(outcome.line())
    record["outcomes"].append(vars(outcome) | {"passed": outcome.passed})


def greedy_texts(
    texts: Texts, stock: Arm, others: list[Arm], record: dict[str, Any], say: Callable[[str], None], cache: str = "bf16"
) -> list[dict[str, Any]]:
    """Every question, greedy: texts, accept lengths within 3 %, right answers; what stock says to them."""
    first = {arm.name: texts.answer_all(arm) for arm in (stock, *others)}
    for arm in (stock, *others):
        record["accept_length"][arm.name] = accept_length(first[arm.name])
        record["exact"][arm.name] = texts.exact(first[arm.name])
    case, expected = ("texts" if cache == "bf16" else f"texts, {cache} cache"), record["accept_length"][stock.name]
    for arm in others:
        found = compare(case, stock, arm, texts.prompts, first[stock.name], first[arm.name])
        found.cache = cache
        note(texts, found, record, say)
        change = record["accept_length"][arm.name] / expected - 1
        near = abs(change) <= ACCEPT_LENGTH
        words = f"{'' if near else '! '}{record['accept_length'][arm.name]:.3f}, {change:+.2%}"
        note(texts, Outcome("accept length", arm.name, 0, 0, note=words), record, say)
    return first[stock.name]


def run(texts: Texts, stock: Arm, others: list[Arm], record: dict[str, Any], say: Callable[[str], None]) -> None:
    """All greedy comparisons of `others` with `stock`, which speculate alike; fills the record as it goes."""
    record |= {"accept_length": {}, "exact": {}, "outcomes": []}
    first = greedy_texts(texts, stock, others, record, say)
    note(texts, compare("texts", stock, stock, texts.prompts, first, texts.answer_all(stock)), record, say)
    many = texts.prompts[:24]
    for arm in others:
        together = arm.ask("generate", prompts=many, sampling=[texts.sampling()] * len(many), together=True)
        note(texts, compare("T13 four at once", stock, arm, many, first[: len(many)], together), record, say)
        if arm.name == "full":  # SGLang's own DFLASH step does not know min-p
            note(texts, min_p(texts, stock, arm, first), record, say)
    for name, prompts, sampling, plain in texts.cases(first):
        theirs = stock.ask("generate", prompts=prompts, sampling=sampling)
        banned = [int(next(iter(s["logit_bias"]))) for s in sampling] if name.startswith("T04 bias") else None
        for arm in others:
            ours = arm.ask("generate", prompts=prompts, sampling=sampling)
            outcome = compare(name, stock, arm, prompts, theirs, ours, plain, banned)
            if name.startswith("T09"):
                cached = [(a["cached_tokens"], b["cached_tokens"]) for a, b in zip(theirs, ours, strict=True)]
                outcome.note = outcome.note or f"cached tokens (stock, ours): {cached}"
            if banned and any(token in o["ids"] for token, o in zip(banned, ours, strict=True)):
                outcome.note = "! a banned token appears"
            note(texts, outcome, record, say)
    for arm in others:
        scored = arm.ask("generate", prompts=many, sampling=[texts.sampling()] * len(many), top_logprobs=2)
        note(texts, compare("log-probabilities", stock, arm, many, first[: len(many)], scored), record, say)
