"""Word problems in GSM8K's form, drawn from sentence templates.

Every number is a positive integer below 1000 and every division is exact. A problem is
{"question": ..., "answer": "... <<12*4=48>>48 ...\n#### 48"}. The splits use disjoint seed ranges, and the unseen split
is additionally kept out of the training text by question.
"""

import random
import re
from collections.abc import Iterator
from dataclasses import dataclass

from training.templates import NAMES, PLACES, TEMPLATES, THINGS, Template

LIMIT = 999
_CHOICE = re.compile(r"\[([^\]]+)\]")
_EXPRESSION = re.compile(r"([a-z]|\d+)([-+*/])([a-z]|\d+)")
_SPLIT_OFFSET = {"train": 0, "validation": 1 << 40, "unseen": 2 << 40}


@dataclass(frozen=True, slots=True)
class Problem:
    question: str
    answer: str

    @property
    def result(self) -> str:
        """The text after the last "####", which is what exact-answer scoring compares."""
        return final_answer(self.answer)


def final_answer(text: str) -> str:
    """The digits after the last "#### " of a solution, or "" when there are none."""
    found = re.findall(r"#### (\d+)", text)
    return found[-1] if found else ""


def draw_problem(rng: random.Random) -> Problem:
    """Draws a template, its words and its numbers; redraws the numbers until every step is a positive integer."""
    template = rng.choice(TEMPLATES)
    values = None
    while values is None:
        values = _draw_values(template, rng)
    n, m = rng.sample(NAMES, 2)
    words = {"n": n, "m": m, "o": rng.choice(THINGS), "p": rng.choice(PLACES)}
    chosen = _CHOICE.sub(lambda match: rng.choice(match[1].split("|")), template.question)
    lines = []
    for sentence, expression, result in template.steps:
        left, operator, right = _operands(expression, values)
        worked = f"{left}{operator}{right}"
        worked = f"{worked} = <<{worked}={values[result]}>>{values[result]}"
        lines.append(sentence.format(**words).replace("@", worked))
    lines.append(f"#### {values[template.steps[-1][2]]}")
    return Problem(chosen.format(**words, **values), "\n".join(lines))


def problems(split: str, seed: int, count: int) -> Iterator[Problem]:
    """`count` problems of one split ("train", "validation" or "unseen") and seed, in a reproducible order."""
    rng = random.Random(_SPLIT_OFFSET[split] + seed)
    for _ in range(count):
        yield draw_problem(rng)


def distinct_problems(split: str, seed: int, count: int) -> list[Problem]:
    """As `problems`, without two equal questions."""
    found: dict[str, Problem] = {}
    rng = random.Random(_SPLIT_OFFSET[split] + seed)
    while len(found) < count:
        problem = draw_problem(rng)
        found.setdefault(problem.question, problem)
    return list(found.values())


def _draw_values(template: Template, rng: random.Random) -> dict[str, int] | None:
    values: dict[str, int] = {}
    for item in template.draws.split():
        if ":" in item:
            letter, bounds = item.split(":")
            low, high = bounds.split("-")
            values[letter] = rng.randint(int(low), int(high))
        else:
            letter, expression = item.split("=")
            values[letter] = _evaluate(expression, values)
        if not 0 < values[letter] <= LIMIT:
            return None
    for _, expression, result in template.steps:
        values[result] = _evaluate(expression, values)
        if not 0 < values[result] <= LIMIT:
            return None
    return values


def _operands(expression: str, values: dict[str, int]) -> tuple[int, str, int]:
    match = _EXPRESSION.fullmatch(expression)
    if match is None:
        raise ValueError(f"not a two-operand expression: {expression!r}")
    left, right = (values[text] if text.isalpha() else int(text) for text in (match[1], match[3]))
    return left, match[2], right


def _evaluate(expression: str, values: dict[str, int]) -> int:
    """Value of a two-operand expression; 0 (always refused) for a division that is not exact."""
    left, operator, right = _operands(expression, values)
    if operator == "+":
        return left + right
    if operator == "-":
        return left - right
    if operator == "*":
        return left * right
    return left // right if right and left % right == 0 else 0
