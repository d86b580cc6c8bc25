"""`sgl-muse-mega bench layer`: layers of one rank at full size against the memory roof, arms in turn."""

import json
import statistics
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from sgl_muse_mega import results
from sgl_muse_mega.commands.layer import traced
from sgl_muse_mega.commands.layer.measured import Case, of_roof
from sgl_muse_mega.commands.layer.session import ArmSpec, Session
from sgl_muse_mega.commands.roof import ROOF_GB_S
from sgl_muse_mega.errors import UserError
from sgl_muse_mega.megakernel.instance import row_cap_of
from sgl_muse_mega.results import Figure

BASE, CONTROL = "this", "control"


@dataclass(frozen=True, slots=True)
class Options:
    """variants: see `ArmSpec.parse`. Each arm takes `turns` turns of `repeats` replays per number of rows."""

    rows: tuple[int, ...]
    layers: int
    context: int
    bf16_experts: bool
    kv: str
    variants: tuple[str, ...]
    turns: int
    repeats: int
    draws: int
    seed: int
    check: bool
    dry_run: bool
    save: bool
    control: bool = False
    stock: Path | None = None  # what benchmark/stock_layer.py wrote
    trace: Path | None = None
    picture: Path | None = None
    ranks: int = 4
    trace_arm: str = BASE  # which arm `trace` and `picture` show

    def workload(self) -> dict[str, Any]:
        """What every arm is told (`arm.Workload`)."""
        return {
            "rows": list(self.rows), "layers": self.layers, "context": self.context, "nvfp4": not self.bf16_experts,
            "kv": self.kv, "draws": self.draws, "seed": self.seed,
            "emulated": self.dry_run, "ranks": self.ranks,
        }  # fmt: skip


def numbers(text: str) -> tuple[int, ...]:
    """ "1,4,8" -> (1, 4, 8). Raises UserError unless all are 1 to 16."""
    try:
        found = tuple(int(part) for part in text.split(","))
    except ValueError:
        found = (0,)
    if not all(1 <= rows <= 16 for rows in found):
        raise UserError(f"The kernels take 1 to 16 rows, {text!r} was asked; use numbers with commas, as in 1,4,8,16.")
    return found


def run(options: Options) -> int:
    """Measure, print, and save if asked; 1 when an arm failed or its outputs are wrong. Raises UserError when no arm
    can run."""
    if options.ranks not in (1, 2, 4, 8):
        raise UserError(f"A model is split over 1, 2, 4 or 8 ranks and {options.ranks} were asked for.")
    if options.save:
        results.check_writable()
    rival = read_stock(options.stock) if options.stock else {}
    console = Console(soft_wrap=True)
    specs = [ArmSpec(BASE), *([ArmSpec(CONTROL, tuning={"separate_phases": True})] if options.control else [])]
    specs += map(ArmSpec.parse, options.variants)
    chosen = next((spec for spec in specs if spec.name == options.trace_arm), None)
    if chosen is None:
        names = ", ".join(spec.name for spec in specs)
        raise UserError(f"There is no arm {options.trace_arm!r} to trace; name one of {names}.")
    phases: list[list[dict[str, Any]]] = []
    with ExitStack() as stack:
        session = stack.enter_context(Session(specs, options.workload()))
        tracer: Session | None = None
        if options.trace or options.picture:  # gets ready while the others do
            tracer = stack.enter_context(traced.session(chosen, options.workload(), traced_rows(options)))
        described = session.descriptions
        machine = next(iter(described.values()))
        console.print(headline(options, machine))
        before = check(session, options) if options.check else {}
        cases = measure(session, options)
        after = session.ask_all_rows("bits", options.rows) if options.check else {}
        failures = dict(session.failures)
        wrong = verdicts(console, options, before, after)
        for part in (table(cases, rival), ratios(cases)):
            if part:
                console.print(part)
        if tracer:
            shown, logged = traced.run(tracer, options.workload(), traced_rows(options), options.trace, options.picture)
            phases = [[asdict(phase) for phase in layer] for layer in logged]
            console.print(shown)
    for name, reason in failures.items():
        console.print(f"{name} failed: " + "\n".join(reason.splitlines()[:12]), style="red", markup=False)
    if options.save:
        asked = {f.name: plain(getattr(options, f.name)) for f in fields(options)}
        content = {"options": asked, "roof_gb_s": ROOF_GB_S, "arms": described, "checks": before,
                   "failures": failures, "phases": phases, "cases": [case.content() for case in cases]}  # fmt: skip
        named = {} if wrong else figures(options, cases) | attention_figure(options, phases)
        print(results.save("layer", results.environment(machine["gpu"]), content, named))
    return 1 if wrong or failures else 0


