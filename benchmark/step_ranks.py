"""Whole decode steps over several GPUs: text against one GPU, equal bits, and a step's time beside stock SGLang's.

    python benchmark/step_ranks.py --ranks 2 --problems 200 --json ranks.json                     # about 4 minutes
    python benchmark/step_ranks.py --ranks 2 --stock FOLDER --json ranks-stock.json --save        # 14 layers, TP2
    python benchmark/step_ranks.py --dry-run --ranks 2                                            # the emulator

Text: the bundled pair on all GPUs and on GPU 0 alone, greedy and sampled. All ranks must report the same; greedy text
is that of one GPU but for near ties of the logits, since sums over ranks have other roundings: where a text differs,
the gap of the logits at its first other token is shown. Time: 14 layers of Muse Spark's sizes with their draft, split
over the ranks, width 8; FOLDER as for stock_step.py.
"""

import argparse
import json
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import preflight
import stock_step
import torch
from full_size_case import begin
from full_size_model import Model, Sizes
from rank_workers import Found, Tell, run_on_emulator, run_on_gpus

from sgl_muse_mega import results
from sgl_muse_mega.checkpoint import tiny
from sgl_muse_mega.checkpoint.draft import load_draft
from sgl_muse_mega.checkpoint.target import load_target
from sgl_muse_mega.commands.build import instances
from sgl_muse_mega.commands.problems import read_problems
from sgl_muse_mega.commands.step_times import WARM_UP, timed_steps
from sgl_muse_mega.commands.text import Text
from sgl_muse_mega.config import load_draft_config, load_target_config
from sgl_muse_mega.megakernel.build import build_all
from sgl_muse_mega.megakernel.decode_backend import decode_backend
from sgl_muse_mega.megakernel.decode_loop import DecodeLoop
from sgl_muse_mega.megakernel.instance import HOPPER_SMS
from sgl_muse_mega.megakernel.machine import Machine
from sgl_muse_mega.megakernel.place import Place
from sgl_muse_mega.results import Figure
from sgl_muse_mega.speculative.generate import generate
from sgl_muse_mega.speculative.sampling import SamplingParams

WIDTH, CONTEXT, NEAR_TIE = 8, 1024, 0.02
SAMPLED = {"temperature": 0.9, "top_p": 0.95, "top_k": 100}


@dataclass(frozen=True, slots=True)
class Options:
    problems: int
    new_tokens: int
    layers: int  # of the timed model; 0: no times
    repeats: int
    seed: int
    tiny: bool  # for the emulator


def work(machine: Machine, place: Place, options: Options, tell: Tell) -> None:
    """One rank: texts of the bundled pair, then times of the large one."""
    if options.problems:
        texts(machine, place, options, tell)
    if options.layers:
        times(machine, place, options, tell)


def texts(machine: Machine, place: Place, options: Options, tell: Tell) -> None:
    config, draft_config = load_target_config(tiny.target_directory()), load_draft_config(tiny.draft_directory())
    draft_weights, encode = load_draft(tiny.draft_directory(), draft_config), Text(tiny.target_directory()).encode

    def loop(place: Place | None) -> DecodeLoop:
        rank, ranks = (place.rank, place.ranks) if place else (0, 1)
        weights = load_target(tiny.target_directory(), config, rank=rank, ranks=ranks)
        return decode_backend(
            config, weights, draft_config, draft_weights, machine=machine, width=WIDTH, max_context=CONTEXT, place=place
        )

    joined = loop(place)
    alone = (
        loop(None) if place.rank == 0 and not options.tiny else None
    )  # the emulator's ranks run together or not at all
    for problem in read_problems(tiny.problems_path(), options.problems):
        ids = encode(problem.question, raw=False)
        for name, params in (("greedy", SamplingParams()), ("sampled", SamplingParams(**SAMPLED, seed=problem.line))):
            ours, steps = text(joined, ids, params, options.new_tokens, config.eos_token_ids)
            tell("steps", (problem.line, name, steps))
            if alone is None:
                continue
            one, _ = text(alone, ids, params, options.new_tokens, config.eos_token_ids)
            row: dict[str, Any] = {"line": problem.line, "kind": name, "same": one == ours, "tokens": len(ours)}
            tell("text", row if one == ours else row | first_difference(alone, ids, one, ours))


