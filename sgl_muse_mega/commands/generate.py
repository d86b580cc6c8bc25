"""`sgl-muse-mega generate`: continue one prompt and stream the text."""

import json
import sys
from pathlib import Path
from typing import Any

from rich.console import Console

from sgl_muse_mega.commands.pair import Pair, PairOptions
from sgl_muse_mega.commands.text import TextStream, read_utf8
from sgl_muse_mega.errors import UserError
from sgl_muse_mega.speculative.generate import Generation, Stats, generate
from sgl_muse_mega.speculative.sampling import SamplingParams

INTERRUPTED = 130  # what shells report for a process that Ctrl-C ended


def run(
    prompt: str | None,
    prompt_file: Path | None,
    options: PairOptions,
    params: SamplingParams,
    *,
    max_new_tokens: int,
    raw: bool,
    ignore_eos: bool,
    as_json: bool,
) -> int:
    """Generate, print, and return the exit code: 0, or 130 after Ctrl-C, with what there was until then.

    Raises UserError for input that cannot be served, before anything is printed.
    """
    pair = Pair(options)
    ids = pair.text.encode(read_prompt(prompt, prompt_file), raw=raw)
    pair.check_prompt(ids)
    generation = generate(
        pair.backend(len(ids), max_new_tokens),
        ids,
        params,
        width=pair.width,
        max_new_tokens=max_new_tokens,
        stop_ids=pair.config.eos_token_ids,
        ignore_eos=ignore_eos,
        plan=pair.plan,
    )
    stream = TextStream(pair.text)
    interrupted = False
    try:
        for event in generation:
            piece = stream.push(event.tokens)
            if not as_json:
                sys.stdout.write(piece)
                sys.stdout.flush()
    except KeyboardInterrupt:
        interrupted = True
    else:
        pair.close()
    if as_json:
        print(json.dumps(as_object(generation, pair.text.decode(generation.tokens), interrupted), ensure_ascii=False))
    else:
        sys.stdout.write(stream.finish() + "\n")
        sys.stdout.flush()
        console = Console(soft_wrap=True, markup=False, highlight=False)
        console.print(summary(generation.stats, interrupted), style="dim")
    return INTERRUPTED if interrupted else 0


def read_prompt(prompt: str | None, prompt_file: Path | None) -> str:
    """The prompt from the argument or from a UTF-8 file, whose last line end is not part of it."""
    if (prompt is None) == (prompt_file is None):
        found = "neither" if prompt is None else "both"
        raise UserError(f"One prompt is needed, as argument or as --prompt-file, but {found} is given.")
    if prompt_file is None:
        return prompt or ""
    return read_utf8(prompt_file).removesuffix("\n").removesuffix("\r")


def summary(stats: Stats, interrupted: bool) -> str:
    """One line: tokens, steps, mean accept length, speed, where the time went, why it ended."""
    parts = [f"{stats.completion_tokens} tokens", f"{stats.steps} steps"]
    if stats.steps:
        seconds = stats.step_seconds
        shares = (("draft", stats.draft_seconds), ("verify", stats.verify_seconds), ("host", stats.host_seconds))
        if len(stats.rows_per_step) > 1:
            parts.append(f"{stats.mean_rows:.1f} rows a step")
        parts.append(f"mean accept length {stats.accept_length:.2f}")
        parts.append(f"{stats.tokens_per_second:.1f} tokens/s")
        parts.append(" ".join(f"{name} {part / seconds:.0%}" for name, part in shares))
    parts.append(f"prefill {stats.prefill_seconds:.2f} s for {stats.prompt_tokens} tokens")
    reasons = {"stop": "stop token", "length": "--max-new-tokens", "context": "context full", None: "unfinished"}
    parts.append(f"ended by {'Ctrl-C' if interrupted else reasons[stats.finish_reason]}")
    return ", ".join(parts)


def as_object(generation: Generation, text: str, interrupted: bool) -> dict[str, Any]:
    """The --json object."""
    return {
        "text": text,
        "ids": generation.tokens,
        "finish_reason": "interrupted" if interrupted else generation.stats.finish_reason,
        "stats": stats_object(generation.stats),
    }


def stats_object(stats: Stats) -> dict[str, Any]:
    """Counts, accept lengths and seconds of one generation, as they go into JSON."""
    return {
        "prompt_tokens": stats.prompt_tokens,
        "completion_tokens": stats.completion_tokens,
        "steps": stats.steps,
        "accept_length": stats.accept_length,
        "completion_per_step": stats.completion_per_step,
        "tokens_per_step": {str(n): stats.tokens_per_step[n] for n in sorted(stats.tokens_per_step)},
        "rows_per_step": {str(n): stats.rows_per_step[n] for n in sorted(stats.rows_per_step)},
        "tokens_per_second": stats.tokens_per_second,
        "prefill_seconds": stats.prefill_seconds,
        "draft_seconds": stats.draft_seconds,
        "verify_seconds": stats.verify_seconds,
        "host_seconds": stats.host_seconds,
    }
