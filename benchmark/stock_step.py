"""Our decode step beside stock SGLang's, at the same shapes and accept length, in turns on the same GPU.

    python benchmark/stock_step.py --stock FOLDER --json stock.json --save

14 layers of one rank of four (64 experts top-2 on stock's side, which is the rank's work), the whole draft, whole
heads, width 8. FOLDER holds what runs the rival: `device.sh` with the environment (it unpacks site.tar.xz, and
cache.tar.xz with what was compiled before; it defines `save_cache FILE`), `make_models.py OUT LAYERS EXPERTS TOPK
QHEADS KVHEADS WIDTH` and `run_engine.py`, which prints "... -> X ms per step" for every repeat. Both sides run in
processes of their own, one after the other: each takes most of the GPU's memory.

Stock's attention kernels are slow here, so the ratio is given a second time without their time. That profile also holds
the attention of one prefill, so the second ratio errs on stock's side.
"""

import argparse
import json
import os
import re
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import preflight

LAYERS, RANK_OF, WIDTH, CONTEXT, PROFILED_TOKENS = 14, 4, 8, 1024, 48
STEP = re.compile(r"^rep \d+ .*-> ([\d.]+) ms per step", re.MULTILINE)
KERNEL = re.compile(r"^PROF\s+([\d.]+) us\s+(\d+) x\s+[\d.]+ us\s+(.*)$", re.MULTILINE)
ATTENTION = ("_fwd_kernel", "_fwd_grouped_kernel_stage1", "_fwd_kernel_stage2")


def ours(repeats: int) -> dict[str, Any]:
    """us of our steps and between them; runs in a process of its own."""
    from sgl_muse_mega.commands import bench_step
    from sgl_muse_mega.megakernel.cuda import CudaMachine

    options = bench_step.Options(
        layers=LAYERS, rank_of=RANK_OF, width=WIDTH, context=CONTEXT, accept_length=1.0, temperature=0.0, top_p=1.0,
        repeats=repeats, seed=1, save=False,
    )  # fmt: skip
    machine = CudaMachine()
    loop = bench_step.build(options, machine)
    steps, gaps = bench_step.measure_steps(loop, options)
    machine.synchronize()
    return {"step_us": steps, "gap_us": gaps}


def run_ours(repeats: int, timeout: float) -> dict[str, Any]:
    output = call([sys.executable, __file__, "--ours", "--repeats", str(repeats)], None, timeout)
    found: dict[str, Any] = json.loads(output.strip().splitlines()[-1])
    found["ms"] = (statistics.median(found["step_us"]) + statistics.median(found["gap_us"])) / 1e3
    return found


def stock_shape(layers: int, ranks: int) -> str:
    """Arguments of make_models.py: the rival's model on `ranks` GPUs that does the work of so many of four ranks."""
    return f"{layers} {64 * ranks} {2 * ranks} {32 * ranks} {4 * ranks} {WIDTH}"


def run_stock(
    folder: Path, accept_length: float, tokens: int, profile: bool, timeout: float, *, ranks: int = 1,
    shape: str = stock_shape(LAYERS, 1), context: int = CONTEXT, server: Mapping[str, Any] = MappingProxyType({}),
) -> dict[str, Any]:  # fmt: skip
    """ms per step of every repeat; with a profile, also ms of the attention kernels per step.

    server: arguments of the rival's engine beside those of run_engine.py. A run that fails or is ended after its
    repeats keeps them, and says under "problem" what happened. Raises RuntimeError without any.
    """
    engine = f"python3 run_engine.py --dir /tmp/stock_step --spec 1 --new {tokens} --prompt {context} --width {WIDTH}"
    engine += f" --acc {accept_length} --tp {ranks} --extra {shlex.quote(json.dumps(dict(server)))}"
    with tempfile.TemporaryDirectory() as traces:
        if profile:
            engine += f" --profile {shlex.quote(traces)}"
        script = f"python3 make_models.py /tmp/stock_step {shape} && {engine}"
        try:
            output, problem = call_stock(script, folder, timeout), {}
        except CallError as error:
            if not STEP.search(error.output):
                raise
            output, problem = error.output, {"problem": str(error)}
    return {"tail": output[-4000:], **problem, **parse_stock(output, accept_length)}


def parse_stock(output: str, accept_length: float) -> dict[str, Any]:
    """The numbers in what the rival printed."""
    found: dict[str, Any] = {"ms": step_ms(output)}
    kernels = [(float(us), int(count), name) for us, count, name in KERNEL.findall(output)]
    if kernels:
        found["kernels"] = kernels
        attention = sum(us for us, _, name in kernels if name.strip() in ATTENTION)
        found["attention_ms"] = attention / (PROFILED_TOKENS / accept_length) / 1e3
    return found


def step_ms(output: str) -> list[float]:
    """ms per step of every repeat that the rival printed. Raises RuntimeError when there is none."""
    steps = [float(ms) for ms in STEP.findall(output)]
    if not steps:
        raise RuntimeError(f"Stock SGLang printed no step time:\n{output[-3000:]}")
    return steps


class CallError(RuntimeError):
    """A command that failed or took too long; output: what it printed."""

    def __init__(self, what: str, output: str) -> None:
        super().__init__(f"{what}:\n{output[-3000:]}")
        self.output = output


