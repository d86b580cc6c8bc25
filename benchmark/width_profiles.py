"""Chains, trees and automatic widths on simulated acceptance profiles and the tiny pair: accept length, ms per token.

    python benchmark/width_profiles.py --plot docs/width-profiles.svg --save

No GPU. Steps are counted by running the rules themselves (`sgl_muse_mega.speculative`); their times are scaled from
whole steps of one H200 as one rank of four (`step_costs.py`). The profiles are those of `simulated_draft` at the accept
lengths of the published cards; the tiny pair runs on the reference backend, greedy. A quarter of an hour on one core;
after new costs `--earlier FILE` takes what does not depend on them from the results of a run before.
"""

import argparse
import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import simulated_draft
import torch
from rich.console import Console
from simulated_draft import Text
from step_costs import BLOCK, COST_FILES, STEP_FILE, WIDEST, Costs, measured_costs

from sgl_muse_mega import results
from sgl_muse_mega.checkpoint import tiny
from sgl_muse_mega.commands.pair import Pair, PairOptions
from sgl_muse_mega.commands.problems import read_problems
from sgl_muse_mega.errors import UserError
from sgl_muse_mega.results import Figure
from sgl_muse_mega.speculative.backend import DraftBlock
from sgl_muse_mega.speculative.calibration import State, default_prior, updated
from sgl_muse_mega.speculative.generate import generate
from sgl_muse_mega.speculative.rows import RowPlan
from sgl_muse_mega.speculative.sampling import SamplingParams
from sgl_muse_mega.speculative.tree import Tree, grow
from sgl_muse_mega.speculative.width import CostTable, chain_maxima, chain_rows, tree_rows

PROFILES = {"GSM8K": 5.37, "GPQA": 3.88, "AIME": 4.19}
CAPACITIES = (BLOCK, WIDEST)  # most rows of an automatic width
CHAINS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16)
TREES = (4, 6, 8, 10, 12, 14, 16)
SHOWN = (
    *("chain 4", "chain 8", "chain 16", "chain auto 8", "chain auto 16"),
    *("tree 8", "tree 16", "tree auto 8", "tree auto 16"),
)
RIVALS = {"chain auto 8": BLOCK, "chain auto 16": WIDEST, "tree auto 8": WIDEST, "tree auto 16": WIDEST}
"""The most rows of fixed widths of its kind that an automatic one is held against. A chain of more rows needs a draft
of larger blocks; a tree does not."""


@dataclass(slots=True)
class Outcome:
    """Steps of one way to choose rows, whose cost is that of its launches."""

    cost: CostTable
    tokens: int = 0
    rows: Counter[int] = field(default_factory=Counter)  # steps by rows

    @property
    def steps(self) -> int:
        return self.rows.total()

    @property
    def accept_length(self) -> float:
        return self.tokens / self.steps

    def mean_rows(self) -> float:
        return sum(n * steps for n, steps in self.rows.items()) / self.steps

    def ms_per_token(self) -> float:
        return sum(float(self.cost[n]) * steps for n, steps in self.rows.items()) / self.tokens

    def count(self, tokens: int, rows: int) -> None:
        self.tokens += tokens
        self.rows[rows] += 1


def fixed_chain(text: Text, width: int, outcome: Outcome) -> None:
    kept, at = text.kept(), 0
    while at < len(kept):
        tokens = int(min(kept[at], width - 1)) + 1
        outcome.count(tokens, width)
        at += tokens


def automatic_chain(text: Text, capacity: int, outcome: Outcome) -> None:
    kept, at, state, slots = text.kept(), 0, default_prior(), capacity - 1
    ids = torch.arange(simulated_draft.K).expand(slots, -1)
    while at < len(kept):
        block = DraftBlock(torch.from_numpy(text.chain[at, :slots]), ids, torch.empty(0))
        maxima = chain_maxima(block, torch.from_numpy(text.lattice[at, :slots]), 1.0)
        rows = chain_rows(state, maxima, outcome.cost)
        drafts = int(min(kept[at], rows - 1))
        turns = range(1, min(drafts + 2, rows))
        state = updated(state, [(slot, maxima[slot - 1], slot <= drafts) for slot in turns])
        outcome.count(drafts + 1, rows)
        at += drafts + 1


def trees(text: Text, nodes: int, outcome: Outcome, *, automatic: bool = False) -> None:
    at, state = 0, default_prior()
    ids = torch.arange(simulated_draft.K).expand(BLOCK - 1, -1)
    while at < len(text.truth):
        tree = grow(0, ids, torch.from_numpy(text.lattice[at, : BLOCK - 1]), state, nodes=nodes)
        if automatic:
            tree = tree.first(tree_rows(tree, outcome.cost))
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