Steps = list[tuple[tuple[int, ...], int]]


def text(
    loop: DecodeLoop, ids: list[int], params: SamplingParams, new_tokens: int, stops: tuple[int, ...]
) -> tuple[list[int], Steps]:
    """A text, and the tokens and kept drafts of its steps."""
    made = generate(loop, ids, params, width=WIDTH, max_new_tokens=new_tokens, stop_ids=stops)
    steps = [(step.tokens, step.accepted) for step in made]
    return made.tokens, steps


def first_difference(alone: DecodeLoop, ids: list[int], one: list[int], ours: list[int]) -> dict[str, Any]:
    """Where two texts part, and how far apart one GPU's logits of both tokens are there."""
    common = next((i for i, (a, b) in enumerate(zip(one, ours, strict=False)) if a != b), min(len(one), len(ours)))
    found: dict[str, Any] = {"at": common}
    if common < min(len(one), len(ours)):
        logits = alone.prefill([*ids, *one[:common]])
        found["gap"] = float(logits[one[common]] - logits[ours[common]])
    return found


def sizes(options: Options, ranks: int) -> Sizes:
    """Every rank does the work of one of four."""
    return Sizes(options.layers, 64 * ranks, 32 * ranks, 2 * ranks, options.tiny)


def times(machine: Machine, place: Place, options: Options, tell: Tell) -> None:
    """us of whole steps, and us between them."""
    model = Model.make(sizes(options, place.ranks), machine, place, options.seed, tell)
    context = 32 if options.tiny else CONTEXT
    loop = model.loop(machine, place, WIDTH, context, (options.repeats + 8) * 4 * WIDTH)
    begin(loop, context, WIDTH)
    place.meet()
    if machine.device.type != "cuda":
        for _ in range(options.repeats):
            loop.next_step()
        tell("times", {"step_us": [0.0], "gap_us": [0.0]})
        return
    steps, gaps = timed_steps(loop, options.repeats + WARM_UP)
    tell("times", {"step_us": steps, "gap_us": gaps})


def judge_texts(found: Found) -> dict[str, Any]:
    """What the texts show; "failed" when ranks differ, or when a greedy text differs where no near tie excuses it."""
    everybody = found.of("steps")
    equal = all(rank == everybody[0] for rank in everybody)
    rows = [row for rank in found.of("text") for row in rank]
    summary: dict[str, Any] = {"ranks_equal": equal, "rows": rows, "failed": not equal or not everybody[0]}
    for kind in ("greedy", "sampled"):
        of_kind = [row for row in rows if row["kind"] == kind]
        same, tokens = sum(row["same"] for row in of_kind), sum(row["tokens"] for row in of_kind)
        others = [row for row in of_kind if not row["same"]]
        print(f"{kind}: {same} of {len(of_kind)} texts as on one GPU, {tokens} tokens")
        for row in others[:5]:
            print(f"  problem {row['line']} from token {row['at']}, gap of logits {row.get('gap')}")
        if kind == "greedy":
            summary["failed"] |= any(not abs(row.get("gap", float("inf"))) < NEAR_TIE for row in others)
    print(f"all ranks report the same steps: {'yes' if equal else 'NO'} ({len(everybody[0])} texts)")
    return summary


def judge_times(found: Found, arguments: argparse.Namespace) -> dict[str, Any]:
    """The slowest rank's step."""
    ours = max((t for rank in found.of("times") for t in rank), key=lambda t: statistics.median(t["step_us"]))
    ms = (statistics.median(ours["step_us"]) + statistics.median(ours["gap_us"])) / 1e3
    print(f"{arguments.layers} layers, {arguments.ranks} ranks, width {WIDTH}: {ms:.3f} ms per step")
    return {**ours, "ms": ms}


def beside_stock(ms: float, arguments: argparse.Namespace, left: float) -> dict[str, Any]:
    """Stock SGLang's step in the same run and its ratios to ours of `ms`; or why there is none."""
    try:
        rival = stock_step.run_stock(
            arguments.stock.resolve(), arguments.accept_length, 256, True, left, ranks=arguments.ranks,
            shape=stock_step.stock_shape(arguments.layers, arguments.ranks),
        )  # fmt: skip
    except RuntimeError as error:
        print(f"stock, left out: {error}")
        return {"stock": {"left_out": str(error)}}
    ratios = [stock / ms for stock in rival["ms"]]
    print(f"stock: {', '.join(f'{each:.3f}' for each in rival['ms'])} ms per step, {ratios[0]:.3f} times ours")
    return {"stock": rival, "ratio": ratios}


