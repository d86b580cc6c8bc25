"""The full-size model on four GPUs: 62 layers, 256 experts, a draft of the published size, random weights.

    python benchmark/full_size.py --ranks 4 --stock FOLDER --json full.json --save     # one call of ten minutes
    python benchmark/full_size.py --ranks 2 --layers 29 --json full-2.json             # as many layers as fit
    python benchmark/full_size.py --ranks 1 --layers 11 --json full-1.json
    python benchmark/full_size.py --dry-run --ranks 2                                  # tiny sizes on the emulator
    python benchmark/full_size_scaling.py full.json full-2.json full-1.json --plot full-size.svg

For every number of rows: the whole step and its parts, each alone in a graph; what the exchanges cost beside the
same kernels in loop-back; distinct experts; the share of the memory roof; tokens per second at several accept lengths.
At the end all ranks must have had the same bits for thousands of steps. Weights are made in place; memory is printed as
the model grows. Then stock SGLang runs with the same sizes, ranks and context (FOLDER as for stock_step.py), in
processes of its own: the two models do not fit beside each other. Its first and last layer have NVFP4 experts where
ours have BF16, so it reads less; the ratio errs on its side.

The run ends by itself after --timeout seconds and keeps what it had; ours ends --stock-seconds earlier if the rival is
wanted, which is left out when too little time is left. It has not run on hardware yet.
"""

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import preflight
import stock_step
import torch
from full_size_case import BEGIN_AGAIN, Case, Options, equal_bits, late
from full_size_model import EXPERTS, LAYERS, Model, Sizes, memory
from full_size_report import against_goal, against_stock, report
from rank_workers import Tell, run_on_emulator, run_on_gpus

from sgl_muse_mega import results
from sgl_muse_mega.commands.build import instances
from sgl_muse_mega.errors import UserError
from sgl_muse_mega.megakernel.build import build_all
from sgl_muse_mega.megakernel.decode_loop import DecodeLoop
from sgl_muse_mega.megakernel.instance import HOPPER_SMS, row_cap_of
from sgl_muse_mega.megakernel.machine import Machine
from sgl_muse_mega.megakernel.place import Place
from sgl_muse_mega.results import Figure

LAST_WORDS = 15.0  # seconds that a rank has for what it has begun, and for its end
STOCK_LEAST = 60.0  # seconds below which the rival is not even started
STOCK_ACCEPT_LENGTH, STOCK_TOKENS = 4.0, 256  # a step's time does not depend on it; fractions would add noise
SHOWN_LAYERS = 10  # memory is shown behind every so many layers


def work(machine: Machine, place: Place, options: Options, tell: Tell) -> None:
    """One rank."""
    start = time.monotonic()
    tell("gpu", torch.cuda.get_device_name(machine.device) if machine.device.type == "cuda" else None)
    model = Model.make(options.sizes, machine, place, options.seed, tell)
    tell("built", time.monotonic() - start)
    loops: dict[int, DecodeLoop] = {}
    for rows in options.rows:
        if late(place, options):
            return
        cap = row_cap_of(rows)
        if cap not in loops:
            loops[cap] = model.loop(machine, place, cap, options.context, (BEGIN_AGAIN + options.repeats + 8) * cap)
            memory(machine, tell, f"steps of up to {cap} rows")
        tell("case", Case(model, loops[cap], machine, place, options, rows).measure())
    tell("equal", equal_bits(next(iter(loops.values())), machine, place, options))


class Show:
    """What rank 0 tells, as it comes, behind the seconds since the beginning."""

    def __init__(self, start: float) -> None:
        self._start, self._layers = start, 0

    def __call__(self, kind: str, content: Any) -> None:
        if kind == "memory":
            if str(content["after"]).startswith("layer"):
                self._layers += 1
                if self._layers > 2 and self._layers % SHOWN_LAYERS:
                    return
            held, reserved, free = (content[name] for name in ("held", "reserved", "free"))
            self.say(f"after {content['after']}: {held:.1f} GB held, {reserved:.1f} reserved, {free:.1f} free")
        elif kind == "case":
            self.say(f"{content['rows']} rows: {statistics.median(content['step_us']) / 1e3:.3f} ms per step")
        elif kind == "built":
            self.say(f"model made in {content:.1f} s")
        elif kind == "equal":
            self.say(f"{content['steps']} steps compared")

    def say(self, text: str) -> None:
        print(f"[{time.monotonic() - self._start:5.0f} s] {text}", flush=True)


def compile_all(options: Options, ranks: int) -> None:
    """Compiles what the ranks will load, side by side, before they start."""
    target = options.sizes.target()
    wanted = instances(target, options.sizes.draft(target), sms=HOPPER_SMS, ranks=ranks, kv_dtypes=("fp8",))
    build_all(wanted.values())