@dataclass(frozen=True, slots=True)
class Earlier:
    """What does not depend on costs, from the results of a run of the same texts: levels and fixed widths' steps."""

    levels: Mapping[str, float] = field(default_factory=dict)
    profiles: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path, options: Mapping[str, int]) -> "Earlier":
        """Raises UserError when the run had other texts."""
        content = json.loads(path.read_text(encoding="utf-8"))
        if content["options"] != options:
            raise UserError(f"{path} is of a run of {content['options']}, this one is of {options}; make them equal.")
        return cls(content["levels"], content["profiles"])

    def fill(self, title: str, outcomes: Mapping[str, Outcome]) -> set[str]:
        """Enters the steps of fixed widths; names of those that are done."""
        found = {name: o for name, o in self.profiles.get(title, {}).items() if name in outcomes and "auto" not in name}
        for name, earlier in found.items():
            outcomes[name].tokens = earlier["tokens"]
            outcomes[name].rows.update({int(rows): steps for rows, steps in earlier["rows"].items()})
        return set(found)


def simulated(
    title: str, costs: Costs, positions: int, texts: int, earlier: Earlier, progress: Callable[[str], None]
) -> tuple[float, dict[str, Outcome]]:
    """The fitted level, and every way's steps through the texts."""
    name, _, rough = title.partition(", ")
    level = earlier.levels.get(title)
    if level is None:
        level = simulated_draft.fitted_level(PROFILES[name], positions, range(texts), bool(rough))
    ways: dict[str, Callable[[Text, Outcome], None]] = {
        f"chain {n}": lambda text, outcome, n=n: fixed_chain(text, n, outcome) for n in CHAINS
    }
    ways |= {f"tree {n}": lambda text, outcome, n=n: trees(text, n, outcome) for n in TREES}
    for n in CAPACITIES:
        ways[f"chain auto {n}"] = lambda text, outcome, n=n: automatic_chain(text, n, outcome)
        ways[f"tree auto {n}"] = lambda text, outcome, n=n: trees(text, n, outcome, automatic=True)
    outcomes = new_outcomes(ways, costs)
    done = earlier.fill(title, outcomes)
    for seed in range(texts):
        text = simulated_draft.simulate(level, positions, seed, bool(rough))
        for name in ways.keys() - done:
            ways[name](text, outcomes[name])
        progress(f"text {seed + 1} of {texts}")
    return level, outcomes


def new_outcomes(names: Iterable[str], costs: Costs) -> dict[str, Outcome]:
    """By name, with the costs of its launches."""
    chosen = {capacity: costs.of_chosen(capacity) for capacity in CAPACITIES}
    fixed = {"chain": costs.of_fixed(), "tree": costs.of_trees()}
    return {
        name: Outcome(chosen[int(name.split()[-1])] if "auto" in name else fixed[name.split()[0]]) for name in names
    }


def tiny_pair(costs: Costs, limit: int, earlier: Earlier, progress: Callable[[str], None]) -> dict[str, Outcome]:
    """The bundled pair's first problems, greedy, on the reference backend; what is learnt is carried on."""
    pair = Pair(PairOptions(None, None, False, "reference", "bf16", BLOCK))
    problems = read_problems(tiny.problems_path(), limit)
    prompts = [pair.text.encode(problem.question, raw=False) for problem in problems]
    longest = 256
    backend = pair.backend(max(map(len, prompts)) + WIDEST, longest)
    plans = {f"chain {n}": (n, RowPlan()) for n in (4, 6, 8, 12, 16)}
    plans |= {f"tree {n}": (BLOCK, RowPlan(nodes=n)) for n in (8, 12, 16)}
    for n in CAPACITIES:
        plans[f"chain auto {n}"] = (n, RowPlan(cost=costs.of_chosen(n)))
        plans[f"tree auto {n}"] = (BLOCK, RowPlan(nodes=n, cost=costs.of_chosen(n)))
    outcomes = new_outcomes(plans, costs)
    done = earlier.fill("tiny pair", outcomes)
    for name in [name for name in plans if name not in done]:
        (width, plan), outcome = plans[name], outcomes[name]
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
        progress(f"tiny pair: {name}")
    return outcomes


def fixed_ms(outcomes: Mapping[str, Outcome], kind: str, most: int = WIDEST) -> dict[int, float]:
    """ms per token of chains or trees of a fixed width up to `most`, by rows."""
    named = {name.split()[-1]: o for name, o in outcomes.items() if name.startswith(kind) and "auto" not in name}
    return {int(n): o.ms_per_token() for n, o in named.items() if int(n) <= most}


def ratios(outcomes: Mapping[str, Outcome]) -> dict[str, float]:
    """ms per token of every automatic width over that of the best fixed one of its kind."""
    rivals = {name: fixed_ms(outcomes, name.split()[0], most) for name, most in RIVALS.items()}
    return {name: outcomes[name].ms_per_token() / min(ms.values()) for name, ms in rivals.items()}