def call(command: list[str], folder: Path | None, timeout: float, environment: dict[str, str] | None = None) -> str:
    """Output of a command; with it end the processes it started."""
    process = subprocess.Popen(
        command, cwd=folder, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        start_new_session=True,
    )  # fmt: skip
    try:
        output, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        raise CallError(f"{shlex.join(command)} took more than {timeout:.0f} s", output) from None
    if process.returncode != 0:
        raise CallError(f"{shlex.join(command)} failed", output)
    return output


def call_stock(script: str, folder: Path, timeout: float) -> str:
    """Output of a script in the rival's folder and environment."""
    environment = {**os.environ, "STOCK_DIR": str(folder)}
    environment.pop("PYTHONPATH", None)
    return call(["bash", "-c", f". ./device.sh && {script}"], folder, timeout, environment)


def summary(rounds: list[dict[str, Any]], attention_ms: float) -> dict[str, list[float]]:
    """Ratios stock / ours: every repeat of stock against our median of the same round."""
    plain = [ms / r["ours"]["ms"] for r in rounds for ms in r["stock"]["ms"]]
    without = [(ms - attention_ms) / r["ours"]["ms"] for r in rounds for ms in r["stock"]["ms"]]
    return {"ratio": plain, "ratio_without_attention": without}


def main(given: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stock", type=Path, help="folder of the rival's scripts and packages")
    parser.add_argument("--rounds", type=int, default=2, help="ours, stock, ours, stock, ...")
    parser.add_argument("--repeats", type=int, default=50, help="our steps of a round")
    parser.add_argument("--accept-length", type=float, default=4.0)
    parser.add_argument("--tokens", type=int, default=256, help="stock's of a repeat")
    parser.add_argument("--timeout", type=float, default=400.0, help="seconds of one process")
    parser.add_argument("--keep-cache", type=Path, help="file for what stock compiled, to be its next cache.tar.xz")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--save", action="store_true", help="write the results and the figure step.w8.ratio_stock")
    parser.add_argument("--ours", action="store_true", help="only our steps, as one line of JSON")
    arguments = parser.parse_args(given)
    if arguments.ours:
        print(json.dumps(ours(arguments.repeats)))
        return 0
    if arguments.stock is None:
        parser.error("--stock is needed")
    preflight.need_rival(arguments.stock, "run_engine.py")
    preflight.need_room_for(arguments.json, arguments.save)
    preflight.need_gpus(1)
    stock, accept_length = arguments.stock.resolve(), arguments.accept_length
    rounds: list[dict[str, Any]] = []
    for number in range(arguments.rounds):
        last = number + 1 == arguments.rounds
        try:
            mine = run_ours(arguments.repeats, arguments.timeout)
            rival = run_stock(stock, accept_length, arguments.tokens, last, arguments.timeout)
        except RuntimeError as error:
            print(f"error: round {number + 1}: {error}", file=sys.stderr)
            if arguments.json:  # the rounds before
                arguments.json.write_text(json.dumps({"problem": str(error), "rounds": rounds}))
            return 1
        rounds.append({"ours": mine, "stock": rival})
        print(f"round {number + 1}: ours {mine['ms']:.3f} ms, stock {', '.join(map(str, rival['ms']))} ms", flush=True)
    attention_ms = rounds[-1]["stock"].get("attention_ms", 0.0)
    ratios = summary(rounds, attention_ms)
    record = {
        "shape": stock_shape(LAYERS, 1),
        "context": CONTEXT,
        "accept_length": accept_length,
        "rounds": rounds,
        **ratios,
    }
    report(record, attention_ms, arguments)
    if arguments.keep_cache:
        target = shlex.quote(str(arguments.keep_cache.resolve()))
        call(["bash", "-c", f". ./device.sh && save_cache {target}"], stock, arguments.timeout)
    return 0


def report(record: dict[str, Any], attention_ms: float, arguments: argparse.Namespace) -> None:
    import torch

    from sgl_muse_mega import results
    from sgl_muse_mega.results import Figure

    environment = results.environment(torch.cuda.get_device_name(), ("python", "benchmark/stock_step.py"))
    if arguments.json:
        arguments.json.write_text(json.dumps({"environment": environment, **record}))
    if arguments.save:
        figure = Figure.of(record["ratio"], "ratio")
        print(results.save("stock_step", environment, record, {"step.w8.ratio_stock": figure}))
    rounds = record["rounds"]
    pairs = [pair for r in rounds for pair in zip(r["ours"]["step_us"], r["ours"]["gap_us"], strict=False)]
    mine = [(step + gap) / 1e3 for step, gap in pairs]
    for name, values in (
        ("ours, ms per step", mine),
        ("stock, ms per step", [ms for r in rounds for ms in r["stock"]["ms"]]),
        ("stock / ours", record["ratio"]),
        ("stock without attention / ours", record["ratio_without_attention"]),
        ("ours, tokens per second", [record["accept_length"] / ms * 1e3 for ms in mine]),
    ):
        print(f"{name:<32}{statistics.median(values):9.3f} ({min(values):.3f}..{max(values):.3f}), n {len(values)}")
    print(f"stock's attention kernels: {attention_ms:.3f} ms per step, accept length {record['accept_length']}")


if __name__ == "__main__":
    sys.exit(preflight.guarded(main))