def plain(value: Any) -> Any:
    """As JSON has it."""
    return str(value) if isinstance(value, Path) else value


def traced_rows(options: Options) -> int:
    """8 rows if they are among those asked for, else the most."""
    return 8 if 8 in options.rows else max(options.rows)


def headline(options: Options, machine: dict[str, Any]) -> str:
    kind = "BF16" if options.bf16_experts else "NVFP4"
    return (
        f"{machine['gpu']}, chain of {options.layers} layers of {traced.share(options.ranks)}, {kind} experts, context "
        f"{options.context}, {options.kv} cache, {options.turns} turns of {options.repeats} replays, {options.draws} "
        f"draws of seed {options.seed}, roof {ROOF_GB_S:.0f} GB/s"
    )


def measure(session: Session, options: Options) -> list[Case]:
    """All arms in turn: A B A B."""
    cases: list[Case] = []
    for rows in options.rows:
        of_arm = {
            name: Case(name, rows, options.layers, **load) for name, load in session.ask("load", rows=rows).items()
        }
        for turn in range(options.turns):
            first = turn * options.repeats % options.draws
            for name, answer in session.ask("times", rows=rows, repeats=options.repeats, first_draw=first).items():
                of_arm[name].add(answer)
        cases += [case for name, case in of_arm.items() if name in session.names]
    return cases


def check(session: Session, options: Options) -> dict[str, Any]:
    """Bits of every arm; stages against the reference for the first arm, and for those with other bits."""
    found: dict[str, Any] = {"bits": session.ask_all_rows("bits", options.rows), "stages": {}}
    for cap in sorted({row_cap_of(rows) for rows in options.rows}):
        rows = max(r for r in options.rows if row_cap_of(r) == cap)
        digests = {name: bits["digest"] for name, bits in found["bits"][str(rows)].items()}
        seen: dict[str, str] = {}
        for name, digest in digests.items():
            if digest not in seen and name in session.names:
                seen[digest] = name
        only = set(seen.values())
        found["stages"][str(rows)] = session.ask("stages", only=only, rows=rows, layers=min(2, options.layers))
    return found


def verdicts(console: Console, options: Options, before: dict[str, Any], after: dict[str, Any]) -> bool:
    """One line per arm; whether any of its outputs is wrong."""
    if not before:
        return False
    any_wrong = False
    first = {rows: next(iter(arms.values()))["digest"] for rows, arms in before["bits"].items()}
    names = list(dict.fromkeys(name for arms in before["bits"].values() for name in arms))
    for name in names:
        of_rows = {rows: arms[name] for rows, arms in before["bits"].items() if name in arms}
        equal = [rows for rows, bits in of_rows.items() if bits["digest"] == first[rows]]
        problems = []
        if not all(bits["finite"] for bits in of_rows.values()):
            problems.append("outputs that are not finite")
        if not all(bits["row_alone"] for bits in of_rows.values()):
            problems.append("a row's bits depend on the other rows")
        again = {rows: arms[name]["digest"] for rows, arms in after.items() if name in arms}
        if any(again[rows] != of_rows[rows]["digest"] for rows in again):
            problems.append("other bits after the replays than before")
        stages = {rows: arms[name] for rows, arms in before["stages"].items() if name in arms}
        problems += [f"stage {stage} at {rows} rows" for rows, s in stages.items() for stage in s["failed"]]
        shown = f"bits of {names[0]}" if len(equal) == len(of_rows) else f"bits of {names[0]} at rows {equal or 'none'}"
        if stages:
            worst = min(stages.values(), key=lambda s: s["cosine"])
            shown += f", smallest cosine of {sum(s['compared'] for s in stages.values())} stages {worst['cosine']:.6f}"
        any_wrong = any_wrong or bool(problems)
        console.print(f"{name}: {shown}" + (f"; WRONG: {'; '.join(problems)}" if problems else ""))
    return any_wrong