def report(console: Console, profiles: Mapping[str, Mapping[str, Outcome]]) -> None:
    """The table, in Markdown: tokens a step, rows a step, ms per token."""

    def best(outcomes: Mapping[str, Outcome], kind: str, most: int) -> str:
        ms = fixed_ms(outcomes, kind, most)
        rows = min(ms, key=lambda n: ms[n])
        return f"{rows}: {ms[rows]:.2f}"

    lines = [["rows", *profiles], ["---"] * (len(profiles) + 1)]
    for name in SHOWN:
        shown = [outcomes[name] for outcomes in profiles.values()]
        lines.append([name, *(f"{o.accept_length:.2f} / {o.mean_rows():.1f} / {o.ms_per_token():.2f}" for o in shown)])
    for kind, most in dict.fromkeys((name.split()[0], most) for name, most in RIVALS.items()):
        title = f"best fixed {kind} up to {most}: rows, ms"
        lines.append([title, *(best(outcomes, kind, most) for outcomes in profiles.values())])
    for name, most in RIVALS.items():
        title = f"{name} / best {name.split()[0]} up to {most}"
        lines.append([title, *(f"{ratios(outcomes)[name]:.3f}" for outcomes in profiles.values())])
    console.print("tokens a step / rows a step / ms per token")
    for cells in lines:
        console.print(f"| {' | '.join(cells)} |")


def draw(path: Path, profiles: Mapping[str, Mapping[str, Outcome]]) -> None:
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
            fixed = fixed_ms(outcomes, kind)
            axis.plot(list(fixed), list(fixed.values()), "-o", color=colour, markersize=3, label=kind)
            for capacity, marker, size in ((BLOCK, "*", 13), (WIDEST, "D", 6)):
                o = outcomes[f"{kind} auto {capacity}"]
                axis.plot(
                    o.mean_rows(), o.ms_per_token(), marker, color=colour, markersize=size, markeredgecolor="black",
                    linestyle="", label=f"{kind}, automatic up to {capacity}",
                )  # fmt: skip
        axis.set_title(title, fontsize=9)
        axis.set_xlabel("rows a step (mean)")
        axis.set_ylim(bottom=0, top=5)
        axis.set_ylabel("ms per token, scaled to 62 layers", fontsize=8)
    axes[0].legend(fontsize=7)
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--positions", type=int, default=1500, help="tokens of a simulated text")
    parser.add_argument("--texts", type=int, default=6, help="simulated texts of a profile; each learns from nothing")
    parser.add_argument("--problems", type=int, default=40, help="problems of the tiny pair")
    parser.add_argument("--earlier", type=Path, help="results of a run whose fixed widths are taken as they are")
    parser.add_argument("--plot", type=Path, help="draw to this file")
    parser.add_argument("--save", action="store_true", help="write the results and the named figures")
    options = parser.parse_args()
    console = Console(soft_wrap=True, width=200)
    costs = measured_costs(results.results_directory())
    if options.save:
        results.check_writable()
    for name, points in {"fixed": costs.fixed, **{f"up to {n}": ms for n, ms in costs.chosen.items()}}.items():
        console.print(f"ms of a step, {name}:", {n: round(ms, 2) for n, ms in points.items()})
    console.print(f"plain {costs.plain:.2f}")

    texts = {"positions": options.positions, "texts": options.texts, "problems": options.problems}
    earlier = Earlier.read(options.earlier, texts) if options.earlier else Earlier()
    profiles: dict[str, dict[str, Outcome]] = {}
    levels = {}
    for title in [*PROFILES, *(f"{name}, rough draft" for name in PROFILES)]:
        levels[title], profiles[title] = simulated(
            title, costs, options.positions, options.texts, earlier,
            lambda done, title=title: console.print(f"{title}: {done}", style="dim"),
        )  # fmt: skip
    profiles["tiny pair"] = tiny_pair(costs, options.problems, earlier, console.print)
    report(console, profiles)
    against = {title: ratios(outcomes) for title, outcomes in profiles.items()}
    gains = {t: o["tree 8"].accept_length / o["chain 8"].accept_length for t, o in profiles.items()}
    console.print("tree 8 / chain 8, tokens a step:", gains)
    if options.save:
        figures = {
            "width.auto.ms_per_token_ratio_best_fixed": Figure.of(
                [by_name[f"{kind} auto {BLOCK}"] for by_name in against.values() for kind in ("chain", "tree")], "ratio"
            ),
            "tree.t8.accept_gain": Figure.of(list(gains.values()), "ratio"),
        }
        content: dict[str, Any] = {
            "options": texts,
            "cost_files": {"parts": STEP_FILE, **COST_FILES},
            "step_ms": {"fixed": costs.fixed, "chosen": costs.chosen, "plain": costs.plain, "planning": costs.planning},
            "levels": levels,
            "profiles": {
                title: {
                    name: {"tokens": o.tokens, "steps": o.steps, "rows": dict(sorted(o.rows.items())),
                           "ms_per_token": o.ms_per_token()}
                    for name, o in outcomes.items()
                }
                for title, outcomes in profiles.items()
            },
            "auto_over_best_fixed": against,
        }  # fmt: skip
        program = ("python", "benchmark/width_profiles.py")
        console.print(results.save("width_profiles", results.environment(None, program), content, figures))
    if options.plot:  # last, for the results tell whether tracked files have changed
        draw(options.plot, profiles)


if __name__ == "__main__":
    main()
