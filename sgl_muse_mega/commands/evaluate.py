"""`sgl-muse-mega eval`: exact answers and accept length on problems in GSM8K's form.

An answer is right when the number behind the last "####" of the output (or its last number, without that mark) equals
the expected one. Accept length is reported three ways. With C the tokens of a request and V its verify steps:

- per request: the mean over requests of C / V;
- token-weighted: the mean of C / V over tokens, sum(C * C / V) / sum(C), in which long outputs count more;
- pooled: sum(C) / sum(V), the tokens an average step gives; this one turns steps per second into tokens per second.

C leaves out the first token, which the prefill gives; requests that ended with it took no step and are not averaged.
Published cards count that token, so the same three averages are also given with it.

What a tree or an automatic width has learnt about the draft on one problem is where it starts on the next.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from sgl_muse_mega import results
from sgl_muse_mega.checkpoint import tiny
from sgl_muse_mega.commands.generate import INTERRUPTED, stats_object
from sgl_muse_mega.commands.pair import DEFAULT_WIDTH, Pair, PairOptions
from sgl_muse_mega.commands.problems import Problem, final_number, read_problems
from sgl_muse_mega.speculative.backend import Backend, StepBackend
from sgl_muse_mega.speculative.calibration import State
from sgl_muse_mega.speculative.generate import Generation, Stats, generate
from sgl_muse_mega.speculative.philox import SEED_LIMIT
from sgl_muse_mega.speculative.sampling import SamplingParams

AVERAGES = ("per request", "token-weighted", "pooled")


def run(
    file: Path | None,
    options: PairOptions,
    params: SamplingParams,
    *,
    limit: int | None,
    max_new_tokens: int,
    save: bool,
) -> int:
    """Evaluate, print, save if asked, and return the exit code: 0, or 130 after Ctrl-C, when nothing is saved.

    Raises UserError for input that cannot be served, before the first request.
    """
    pair = Pair(options)
    path = file or tiny.problems_path()
    problems = read_problems(path, limit)
    prompts = []
    for problem in problems:
        name = f"The question in line {problem.line} of {path}"
        prompts.append(pair.text.encode(problem.question, raw=False, name=name))
        pair.check_prompt(prompts[-1], name)
    backend = pair.backend(max(map(len, prompts)), max_new_tokens)
    if save:
        results.check_writable()

    rows: list[dict[str, Any]] = []
    done: list[Stats] = []
    prior: State | None = None
    interrupted = False
    with _progress() as progress:
        task = progress.add_task("", total=len(problems))
        try:
            for index, (problem, ids) in enumerate(zip(problems, prompts, strict=True)):
                request = replace(params, seed=(params.seed + index) % SEED_LIMIT)
                row, generation = _answer(pair, backend, problem, ids, request, max_new_tokens, prior)
                prior = generation.calibration
                rows.append(row)
                done.append(generation.stats)
                right, pooled = sum(row["right"] for row in rows), averages(done)["pooled"]
                progress.update(task, advance=1, description=f"{right} right, accept length {pooled:.2f}")
        except KeyboardInterrupt:
            interrupted = True
        else:
            pair.close()

    console = Console(soft_wrap=True, highlight=False)
    if not rows:
        console.print("Interrupted before the first answer.")
        return INTERRUPTED
    summary = summarise(rows, done)
    print_summary(console, summary, len(problems))
    if interrupted:
        console.print("Interrupted" + ("; nothing was saved." if save else "."))
        return INTERRUPTED
    if save:
        inputs = _inputs(pair, path, params, limit, max_new_tokens)
        chain = pair.width == DEFAULT_WIDTH and not pair.plan.learns
        standard = pair.bundled and file is None and limit is None and chain and params.greedy
        reference = pair.backend_name == "reference" and pair.kv_cache_dtype == "bf16"
        figures = _figures(summary) if standard and reference else {}
        gpu = torch.cuda.get_device_name() if pair.backend_name == "cuda" else None
        content = {"inputs": inputs, "summary": summary, "rows": rows}
        written = results.save("eval", results.environment(gpu), content, figures)
        console.print(f"Saved {written}.")
        if not figures:
            console.print(
                "No named figures: those are for the bundled pair on the reference backend and all its problems, "
                "greedy, width 8, bf16."
            )
    return 0


def averages(done: Sequence[Stats], first_token: bool = False) -> dict[str, float]:
    """Accept length over requests in the three ways of the module's description; 0 where no request took a step.

    `first_token` counts the token of the prefill, as published cards do.
    """
    counts = [(stats.completion_tokens - (0 if first_token else 1), stats.steps) for stats in done if stats.steps]
    if not counts:
        return dict.fromkeys(AVERAGES, 0.0)
    tokens, steps = (sum(column) for column in zip(*counts, strict=True))
    values = (sum(c / v for c, v in counts) / len(counts), sum(c * c / v for c, v in counts) / tokens, tokens / steps)
    return dict(zip(AVERAGES, values, strict=True))


def summarise(rows: Sequence[dict[str, Any]], done: Sequence[Stats]) -> dict[str, Any]:
    """Everything the run prints, from its rows and statistics."""

    def total(value: Callable[[Stats], float]) -> float:
        return sum(map(value, done))

    step_seconds = total(lambda stats: stats.step_seconds)
    step_tokens = total(lambda stats: stats.completion_tokens - 1)
    return {
        "problems": len(rows),
        "right": sum(row["right"] for row in rows),
        "answers": sum(row["right"] for row in rows) / len(rows),
        "completion_tokens": total(lambda stats: stats.completion_tokens),
        "steps": total(lambda stats: stats.steps),
        "rows": sum(rows * n for stats in done for rows, n in stats.rows_per_step.items()),
        "accept_length": averages(done),
        "accept_length_with_first_token": averages(done, first_token=True),
        "tokens_per_second": step_tokens / step_seconds if step_seconds else 0.0,
        "prefill_seconds": total(lambda stats: stats.prefill_seconds),
        "draft_seconds": total(lambda stats: stats.draft_seconds),
        "verify_seconds": total(lambda stats: stats.verify_seconds),
        "host_seconds": total(lambda stats: stats.host_seconds),
    }


def print_summary(console: Console, summary: dict[str, Any], asked: int) -> None:
    """The answers, a table of the accept lengths, and the speed."""
    unfinished = f" of {asked} asked for" if summary["problems"] < asked else ""
    console.print(f"{summary['right']} of {summary['problems']} answers right ({summary['answers']:.1%}){unfinished}")
    table = Table("accept length", *AVERAGES, box=None, pad_edge=False)
    for label, name in (("tokens / verify step", ""), ("published, first token counted", "_with_first_token")):
        table.add_row(label, *(f"{value:.2f}" for value in summary[f"accept_length{name}"].values()))
    console.print(table)
    parts = [f"{summary['completion_tokens']} tokens, {summary['steps']} steps, {summary['rows']:.0f} rows"]
    parts.append(f"{summary['tokens_per_second']:.1f} tokens/s in steps")
    parts.extend(f"{name} {summary[f'{name}_seconds']:.1f} s" for name in ("prefill", "draft", "verify", "host"))
    console.print(", ".join(parts))


def _answer(
    pair: Pair,
    backend: Backend | StepBackend,
    problem: Problem,
    ids: list[int],
    params: SamplingParams,
    max_new_tokens: int,
    prior: State | None,
) -> tuple[dict[str, Any], Generation]:
    generation = generate(
        backend,
        ids,
        params,
        width=pair.width,
        max_new_tokens=max_new_tokens,
        stop_ids=pair.config.eos_token_ids,
        plan=replace(pair.plan, prior=prior),
    )
    for _ in generation:
        pass
    text = pair.text.decode(generation.tokens)
    answer = final_number(text)
    row = {
        "line": problem.line,
        "expected": str(problem.expected),
        "answer": None if answer is None else str(answer),
        "right": answer == problem.expected,
        "finish_reason": generation.stats.finish_reason,
        "seed": params.seed,
        "text": text,
        **stats_object(generation.stats),
    }
    return row, generation


def _figures(summary: dict[str, Any]) -> dict[str, results.Figure]:
    """The named figures: the share of right answers and the pooled accept length, each one value over all problems."""
    n = summary["problems"]
    return {
        "eval.answers": results.Figure.of([summary["answers"]], "fraction", n),
        "eval.accept_length": results.Figure.of([summary["accept_length"]["pooled"]], "tokens per step", n),
    }


def _inputs(pair: Pair, path: Path, params: SamplingParams, limit: int | None, max_new_tokens: int) -> dict[str, Any]:
    bundled = pair.bundled
    return {
        "target": "bundled" if bundled else str(pair.directory),
        "draft": None if pair.draft_directory is None else "bundled" if bundled else str(pair.draft_directory),
        "problems": "bundled" if path == tiny.problems_path() else str(path),
        "limit": limit,
        "width": "auto" if pair.plan.cost is not None else pair.width,
        "nodes": pair.plan.nodes,
        "cost_ms": None if pair.plan.cost is None else [round(float(ms), 6) for ms in pair.plan.cost[1:]],
        "max_new_tokens": max_new_tokens,
        "kv_cache_dtype": pair.kv_cache_dtype,
        "backend": pair.backend_name,
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": params.top_k,
        "min_p": params.min_p,
        "seed": params.seed,
    }


def _progress() -> Progress:
    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"), TimeRemainingColumn())
    console = Console(stderr=True)
    # where there is no terminal to draw on, the bar would only leave an empty line
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