def read_stock(path: Path) -> dict[int, float]:
    """Median us of stock SGLang's layer by rows. Raises UserError when the file is not stock_layer.py's."""
    try:
        ratios = json.loads(path.read_text())["ratios"]
        return {int(r["rows"]): statistics.median(r["stock_us"]) for r in ratios}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{path} is not what benchmark/stock_layer.py writes ({error!r}); give its --json file."
        ) from None


def table(cases: list[Case], stock_us: Mapping[int, float]) -> Table:
    """stock_us: of stock's layer by rows, from another run; may be empty."""
    beside = ("stock us", "stock / ours") if stock_us else ()
    shown = Table("rows", "arm", "us/layer (min..max)", "MB", "experts", "GB/s", "of roof", *beside, box=box.SIMPLE)
    for case in cases:
        us = case.us
        rival = stock_us.get(case.rows)
        cells = (f"{rival:.1f}", f"{rival / statistics.median(us):.2f}") if rival else ()
        shown.add_row(
            str(case.rows), case.arm, f"{statistics.median(us):.1f} ({min(us):.1f}..{max(us):.1f})",
            f"{case.megabytes:.0f}", f"{case.mean_experts:.1f}", f"{statistics.median(case.speeds):.0f}",
            f"{statistics.median(case.fractions):.3f}", *cells,
        )  # fmt: skip
    return shown


def ratios(cases: list[Case]) -> Table | None:
    """Every other arm against the first, turn by turn; None when there is no other."""
    shown = Table("rows", "arm", "times as fast as the first (min..max of turns)", box=box.SIMPLE)
    first: dict[int, Case] = {}
    for case in cases:
        base = first.setdefault(case.rows, case)
        if case is not base:
            found = case.ratios_to(base)
            spread = f"{statistics.median(found):.4f} ({min(found):.4f}..{max(found):.4f})"
            shown.add_row(str(case.rows), case.arm, spread)
    return shown if shown.row_count else None


def figures(options: Options, cases: list[Case]) -> dict[str, Figure]:
    """The named figures of the first arm; runs at another context, with a short chain or of another share have none."""
    if options.ranks != 4:
        return {}
    if options.dry_run or options.layers < 8 or options.context != 2048 or options.kv != "fp8":
        return {}
    own = {case.rows: case for case in cases if case.arm == BASE}
    if options.bf16_experts:
        return {"layer.bf16.t8.fraction": of_roof(own[8])} if 8 in own else {}
    found = {}
    for rows in {1, 4, 8, 16} & own.keys():
        found[f"layer.t{rows}.us"] = Figure.of(own[rows].us, "us")
        found[f"layer.t{rows}.fraction"] = of_roof(own[rows])
    for control in cases:
        if control.arm == CONTROL and control.rows == 8:
            found["layer.t8.ratio_pdl_control"] = Figure.of(own[8].ratios_to(control), "ratio")
    return found


def attention_figure(options: Options, phases: list[list[dict[str, Any]]]) -> dict[str, Figure]:
    """Cache bytes of the layers with full attention over the time until their last partial, traced, at 128k keys."""
    standard = (options.ranks, options.context, options.kv, options.trace_arm) == (4, 131072, "fp8", BASE)
    if options.dry_run or not phases or not standard or traced_rows(options) != 8:
        return {}
    attention = [phase for layer in phases for phase in layer if phase["name"] == "ATTENTION"]
    most = max(phase["bytes"] for phase in attention)
    full = [phase for phase in attention if phase["bytes"] == most]
    fractions = [most / (phase["last_end"] - phase["first_start"]) / ROOF_GB_S / 1e3 for phase in full]
    return {"attention.full_128k.fraction": Figure.of(fractions, "of the measured roof")}