def stock_arm(given: argparse.Namespace, sizes: Sizes, case: dict[str, Any] | None, left: float) -> dict[str, Any]:
    """The rival's step at the same sizes, or why there is none."""
    if left < STOCK_LEAST:
        return {"left_out": f"{left:.0f} s are left, which is not enough to start stock SGLang"}
    # Its weights take 9/10 of the memory; caches and graphs little.
    server = {"mem_fraction_static": 0.95}
    try:
        found = stock_step.run_stock(
            given.stock.resolve(), STOCK_ACCEPT_LENGTH, STOCK_TOKENS, True, left, ranks=given.ranks,
            shape=sizes.stock_shape(stock_step.WIDTH), context=given.context, server=server,
        )  # fmt: skip
    except RuntimeError as error:
        return {"left_out": str(error)}
    against_stock(case, found)
    return found


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--layers", type=int, default=LAYERS, help="at least 3")
    parser.add_argument("--experts", type=int, default=EXPERTS, help="of all ranks")
    parser.add_argument("--rows", type=lambda text: tuple(map(int, text.split(","))), default=(8, 1, 2, 4, 16))
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--steps", type=int, default=5000, help="at the end, whose bits are compared")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--timeout", type=float, default=570.0, help="seconds of the whole run")
    parser.add_argument("--stock", type=Path, help="folder of the rival's scripts and packages")
    parser.add_argument("--stock-seconds", type=float, default=240.0, help="of --timeout, kept for the rival")
    parser.add_argument("--dry-run", action="store_true", help="tiny sizes on the emulator; its times say nothing")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--save", action="store_true", help="write the results, and of the whole model full.t8.*")
    given = parser.parse_args(arguments)
    if given.layers < 3:
        parser.error("--layers must be at least 3: the first and the last have other experts than those between")
    return given


def check(given: argparse.Namespace) -> None:
    """Raises UserError for what would only be found out minutes later."""
    preflight.need_ranks(given.ranks)
    if not all(1 <= rows <= 16 for rows in given.rows):
        raise UserError(f"A step has 1 to 16 rows, {given.rows} were asked for; change --rows.")
    preflight.need_rival(given.stock, "run_engine.py")
    preflight.need_room_for(given.json, given.save)
    if not given.dry_run:
        preflight.need_gpus(given.ranks)


def main(arguments: list[str] | None = None) -> int:
    given = parse(arguments)
    check(given)
    start = time.monotonic()
    sizes = Sizes(3 if given.dry_run else given.layers, given.experts, tiny=given.dry_run)
    show, end = Show(start), start + given.timeout
    ours_end = end - given.stock_seconds if given.stock else end
    options = Options(
        sizes, given.rows, given.context, given.repeats, given.steps, given.seed, end=ours_end - LAST_WORDS
    )
    if given.dry_run:
        found = run_on_emulator(work, options, given.ranks, show=show)
    else:
        compile_all(options, given.ranks)
        show.say("compiled")
        found = run_on_gpus(work, options, given.ranks, seconds=ours_end - time.monotonic(), show=show)
    content = report(
        found, ranks=given.ranks, layers=sizes.layers, context=given.context, rows=given.rows, steps=given.steps
    )
    gpu = next((name for rank in found.of("gpu") for name in rank), None)
    environment = results.environment(gpu, ("python", "benchmark/full_size.py"))
    content["options"] = {name: str(v) if isinstance(v, Path) else v for name, v in vars(given).items()}
    content["sizes"] = {"ranks": given.ranks, "layers": sizes.layers, "experts": sizes.target().num_local_experts}
    whole = not given.dry_run and (given.ranks, given.layers, given.experts) == (4, LAYERS, EXPERTS)
    eight = next((case for case in content["cases"] if case["rows"] == stock_step.WIDTH), None)
    if eight and whole:
        print(against_goal(eight))

    def write() -> None:
        if given.json:
            given.json.write_text(json.dumps({"environment": environment, **content}, indent=1))

    write()  # whatever becomes of the rival
    if given.stock:
        show.say("stock SGLang starts")
        content["stock"] = stock_arm(given, sizes, eight, end - time.monotonic())
        for name in ("left_out", "problem"):
            if name in content["stock"]:
                print(f"stock, {name.replace('_', ' ')}: {content['stock'][name]}")
        write()
    if given.save and not given.dry_run:
        figures = named(eight, content) if whole and eight and not content["failed"] else {}
        print(results.save("full", environment, content, figures))
    show.say("end")
    return int(content["failed"])


def named(eight: dict[str, Any], content: dict[str, Any]) -> dict[str, Figure]:
    found = {"full.t8.ms": Figure.of([us / 1e3 for us in eight["step_us"]], "ms")}
    if "ratio" in content.get("stock", {}):
        found["full.t8.ratio_stock"] = Figure.of(content["stock"]["ratio"], "ratio")
    return found


if __name__ == "__main__":
    sys.exit(preflight.guarded(main))
