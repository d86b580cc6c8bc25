"""Token trees and chosen widths on a GPU with the bundled pair, against the rules of `speculative`.

    python benchmark/tree_check.py --json tree.json [--problems 60] [--steps 400]

Every step's plan, path and calibration are those of the rules over the step's own lattice and logits, to the bit;
text of trees and chosen widths is that of plain decoding (greedy, and of trees also sampled: the same seed), up to near
ties; a graph replayed is the step launched. The last lines are a table. `--machine emulator` runs the same kernels on
the CPU, slowly.
"""

import argparse
import json
import sys
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from step_pair import CONTEXT, Pair, Prompt

from sgl_muse_mega import results
from sgl_muse_mega.commands.layer.arm import Planner
from sgl_muse_mega.emulator.stepper import Emulator
from sgl_muse_mega.megakernel.cuda import CudaMachine
from sgl_muse_mega.megakernel.decode_loop import DecodeLoop
from sgl_muse_mega.megakernel.decode_request import read_report, request_words
from sgl_muse_mega.megakernel.machine import Machine
from sgl_muse_mega.speculative.accept import accept_greedy, accept_sampled
from sgl_muse_mega.speculative.backend import DraftBlock
from sgl_muse_mega.speculative.calibration import Trial, updated
from sgl_muse_mega.speculative.generate import Generation, generate
from sgl_muse_mega.speculative.philox import uniform
from sgl_muse_mega.speculative.rows import RowPlan
from sgl_muse_mega.speculative.sampling import SamplingParams, argmax
from sgl_muse_mega.speculative.tree import accept_tree, grow
from sgl_muse_mega.speculative.width import chain_maxima, chain_rows, default_cost, tree_rows

WIDTH, MOST_ROWS = 8, 16
SAMPLED = {"temperature": 0.9, "top_p": 0.95, "top_k": 100}
SAME_TEXTS = 0.97  # of the texts; the others differ from a near tie on


def plans() -> dict[str, RowPlan]:
    """Kinds of steps, by name."""
    cost = default_cost(MOST_ROWS)
    return {
        "tree of 8": RowPlan(8),
        "tree of 16": RowPlan(16),
        "chain, chosen width": RowPlan(cost=cost),
        "tree of 16, chosen width": RowPlan(16, cost),
    }


@dataclass
class Steps:
    """How many steps agree with the rules in what."""

    steps: int = 0
    plans: int = 0  # rows, parents, depths, tokens, conditionals, and how many count
    paths: int = 0  # rows kept and tokens
    calibrations: int = 0
    tokens: int = 0


def check_step(loop: DecodeLoop, params: SamplingParams, plan: RowPlan, number: int, found: Steps) -> str | None:
    """Runs step `number` and compares it; returns why the text ended."""
    decode = loop.decode
    inputs, own, draft = decode.step.inputs, decode.state, decode.draft
    assert draft is not None
    loop._machine.synchronize()
    before, anchor, length = own.calibration.cpu().numpy().copy(), int(inputs.token_ids[0]), int(inputs.length)
    decode.launch(WIDTH, nodes=plan.nodes or 0, auto=plan.cost is not None)
    loop._machine.synchronize()
    report = read_report(own, number)
    assert report is not None
    slots, temperature = WIDTH - 1, 1.0 if params.greedy else params.temperature
    candidates, lattice = (getattr(draft.activations, name)[:slots].cpu() for name in ("candidates", "lattice"))
    tokens, conditionals = inputs.token_ids.tolist(), own.conditionals.tolist()
    logits, draw = decode.step.activations.logits.cpu(), partial(uniform, params.seed)
    live = int(inputs.live)
    trials: list[Trial]
    if plan.nodes is not None:
        tree = grow(anchor, candidates, lattice, before, nodes=plan.nodes, temperature=temperature)
        rows = len(tree) if plan.cost is None else tree_rows(tree, plan.cost)
        n = len(tree)
        same = tokens[1:n] == list(tree.tokens[1:]) and conditionals[:n] == list(tree.conditionals)
        same &= own.parents.tolist()[:n] == list(tree.parents) and own.depths.tolist()[:n] == list(tree.depths)
        same &= live == rows
        counted = tree.first(rows)
        path = accept_tree(logits[:rows], counted, params, length + 1, draw)
        kept, expected = path.rows, (*(tree.tokens[row] for row in path.rows), path.token)
        trials = counted.trials(kept)
        same_rows = own.path.tolist()[: len(report.tokens)] == [0, *kept][: len(report.tokens)]
    else:
        assert plan.cost is not None
        chosen = torch.tensor(tokens[1:WIDTH])
        block = DraftBlock(chosen, candidates, draft.activations.probabilities[:slots].cpu())
        maxima = chain_maxima(block, lattice, temperature)
        rows = chain_rows(before, maxima, plan.cost)
        same = conditionals[1:WIDTH] == maxima and live == rows
        first = DraftBlock(chosen[: rows - 1], candidates[: rows - 1], block.probabilities[: rows - 1])
        if params.greedy:
            accepted = accept_greedy(logits[:rows], first.tokens.tolist())
        else:
            accepted = accept_sampled(logits[:rows], first, params, length + 1, draw)
        kept, expected = tuple(range(1, accepted.drafts + 1)), (*tokens[1 : accepted.drafts + 1], accepted.token)
        trials = [(s, maxima[s - 1], s <= accepted.drafts) for s in range(1, min(accepted.drafts + 2, rows))]
        same_rows = report.accepted == accepted.drafts
    found.steps += 1
    found.tokens += len(report.tokens)
    found.plans += same
    found.paths += same_rows and report.tokens == expected[: len(report.tokens)] and report.rows == rows
    found.calibrations += np.array_equal(own.calibration.cpu().numpy(), updated(before, trials))
    return report.reason


