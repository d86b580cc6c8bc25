"""Whole decode steps on a GPU with the bundled pair: text, proposals, accept lengths, sampling, replays, launches.

    python benchmark/step_check.py --json step.json

Everything a step must keep, in one process: greedy text of every width is that of width 1; proposals are the
reference's; steps are those of the host's step loop with the reference draft; sampled tokens follow the target's
distribution; replays leave the same bits and take no memory; a step is one graph launch. The last lines are a table.
"""

import argparse
import json
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import step_replays
import step_sampling
import torch
from step_blocks import RATIO_BOUND, SLOT_BOUND, Blocks, Shadow, compare_text
from step_pair import CONTEXT, Pair, Prompt, shape

from sgl_muse_mega import results
from sgl_muse_mega.commands.layer.arm import Planner
from sgl_muse_mega.emulator.stepper import Emulator
from sgl_muse_mega.megakernel.cuda import CudaMachine
from sgl_muse_mega.megakernel.decode_loop import AHEAD
from sgl_muse_mega.speculative.sampling import SamplingParams

LENGTH_BOUND = 0.01  # of the reference's accept length
GAP_BOUND_US = 15.0
HOST_GROWTH = 32 << 20  # bytes of the host process: its allocator is not the subject
SAMPLED = {"temperature": 0.9, "top_p": 0.95, "top_k": 100}


@dataclass(frozen=True)
class Line:
    """One row of the table."""

    what: str
    found: str
    ok: bool


def check_texts(pair: Pair, record: dict[str, Any]) -> list[Line]:
    """Greedy text of width 8 against width 1 on all prompts, and its accept length against the reference's."""
    rows = []
    for prompt in pair.prompts:
        start = time.monotonic()
        plain, _ = pair.run(prompt.ids, SamplingParams(), 1)
        middle = time.monotonic()
        wide, _ = pair.run(prompt.ids, SamplingParams(), 8)
        rows.append(
            {"line": prompt.line, "text": plain.tokens, "same": plain.tokens == wide.tokens, "steps": wide.stats.steps,
             "seconds": [middle - start, time.monotonic() - middle]}
        )  # fmt: skip
    record["texts"] = rows
    same, tokens = sum(r["same"] for r in rows), sum(len(r["text"]) for r in rows)
    ours = pooled([(len(r["text"]), r["steps"]) for r in rows])
    expected = reference_length({r["line"] for r in rows})
    record["accept_length"] = {"kernels": ours, "reference": expected}
    return [
        Line("greedy width 8 = width 1", f"{same} of {len(rows)} texts, {tokens} tokens", same == len(rows)),
        Line("accept length, reference's run", f"{ours:.4f}, {expected:.4f}", abs(ours / expected - 1) < LENGTH_BOUND),
    ]


def pooled(texts: list[tuple[int, int]]) -> float:
    """Tokens per verify step over (tokens, steps) of texts; the first token of each comes from the prefill."""
    return sum(tokens - 1 for tokens, _ in texts) / sum(steps for _, steps in texts)


def reference_length(lines: set[int]) -> float:
    """Accept length of `sgl-muse-mega eval` on the reference backend, on the same problems."""
    folder = results.results_directory()
    table = json.loads((folder / "figures.json").read_text())
    run = json.loads((folder / table["eval.accept_length"]["file"]).read_text())
    return pooled([(r["completion_tokens"], r["steps"]) for r in run["rows"] if r["line"] in lines])


def check_widths(pair: Pair, texts: int, record: dict[str, Any]) -> list[Line]:
    """Every width from 2 to 16 on the first prompts."""
    chosen = list(zip(pair.prompts[:texts], record["texts"], strict=False))
    found = {}
    for width in range(2, 17):
        runs = [pair.run(prompt.ids, SamplingParams(), width)[0] for prompt, _ in chosen]
        same = sum(run.tokens == row["text"] for run, (_, row) in zip(runs, chosen, strict=True))
        found[width] = {"same": same, "accept": pooled([(len(r.tokens), r.stats.steps) for r in runs])}
    record["widths"] = {"texts": len(chosen), "found": found}
    wrong = [width for width, f in found.items() if f["same"] != len(chosen)]
    return [Line("greedy widths 2..16 = width 1", f"{len(chosen)} texts each, wrong widths {wrong or '-'}", not wrong)]


