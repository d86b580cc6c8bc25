"""Whole decode steps on the GPU with the bundled pair: text, proposals, accept lengths, sampled text, replays.

    python benchmark/step_check.py --problems 40 --soak 3000 --json step.json

Greedy text of width 8 must be that of width 1, token by token. Against the step loop with the reference draft and the
host's accept rule (over the same verify kernels) the steps must be the same, apart from near ties of the draft.
"""

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

from sgl_muse_mega.checkpoint import tiny
from sgl_muse_mega.checkpoint.draft import load_draft
from sgl_muse_mega.checkpoint.target import load_target
from sgl_muse_mega.commands.problems import read_problems
from sgl_muse_mega.commands.text import Text
from sgl_muse_mega.config import load_draft_config, load_target_config
from sgl_muse_mega.megakernel.backend import KernelBackend
from sgl_muse_mega.megakernel.cuda import CudaMachine
from sgl_muse_mega.megakernel.decode_backend import decode_backend
from sgl_muse_mega.speculative.backend import Backend, StepBackend
from sgl_muse_mega.speculative.generate import Generation, StepEvent, generate
from sgl_muse_mega.speculative.sampling import SamplingParams

CONTEXT = 768


def run(
    backend: Backend | StepBackend,
    ids: list[int],
    params: SamplingParams,
    width: int,
    limit: int,
    stop: tuple[int, ...],
) -> tuple[Generation, list[StepEvent]]:
    generation = generate(backend, ids, params, width=width, max_new_tokens=limit, stop_ids=stop)
    return generation, list(generation)


def shape(events: list[StepEvent]) -> list[tuple[int, int]]:
    """Drafts kept and tokens added per step."""
    return [(e.accepted, len(e.tokens)) for e in events]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--problems", type=int, default=40)
    parser.add_argument("--width", type=int, default=8)
    parser.add_argument("--max-new-tokens", type=int, default=200)
    parser.add_argument("--soak", type=int, default=0, help="steps of one repeated generation that must not change")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    config, draft_config = load_target_config(tiny.target_directory()), load_draft_config(tiny.draft_directory())
    weights, draft = load_target(tiny.target_directory(), config), load_draft(tiny.draft_directory(), draft_config)
    machine = CudaMachine()
    common: dict[str, Any] = {"machine": machine, "max_context": CONTEXT}
    steps = decode_backend(config, weights, draft_config, draft, width=arguments.width, **common)
    host = KernelBackend(config, weights, draft_config, draft, **common)
    text = Text(tiny.target_directory())
    stop, limit, width = config.eos_token_ids, arguments.max_new_tokens, arguments.width
    record: dict[str, Any] = {"problems": []}
    for problem in read_problems(tiny.problems_path(), arguments.problems):
        ids = text.encode(problem.question, raw=False)
        greedy = SamplingParams()
        start = time.monotonic()
        plain, _ = run(steps, ids, greedy, 1, limit, stop)
        middle = time.monotonic()
        wide, events = run(steps, ids, greedy, width, limit, stop)
        end = time.monotonic()
        loop, loop_events = run(host, ids, greedy, width, limit, stop)
        sampled = SamplingParams(temperature=0.9, top_p=0.95, top_k=100, seed=problem.line)
        first, first_events = run(steps, ids, sampled, width, limit, stop)
        again, _ = run(steps, ids, sampled, width, limit, stop)
        rule, rule_events = run(host, ids, sampled, width, limit, stop)
        record["problems"].append(
            {
                "line": problem.line, "tokens": len(plain.tokens), "seconds": [middle - start, end - middle],
                "plain_is_wide": plain.tokens == wide.tokens, "loop_is_wide": loop.tokens == wide.tokens,
                "same_steps": shape(events) == shape(loop_events), "accept": wide.stats.accept_length,
                "loop_accept": loop.stats.accept_length, "steps": wide.stats.steps,
                "seed_repeats": first.tokens == again.tokens, "sampled_is_rule": first.tokens == rule.tokens,
                "sampled_same_steps": shape(first_events) == shape(rule_events),
                "sampled_accept": first.stats.accept_length, "rule_accept": rule.stats.accept_length,
            }
        )  # fmt: skip
    machine.synchronize()
    rows = record["problems"]
    print(
        f"{len(rows)} problems, {sum(r['tokens'] for r in rows)} greedy tokens, {sum(r['steps'] for r in rows)} steps"
    )
    for name in (
        "plain_is_wide",
        "loop_is_wide",
        "same_steps",
        "seed_repeats",
        "sampled_is_rule",
        "sampled_same_steps",
    ):
        print(f"  {name}: {sum(r[name] for r in rows)} of {len(rows)}")
    for name in ("accept", "loop_accept", "sampled_accept", "rule_accept"):
        print(f"  {name}: {sum(r[name] for r in rows) / len(rows):.4f}")
    seconds = [sum(r["seconds"][i] for r in rows) for i in range(2)]
    print(f"  seconds with prefill: {seconds[0]:.2f} plain, {seconds[1]:.2f} at width {width}")
    bad = sum(not (r["plain_is_wide"] and r["seed_repeats"]) for r in rows)
    if arguments.soak:
        ids, changed, done = text.encode("How many days are in 12 weeks?", raw=False), 0, 0
        params = SamplingParams(temperature=1.0, seed=3)
        expected, _ = run(steps, ids, params, width, 120, ())
        start = time.monotonic()
        while done < arguments.soak:
            again, _ = run(steps, ids, params, width, 120, ())
            changed += again.tokens != expected.tokens
            done += again.stats.steps
        machine.synchronize()
        print(f"  soak: {done} steps, {changed} texts differ, {time.monotonic() - start:.1f} s")
        record["soak"] = {"steps": done, "changed": changed}
        bad += changed
    if arguments.json:
        arguments.json.write_text(json.dumps(record))
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