def check_rules(pair: Pair, plan: RowPlan, params: SamplingParams, goal: int) -> Steps:
    """At least `goal` steps, text after text."""
    found, loop = Steps(), pair.loop(MOST_ROWS)
    for prompt in pair.prompts:
        if found.steps >= goal:
            break
        first = argmax(loop.prefill(prompt.ids))
        words = request_words(params, max_new_tokens=200, max_context=CONTEXT, stop_ids=pair.config.eos_token_ids)
        loop.decode.begin(first, len(prompt.ids), words, plan)
        number, reason = 0, None
        while reason is None and found.steps < goal:
            number += 1
            reason = check_step(loop, params, plan, number, found)
    return found


def text(pair: Pair, prompt: Prompt, params: SamplingParams, plan: RowPlan | None, tokens: int) -> Generation:
    """One text, by replayed graphs on a GPU; no plan: one token a step."""
    run = generate(
        pair.loop(MOST_ROWS), prompt.ids, params, width=1 if plan is None else WIDTH, max_new_tokens=tokens,
        stop_ids=pair.config.eos_token_ids, plan=plan,
    )  # fmt: skip
    list(run)
    return run


def check_texts(pair: Pair, tokens: int) -> list[dict[str, Any]]:
    """Texts of every kind of step against plain decoding with the same seed."""
    rows = []
    for sampled in (False, True):
        runs = [SamplingParams(**SAMPLED, seed=p.line) if sampled else SamplingParams() for p in pair.prompts]
        plain = [
            text(pair, prompt, params, None, tokens).tokens for prompt, params in zip(pair.prompts, runs, strict=True)
        ]
        for name, plan in plans().items():
            if sampled and plan.nodes is None:
                continue  # a drawn chain has another text
            made = [text(pair, prompt, params, plan, tokens) for prompt, params in zip(pair.prompts, runs, strict=True)]
            steps = sum(run.stats.steps for run in made)
            rows.append(
                {
                    "plan": name, "sampled": sampled, "texts": len(made), "steps": steps,
                    "same": sum(run.tokens == other for run, other in zip(made, plain, strict=True)),
                    "accept_length": sum(len(run.tokens) - 1 for run in made) / max(steps, 1),
                    "rows": sum(run.stats.mean_rows * run.stats.steps for run in made) / max(steps, 1),
                }
            )  # fmt: skip
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--machine", choices=("cuda", "emulator"), default="cuda")
    parser.add_argument("--problems", type=int, default=60, help="texts of every kind")
    parser.add_argument("--tokens", type=int, default=200, help="most new tokens of a text")
    parser.add_argument("--steps", type=int, default=400, help="steps of every kind that are compared with the rules")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    machine: Machine = Emulator(sms=3) if arguments.machine == "emulator" else CudaMachine()
    if arguments.machine == "cuda":
        planner = Planner(Emulator(machine.sms))
        Pair(planner, 1)
        planner.build()
    pair = Pair(machine, arguments.problems)
    lines: list[tuple[str, str, bool]] = []
    record: dict[str, Any] = {"rules": [], "texts": []}
    for name, plan in plans().items():
        for params in (SamplingParams(), SamplingParams(**SAMPLED, seed=11)):
            found = check_rules(pair, plan, params, arguments.steps)
            kind = f"{name}, {'greedy' if params.greedy else 'sampled'}"
            record["rules"].append({"kind": kind, **asdict(found)})
            counts = f"{found.steps} steps, {found.tokens} tokens: {found.plans} plans, {found.paths} paths, "
            counts += f"{found.calibrations} calibrations as the rules have them"
            ok = found.steps > 0 and {found.plans, found.paths, found.calibrations} == {found.steps}
            lines.append((kind, counts, ok))
    for row in check_texts(pair, arguments.tokens):
        record["texts"].append(row)
        kind = f"{row['plan']}, {'sampled' if row['sampled'] else 'greedy'}: text = plain"
        counts = f"{row['same']} of {row['texts']}; accept length {row['accept_length']:.3f}, {row['rows']:.2f} rows"
        lines.append((kind, counts, row["same"] >= SAME_TEXTS * row["texts"]))
    record["lines"] = [{"what": what, "found": counts, "ok": ok} for what, counts, ok in lines]
    if arguments.json:
        gpu = torch.cuda.get_device_name() if arguments.machine == "cuda" else None
        environment = results.environment(gpu, ("python", "benchmark/tree_check.py"))
        arguments.json.write_text(json.dumps({"environment": environment, **record}, indent=1) + "\n")
    for what, counts, ok in lines:
        print(f"{'ok  ' if ok else 'FAIL'} {what}: {counts}")
    return 0 if all(ok for *_, ok in lines) else 1


if __name__ == "__main__":
    with torch.inference_mode():
        sys.exit(main())