def compile_all(options: Options, ranks: int) -> None:
    """Compiles what the ranks will load, side by side."""
    wanted: dict[str, Any] = {}
    pair = load_target_config(tiny.target_directory()), load_draft_config(tiny.draft_directory())
    for each in {1, ranks} if options.problems else set():
        found = instances(*pair, sms=HOPPER_SMS, ranks=each, kv_dtypes=("bf16",))
        wanted |= {f"{each} {name}": i for name, i in found.items() if name.endswith(" 8")}
    if options.layers:
        large = sizes(options, ranks)
        target = large.target()
        found = instances(target, large.draft(target), sms=HOPPER_SMS, ranks=ranks, kv_dtypes=("fp8",))
        wanted |= {f"large {name}": i for name, i in found.items() if name.endswith(" 8")}
    build_all(wanted.values())


def main(given: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--problems", type=int, default=200, help="texts, each greedy and sampled; 0: none")
    parser.add_argument("--new-tokens", type=int, default=512)
    parser.add_argument("--layers", type=int, default=14, help="of the timed model; 0: none")
    parser.add_argument("--repeats", type=int, default=50)
    parser.add_argument("--stock", type=Path, help="folder of the rival's scripts and packages")
    parser.add_argument("--accept-length", type=float, default=4.0, help="of the rival")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--timeout", type=float, default=570.0, help="seconds of the whole run")
    parser.add_argument("--dry-run", action="store_true", help="tiny sizes on the emulator; its times say nothing")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--save", action="store_true", help="write the results and the figure tp2.w8.ratio_stock")
    arguments = parser.parse_args(given)
    preflight.need_ranks(arguments.ranks)
    preflight.need_rival(arguments.stock, "run_engine.py")
    preflight.need_room_for(arguments.json, arguments.save)
    if not arguments.dry_run:
        preflight.need_gpus(arguments.ranks)
    start = time.monotonic()
    layers = 3 if arguments.dry_run and arguments.layers else arguments.layers
    options = Options(
        arguments.problems, arguments.new_tokens, layers, arguments.repeats, arguments.seed, arguments.dry_run
    )
    if arguments.dry_run:
        found = run_on_emulator(work, options, arguments.ranks)
    else:
        compile_all(options, arguments.ranks)
        print(f"compiled in {time.monotonic() - start:.0f} s", flush=True)
        left = arguments.timeout - (time.monotonic() - start)
        found = run_on_gpus(work, options, arguments.ranks, seconds=left * (0.5 if arguments.stock else 1.0))
    content: dict[str, Any] = {"problems": found.problems, "failed": bool(found.problems)}
    if arguments.problems:
        content["texts"] = judge_texts(found)
        content["failed"] |= content["texts"]["failed"]
    if arguments.layers and all(found.of("times")):
        content["times"] = judge_times(found, arguments)
    print("problems:", "; ".join(found.problems) or "none")
    gpu = None if arguments.dry_run else torch.cuda.get_device_name(0)
    environment = results.environment(gpu, ("python", "benchmark/step_ranks.py"))
    content["options"] = {k: str(v) if isinstance(v, Path) else v for k, v in vars(arguments).items()}

    def write() -> None:
        if arguments.json:
            arguments.json.write_text(json.dumps({"environment": environment, **content}, indent=1))

    write()  # whatever becomes of the rival
    if arguments.stock and "times" in content:
        left = arguments.timeout - (time.monotonic() - start)
        content["times"] |= beside_stock(content["times"]["ms"], arguments, left)
        write()
    if arguments.save and not arguments.dry_run:
        ratio = content.get("times", {}).get("ratio")
        standard = (arguments.ranks, arguments.layers) == (2, 14) and ratio and not content["failed"]
        figures = {"tp2.w8.ratio_stock": Figure.of(ratio, "ratio")} if standard else {}
        print(results.save("step_ranks", environment, content, figures))
    return int(content["failed"])


if __name__ == "__main__":
    sys.exit(preflight.guarded(main))
