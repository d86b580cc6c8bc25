"""Chains, trees and automatic widths on simulated acceptance profiles and the tiny pair: accept length, ms per token.

    python benchmark/width_profiles.py --plot docs/width-profiles.svg --save

No GPU. Steps are counted by running the rules themselves (`sgl_muse_mega.speculative`); their times are composed from
parts that were measured on one H200 as one rank of four (`composed_cost`). The profiles are those of `simulated_draft`
at the accept lengths of the published cards; the tiny pair runs on the reference backend, greedy. Several minutes.
"""

import argparse
import json
import statistics
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import simulated_draft
import torch
from rich.console import Console
from rich.table import Table
from simulated_draft import Text

from sgl_muse_mega import results
from sgl_muse_mega.checkpoint import tiny
from sgl_muse_mega.commands.pair import Pair, PairOptions
from sgl_muse_mega.commands.problems import read_problems
from sgl_muse_mega.results import Figure
from sgl_muse_mega.speculative.backend import DraftBlock
from sgl_muse_mega.speculative.calibration import State, default_prior, updated
from sgl_muse_mega.speculative.generate import generate
from sgl_muse_mega.speculative.rows import RowPlan
from sgl_muse_mega.speculative.sampling import SamplingParams
from sgl_muse_mega.speculative.tree import Tree, grow
from sgl_muse_mega.speculative.width import CostTable, chain_maxima, chain_rows, interpolated, tree_rows

LAYERS = 62
LAYER_FILE = "layer-2026-11-30T09-20-38-nvidia-h200.json"
STEP_FILE = "step-2026-11-30T09-20-43-nvidia-h200.json"
WITHOUT_DRAFT = ("head", "accept")  # parts of a step of plain decoding, besides the layers

PROFILES = {"GSM8K": 5.37, "GPQA": 3.88, "AIME": 4.19}
BLOCK = 8  # rows of the draft's block below trees
WIDEST = 16
CHAINS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16)
TREES = (4, 6, 8, 10, 12, 14, 16)
SHOWN = ("chain 4", "chain 8", "chain 16", "chain auto", "tree 8", "tree 16", "tree auto")


@dataclass(slots=True)
class Outcome:
    """Steps of one way to choose rows."""

    tokens: int = 0
    rows: Counter[int] = field(default_factory=Counter)  # steps by rows
    plain: bool = False  # width 1: no draft runs

    @property
    def steps(self) -> int:
        return self.rows.total()

    @property
    def accept_length(self) -> float:
        return self.tokens / self.steps

    def mean_rows(self) -> float:
        return sum(n * steps for n, steps in self.rows.items()) / self.steps

    def ms_per_token(self, cost: CostTable, plain_ms: float) -> float:
        if self.plain:
            return plain_ms * self.steps / self.tokens
        return sum(float(cost[n]) * steps for n, steps in self.rows.items()) / self.tokens

    def count(self, tokens: int, rows: int) -> None:
        self.tokens += tokens
        self.rows[rows] += 1


def composed_cost(directory: Path) -> tuple[dict[int, float], float]:
    """ms of a step by rows, and of plain decoding, composed from measured parts of one H200 as one rank of four.

    62 times the layer at 1, 4, 8 and 16 rows (medians; NVFP4 experts, context 2048, exchange looped back), and the
    step's other parts, measured at width 8 and taken as the same for all widths: draft layers, draft head, target's
    head, accept, draft context (draft and heads whole on the rank), and the gap between steps. Not in it: the two
    layers with BF16 experts, the copy of an accepted path, a block wider than 8.
    """
    layer = json.loads((directory / LAYER_FILE).read_text(encoding="utf-8"))
    step = json.loads((directory / STEP_FILE).read_text(encoding="utf-8"))
    layers = {case["rows"]: LAYERS * case["median_us"] / 1e3 for case in layer["cases"]}
    parts = {part["name"]: statistics.median(part["us"]) / 1e3 for part in step["parts"]}
    gap = statistics.median(step["gap_us"]) / 1e3
    rest = sum(ms for name, ms in parts.items() if name != "verify layers") + gap
    plain = layers[1] + sum(parts[name] for name in WITHOUT_DRAFT) + gap
    return {rows: ms + rest for rows, ms in sorted(layers.items())}, plain


def fixed_chain(text: Text, width: int, outcome: Outcome) -> None:
    kept, at = text.kept(), 0
    outcome.plain = width == 1
    while at < len(kept):
        tokens = int(min(kept[at], width - 1)) + 1
        outcome.count(tokens, width)
        at += tokens


def automatic_chain(text: Text, cost: CostTable, outcome: Outcome) -> None:
    kept, at, state = text.kept(), 0, default_prior()
    ids = torch.arange(simulated_draft.K).expand(simulated_draft.SLOTS, -1)
    while at < len(kept):
        block = DraftBlock(torch.from_numpy(text.chain[at]), ids, torch.empty(0))
        maxima = chain_maxima(block, torch.from_numpy(text.lattice[at]), 1.0)
        rows = chain_rows(state, maxima, cost)
        drafts = int(min(kept[at], rows - 1))
        turns = range(1, min(drafts + 2, rows))
        state = updated(state, [(slot, maxima[slot - 1], slot <= drafts) for slot in turns])
        outcome.count(drafts + 1, rows)
        at += drafts + 1