def check_blocks(pair: Pair, at_least: int, widths: list[int], record: dict[str, Any]) -> list[Line]:
    """Blocks of greedy texts against the reference draft: `at_least` of width 8, and fewer of other widths."""
    shadow, lines = Shadow(pair, CONTEXT), []
    record["blocks"] = {}
    for width in widths:
        blocks, goal = Blocks(), at_least if width == 8 else at_least // 20
        for prompt, row in zip(pair.prompts, record["texts"], strict=True):
            if blocks.draft.blocks >= goal:
                break
            compare_text(pair, shadow, blocks, prompt.ids, row["text"], width)
        record["blocks"][width] = blocks.record()
        for name, c in (("head", blocks.head), ("draft", blocks.draft)):
            text = f"{c.blocks} blocks: {c.same_path} paths, {c.same_ids} candidate sets, {c.equal} all equal; "
            text += f"{c.near} near ties, {len(c.far)} far ({c.unexcused()} of them farther from float64, too)"
            lines.append(Line(f"width {width}: {name} = reference's", text, not c.unexcused() and c.blocks >= goal))
        ratio, worst = blocks.ratio(), blocks.worst_ratio()
        text = f"median {ratio:.3f} of the reference's, worst slot {worst:.3f}, {len(blocks.ratios)} blocks"
        lines.append(Line(f"width {width}: distance to float64", text, ratio < RATIO_BOUND and worst < SLOT_BOUND))
        ours, theirs = ((kept + b) / b for b in [blocks.draft.blocks] for kept in (blocks.kept, blocks.reference_kept))
        ok = abs(ours / theirs - 1) < LENGTH_BOUND
        lines.append(Line(f"width {width}: accept, reference's drafts", f"{ours:.4f}, {theirs:.4f}", ok))
    return lines


