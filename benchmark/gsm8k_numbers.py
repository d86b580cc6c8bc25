"""What a run of `bench_gsm8k.py` comes to: its numbers, their spread over runs, and whether acceptance was real."""

import os
import statistics
from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import Any

from gsm8k_client import Answer

from sgl_muse_mega.commands.problems import Problem, final_number

SIMULATED = "SGLANG_SIMULATE_ACC_LEN"
ENOUGH_STEPS = 200  # verify steps after which the spread of accepted drafts tells something
SPREAD = (  # (number, digits) of a run, for the table
    ("exact", 4), ("tokens_per_second", 1), ("decode_tokens_per_second", 1), ("ms_per_step", 3),
    ("first_token_ms", 1), ("accept_server", 3), ("accept_per_request", 3), ("accept_token_weighted", 3),
    ("accept_pooled", 3),
)  # fmt: skip


def right(problem: Problem, answer: Answer) -> bool:
    """Whether the number behind the last "####", or the last number without one, is the expected one."""
    found: Decimal | None = final_number(answer.text)
    return answer.error is None and found == problem.expected


def numbers(problems: Sequence[Problem], answers: Sequence[Answer], accept_server: float | None) -> dict[str, Any]:
    """Of one run; what cannot be told is None. Times leave out the answers that failed.

    tokens_per_second counts whole requests, decode_tokens_per_second what comes behind the first token. accept_*:
    - server: SGLang's own running average over verify steps, as its log and metrics show it;
    - per_request: the mean over requests of the request's own (meta_info's spec_accept_length: all tokens, the first
      included, over verify steps);
    - token_weighted: the same, weighted by the request's tokens;
    - pooled: all tokens but the first of each request, over all verify steps. This one turns steps into tokens.
    """
    done = [a for a in answers if a.error is None and a.tokens]
    verified = [a for a in done if a.verify_steps and a.accept_length]
    timed = [a for a in done if a.first_seconds is not None and a.tokens > 1]
    steps = sum(a.verify_steps for a in verified)
    tokens = sum(a.tokens for a in done)
    decoding = sum(a.seconds - a.first_seconds for a in timed)
    stepping = sum(a.seconds - a.first_seconds for a in verified if a in timed)
    reasoning = [a.reasoning_tokens for a in done if a.reasoning_tokens is not None]
    return {
        "questions": len(answers),
        "failed": len(answers) - len(done),
        "truncated": sum(a.finish == "length" for a in done),
        "without_accept_length": len(done) - len(verified),
        "right": sum(map(right, problems, answers)),
        "exact": statistics.mean(map(right, problems, answers)),
        "tokens": tokens,
        "reasoning_tokens": sum(reasoning) if reasoning else None,
        "verify_steps": steps or None,
        "tokens_per_second": _ratio(tokens, sum(a.seconds for a in done)),
        "decode_tokens_per_second": _ratio(sum(a.tokens - 1 for a in timed), decoding),
        "ms_per_step": _ratio(stepping * 1e3, steps),
        "first_token_ms": statistics.median(a.first_seconds * 1e3 for a in timed) if timed else None,
        "accept_server": accept_server,
        "accept_per_request": statistics.mean(a.accept_length for a in verified) if verified else None,
        "accept_token_weighted": _ratio(
            sum(a.accept_length * a.tokens for a in verified), sum(a.tokens for a in verified)
        ),
        "accept_pooled": _ratio(sum(a.tokens - 1 for a in verified), steps),
    }


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None


def spread(runs: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """median, min and max over runs, of every number that all of them have."""
    found = {}
    for name, _ in SPREAD:
        values = [run[name] for run in runs]
        if values and None not in values:
            found[name] = {"median": statistics.median(values), "min": min(values), "max": max(values)}
    return found


def table(runs: Sequence[Mapping[str, Any]]) -> list[str]:
    """One line per number: every run, then median and spread."""
    lines = []
    over = spread(runs)
    for name, digits in SPREAD:
        values = " ".join("-".rjust(9) if run[name] is None else f"{run[name]:9.{digits}f}" for run in runs)
        if name in over:
            s = over[name]
            values += f"   median {s['median']:.{digits}f} ({s['min']:.{digits}f}..{s['max']:.{digits}f})"
        lines.append(f"{name:<26}{values}")
    return lines


def acceptance(
    environment: Mapping[str, str] | None, answers: Sequence[Answer], drafts: int | None = None
) -> tuple[str, str]:
    """("real" | "simulated" | "suspect" | "unknown", why): whether accept lengths are the draft's own.

    environment: the server's, when it shows it. drafts: most that a step can accept.
    """
    for where, values in (("the server's", environment or {}), ("this program's", os.environ)):
        value = values.get(SIMULATED, "").strip()
        if value and _positive(value):
            return "simulated", f"{SIMULATED} is {value} in {where} environment"
    steps = _histogram(answers)
    used = [accepted for accepted, count in enumerate(steps) if count]
    # All or none of the drafts can be accepted on end: of a text that repeats itself, of a draft that knows nothing.
    if sum(steps) >= ENOUGH_STEPS and used[-1] - used[0] <= 1 and used[0] > 0 and used[-1] != drafts:
        return "suspect", f"all {sum(steps)} verify steps accepted {used[0]} to {used[-1]} drafts, as no draft does"
    if environment is None:
        return "unknown", "the server does not show its environment; start it with SGLANG_EXPOSE_OWN_ENV_VARS=1"
    return "real", f"{SIMULATED} is not set"


def _positive(value: str) -> bool:
    try:
        return float(value) > 0
    except ValueError:
        return True


def _histogram(answers: Sequence[Answer]) -> list[int]:
    """Verify steps by accepted drafts, all answers together."""
    longest = max((len(a.histogram) for a in answers), default=0)
    return [sum(a.histogram[i] for a in answers if i < len(a.histogram)) for i in range(longest)]