def trees(text: Text, nodes: int, cost: CostTable | None, outcome: Outcome) -> None:
    at, state = 0, default_prior()
    ids = torch.arange(simulated_draft.K).expand(BLOCK - 1, -1)
    while at < len(text.truth):
        tree = grow(0, ids, torch.from_numpy(text.lattice[at, : BLOCK - 1]), state, nodes=nodes)
        if cost is not None:
            tree = tree.first(tree_rows(tree, cost))
        path = followed(tree, text.truth[at].tolist())
        state = updated(state, tree.trials(path))
        outcome.count(len(path) + 1, len(tree))
        at += len(path) + 1


def followed(tree: Tree, truth: list[int]) -> list[int]:
    """Rows of the tree that agree with the text."""
    path: list[int] = []
    row = 0
    while True:
        behind = (r for r in range(1, len(tree)) if tree.parents[r] == row and tree.tokens[r] == truth[len(path)])
        row = next(behind, 0)
        if row == 0:
            return path
        path.append(row)


def simulated(
    accept_length: float, rough: bool, cost: CostTable, positions: int, texts: int, progress: Callable[[str], None]
) -> tuple[float, dict[str, Outcome]]:
    """The fitted level, and every way's steps through the texts."""
    level = simulated_draft.fitted_level(accept_length, positions, range(texts), rough)
    ways: dict[str, Callable[[Text, Outcome], None]] = {
        f"chain {n}": lambda text, outcome, n=n: fixed_chain(text, n, outcome) for n in CHAINS
    }
    ways["chain auto"] = lambda text, outcome: automatic_chain(text, cost, outcome)
    for n in TREES:
        ways[f"tree {n}"] = lambda text, outcome, n=n: trees(text, n, None, outcome)
    ways["tree auto"] = lambda text, outcome: trees(text, WIDEST, cost, outcome)
    outcomes = {name: Outcome() for name in ways}
    for seed in range(texts):
        text = simulated_draft.simulate(level, positions, seed, rough)
        for name, way in ways.items():
            way(text, outcomes[name])
        progress(f"text {seed + 1} of {texts}")
    return level, outcomes


def tiny_pair(cost: CostTable, limit: int, progress: Callable[[str], None]) -> dict[str, Outcome]:
    """The bundled pair's first problems, greedy, on the reference backend; what is learnt is carried on."""
    pair = Pair(PairOptions(None, None, False, "reference", "bf16", BLOCK))
    problems = read_problems(tiny.problems_path(), limit)
    prompts = [pair.text.encode(problem.question, raw=False) for problem in problems]
    longest = 256
    backend = pair.backend(max(map(len, prompts)) + WIDEST, longest)
    plans = {f"chain {n}": (n, RowPlan()) for n in (4, 6, 8, 12, 16)}
    plans["chain auto"] = (WIDEST, RowPlan(cost=cost))
    plans |= {f"tree {n}": (BLOCK, RowPlan(nodes=n)) for n in (8, 12, 16)}
    plans["tree auto"] = (BLOCK, RowPlan(nodes=WIDEST, cost=cost))
    outcomes = {}
    for name, (width, plan) in plans.items():
        outcome = outcomes[name] = Outcome()
        state: State | None = None
        for prompt in prompts:
            generation = generate(
                backend, prompt, SamplingParams(), width=width, max_new_tokens=longest,
                stop_ids=pair.config.eos_token_ids, plan=RowPlan(plan.nodes, plan.cost, state),
            )  # fmt: skip
            for _ in generation:
                pass
            state = generation.calibration if plan.learns else None
            outcome.tokens += generation.stats.completion_tokens - 1
            outcome.rows.update(generation.stats.rows_per_step)
        progress(name)
    return outcomes


def ratios(outcomes: Mapping[str, Outcome], cost: CostTable, plain_ms: float) -> dict[str, float]:
    """ms per token of the automatic width over that of the best fixed one, for chains and trees."""
    found = {}
    for kind in ("chain", "tree"):
        ms = {name: o.ms_per_token(cost, plain_ms) for name, o in outcomes.items() if name.startswith(kind)}
        automatic = ms.pop(f"{kind} auto")
        found[kind] = automatic / min(ms.values())
    return found