def check_steps(pair: Pair, texts: int, record: dict[str, Any]) -> list[Line]:
    """Steps against the host's loop with the reference draft; a seed repeats its text."""
    rows = []
    for width in (8, 16):
        for prompt in pair.prompts[: texts if width == 8 else texts // 4]:
            rows += [one_text(pair, prompt, width, greedy) for greedy in (True, False)]
    record["steps"] = rows
    lines = []
    for greedy in (True, False):
        kind = [r for r in rows if r["greedy"] == greedy]
        same, repeats = sum(r["same_steps"] for r in kind), sum(r["repeats"] for r in kind)
        accept = [sum(r[name] for r in kind) / len(kind) for name in ("accept", "host_accept")]
        ok = repeats == len(kind) and abs(accept[0] / accept[1] - 1) < LENGTH_BOUND
        text = f"{same} of {len(kind)} equal, {repeats} repeat, accept {accept[0]:.4f}, {accept[1]:.4f}"
        lines.append(Line(f"{'greedy' if greedy else 'sampled'} steps = host's loop", text, ok))
    return lines


def one_text(pair: Pair, prompt: Prompt, width: int, greedy: bool) -> dict[str, Any]:
    params = SamplingParams() if greedy else SamplingParams(**SAMPLED, seed=prompt.line)
    first, events = pair.run(prompt.ids, params, width)
    again, _ = pair.run(prompt.ids, params, width)
    rule, rule_events = pair.run(prompt.ids, params, width, host=True)
    return {
        "line": prompt.line, "width": width, "greedy": greedy, "repeats": first.tokens == again.tokens,
        "same_steps": first.tokens == rule.tokens and shape(events) == shape(rule_events),
        "accept": first.stats.accept_length, "host_accept": rule.stats.accept_length,
    }  # fmt: skip


def check_sampling(pair: Pair, draws: int, seed: int, record: dict[str, Any]) -> list[Line]:
    found = step_sampling.check(pair.machine, draws, min(draws, 1000), step_sampling.cases(seed), seed)
    record["sampling"] = found
    values = [v for case in found["cases"] for v in case["p_values"]]
    differ = sum(case["differ_from_rule"] for case in found["cases"])
    compared = sum(case["compared_with_rule"] for case in found["cases"])
    text = f"{len(values)} tests of {draws} draws, least p {min(values):.2g}; {differ} of {compared} differ from rule"
    control = ", ".join(f"{v:.1g}" for v in found["controls"].values())
    return [
        Line("chi-square of sampled accept", text, step_sampling.passed(found)),
        Line("chi-square of planted faults", f"p {control}", step_sampling.passed(found)),
    ]


def check_replays(pair: Pair, steps: int, record: dict[str, Any]) -> list[Line]:
    lines = []
    record["soak"] = [step_replays.soak(pair, steps, 8), step_replays.soak(pair, steps // 10, 16)]
    for run in record["soak"]:
        grown = run["grown_bytes"]
        ok = run["changed"] == 0 and grown["tensors"] == 0 and grown["gpu"] <= 0 and grown["host"] < HOST_GROWTH
        text = (
            f"{run['steps']} steps, {run['texts']} texts, {run['changed']} changed; grown: tensors "
            f"{grown['tensors']} B, GPU {grown['gpu']} B, host {grown['host'] >> 10} KiB"
        )
        lines.append(Line(f"replays of width {run['width']}, states bit-equal", text, ok))
    return lines


def check_launches(pair: Pair, record: dict[str, Any]) -> list[Line]:
    lines = []
    record["gaps"] = [step_replays.gaps(pair, width, 50) for width in (1, 8, 16)]
    for run in record["gaps"]:
        step = statistics.median(run["step_us"])
        text = f"median {run['gap_median_us']:.2f} us, most {max(run['gap_us']):.1f} us; step {step:.0f} us"
        lines.append(Line(f"idle between steps, width {run['width']}", text, run["gap_median_us"] <= GAP_BOUND_US))
    record["profiler"] = [step_replays.profiled(pair, width, 40) for width in (1, 8, 16)]
    for run in record["profiler"]:
        calls, steps = run["enqueued"], run["steps"]
        only_graphs = set(calls) == {"cudaGraphLaunch"} and abs(calls["cudaGraphLaunch"] - steps) < AHEAD
        text = f"{steps} steps: {calls or 'the profiler saw nothing'}; {sum(run['kernels'].values())} kernels"
        lines.append(Line(f"one graph launch a step, width {run['width']}", text, only_graphs))
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--problems", type=int, default=200)
    parser.add_argument("--width-texts", type=int, default=12, help="texts of each width from 2 to 16")
    parser.add_argument("--blocks", type=int, default=1000, help="blocks of width 8 beside the reference draft")
    parser.add_argument("--step-texts", type=int, default=12, help="texts beside the host's step loop")
    parser.add_argument("--draws", type=int, default=20000, help="of each chi-square case")
    parser.add_argument("--soak", type=int, default=20000, help="steps")
    parser.add_argument("--seed", type=int, default=int(time.time()), help="of the chi-square tests")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--save", action="store_true", help="write the results under benchmark/results")
    arguments = parser.parse_args()
    start = time.monotonic()
    machine = CudaMachine()
    planner = Planner(Emulator(machine.sms))
    Pair(planner, 1)
    for vocab, group in step_sampling.cases(arguments.seed).items():
        step_sampling.Trials(planner, vocab, group[0].candidates.shape[1], 1)
    planner.build()
    pair = Pair(machine, arguments.problems)
    record: dict[str, Any] = {"arguments": {k: str(v) for k, v in vars(arguments).items()}}
    parts = {
        "texts": lambda: check_texts(pair, record),
        "widths": lambda: check_widths(pair, arguments.width_texts, record),
        "launches": lambda: check_launches(pair, record),
        "blocks": lambda: check_blocks(pair, arguments.blocks, [8, 2, 5, 12, 16], record),
        "steps": lambda: check_steps(pair, arguments.step_texts, record),
        "sampling": lambda: check_sampling(pair, arguments.draws, arguments.seed, record),
        "replays": lambda: check_replays(pair, arguments.soak, record),
    }
    lines: list[Line] = []
    record["seconds"] = {"build and load": time.monotonic() - start}
    for name, part in parts.items():
        before = time.monotonic()
        lines += part()
        machine.synchronize()
        record["seconds"][name] = time.monotonic() - before
        print(f"{name}: {record['seconds'][name]:.1f} s", flush=True)
    record["lines"] = [vars(line) for line in lines]
    environment = results.environment(torch.cuda.get_device_name(), ("python", "benchmark/step_check.py"))
    if arguments.json:
        arguments.json.write_text(json.dumps({"environment": environment, **record}))
    if arguments.save:
        print(results.save("step_check", environment, record, {}))
    for line in lines:
        print(f"{'ok  ' if line.ok else 'FAIL'} {line.what:<38} {line.found}")
    failed, seconds = sum(not line.ok for line in lines), time.monotonic() - start
    print(f"{failed} of {len(lines)} failed, seed {arguments.seed}, {seconds:.0f} s")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