def report(console: Console, profiles: Mapping[str, Mapping[str, Outcome]], cost: CostTable, plain_ms: float) -> None:
    """The table: tokens a step, rows a step, ms per token."""
    table = Table("rows", *profiles, box=None, pad_edge=False)
    for name in SHOWN:
        cells = []
        for outcomes in profiles.values():
            o = outcomes[name]
            cells.append(f"{o.accept_length:.2f} / {o.mean_rows():.1f} / {o.ms_per_token(cost, plain_ms):.3f}")
        table.add_row(name, *cells)
    for kind in ("chain", "tree"):
        best = []
        for outcomes in profiles.values():
            ms = {n: o.ms_per_token(cost, plain_ms) for n, o in outcomes.items() if n.startswith(kind) and n[-1] != "o"}
            name = min(ms, key=lambda n: ms[n])
            best.append(f"{name}: {ms[name]:.3f}, auto / best {ratios(outcomes, cost, plain_ms)[kind]:.3f}")
        table.add_row(f"best fixed {kind}", *best)
    console.print("tokens a step / rows a step / ms per token")
    console.print(table)


def draw(path: Path, profiles: Mapping[str, Mapping[str, Outcome]], cost: CostTable, plain_ms: float) -> None:
    """ms per token against rows: fixed chains and trees as lines, the automatic ones as points at their mean rows."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "width profiles"
    from matplotlib import pyplot

    columns = -(-len(profiles) // 2)
    figure, grid = pyplot.subplots(2, columns, figsize=(3 * columns, 6), constrained_layout=True)
    axes = grid.flatten()
    for axis in axes[len(profiles) :]:
        axis.set_axis_off()
    for axis, (title, outcomes) in zip(axes, profiles.items(), strict=False):
        for kind, colour in (("chain", "tab:blue"), ("tree", "tab:orange")):
            fixed = sorted((int(n.split()[1]), o) for n, o in outcomes.items() if n.startswith(kind) and n[-1] != "o")
            ms = [o.ms_per_token(cost, plain_ms) for _, o in fixed]
            axis.plot([n for n, _ in fixed], ms, "-o", color=colour, markersize=3, label=kind)
            automatic = outcomes[f"{kind} auto"]
            axis.plot(
                automatic.mean_rows(), automatic.ms_per_token(cost, plain_ms), "*", color=colour, markersize=13,
                markeredgecolor="black", label=f"{kind}, automatic",
            )  # fmt: skip
        axis.set_title(title, fontsize=9)
        axis.set_xlabel("rows a step (mean)")
        axis.set_ylim(bottom=0, top=5)
        axis.set_ylabel("ms per token, composed", fontsize=8)
    axes[0].legend(fontsize=8)
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--positions", type=int, default=1500, help="tokens of a simulated text")
    parser.add_argument("--texts", type=int, default=6, help="simulated texts of a profile; each learns from nothing")
    parser.add_argument("--problems", type=int, default=40, help="problems of the tiny pair")
    parser.add_argument("--plot", type=Path, help="draw to this file")
    parser.add_argument("--save", action="store_true", help="write the results and the named figures")
    options = parser.parse_args()
    console = Console(soft_wrap=True, width=200)
    points, plain_ms = composed_cost(results.results_directory())
    cost = interpolated(points, WIDEST)
    if options.save:
        results.check_writable()
    console.print("ms of a step:", {n: round(ms, 2) for n, ms in points.items()}, f"plain {plain_ms:.2f}")

    profiles: dict[str, dict[str, Outcome]] = {}
    levels = {}
    for rough in (False, True):
        for name, accept_length in PROFILES.items():
            title = f"{name}, rough draft" if rough else name
            levels[title], profiles[title] = simulated(
                accept_length, rough, cost, options.positions, options.texts,
                lambda done, title=title: console.print(f"{title}: {done}", style="dim"),
            )  # fmt: skip
    profiles["tiny pair"] = tiny_pair(cost, options.problems, lambda name: console.print(f"tiny pair: {name}"))
    report(console, profiles, cost, plain_ms)
    against = {title: ratios(outcomes, cost, plain_ms) for title, outcomes in profiles.items()}
    gains = {t: o["tree 8"].accept_length / o["chain 8"].accept_length for t, o in profiles.items()}
    console.print("auto / best fixed:", against)
    console.print("tree 8 / chain 8, tokens a step:", gains)
    if options.plot:
        draw(options.plot, profiles, cost, plain_ms)
    if options.save:
        figures = {
            "width.auto.ms_per_token_ratio_best_fixed": Figure.of(
                [ratio for by_kind in against.values() for ratio in by_kind.values()], "ratio"
            ),
            "tree.t8.accept_gain": Figure.of(list(gains.values()), "ratio"),
        }
        content: dict[str, Any] = {
            "options": {"positions": options.positions, "texts": options.texts, "problems": options.problems},
            "step_ms": points,
            "plain_step_ms": plain_ms,
            "levels": levels,
            "profiles": {
                title: {
                    name: {"tokens": o.tokens, "steps": o.steps, "rows": dict(sorted(o.rows.items())),
                           "ms_per_token": o.ms_per_token(cost, plain_ms)}
                    for name, o in outcomes.items()
                }
                for title, outcomes in profiles.items()
            },
            "auto_over_best_fixed": against,
        }  # fmt: skip
        program = ("python", "benchmark/width_profiles.py")
        console.print(results.save("width_profiles", results.environment(None, program), content, figures))


if __name__ == "__main__":
    main()
