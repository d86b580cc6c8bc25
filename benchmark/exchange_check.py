"""The exchange between GPUs of one host: equal bits on all ranks, its cost beside loop-back, and ranks that die.

    python benchmark/exchange_check.py --ranks 2 --rows 1,4,8,16 --replays 2000 --json out.json      # about 3 minutes
    python benchmark/exchange_check.py --ranks 2 --failures 4 --rows 8 --json out-failures.json

One process per GPU. Every rank has the heads and experts of one rank of `--share`; weights repeat from rank to rank, so
that any number of GPUs can stand for a larger model. Exposed cost of an exchange: a layer with peers minus the same
kernels in loop-back, over the four exchanges of a layer; with --points also each one alone (a macro of the kernels, see
csrc/layer/mailbox.cuh).
"""

import argparse
import hashlib
import json
import multiprocessing
import os
import random
import signal
import statistics
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import preflight
import rank_workers
import torch

from sgl_muse_mega import results
from sgl_muse_mega.config import TargetConfig
from sgl_muse_mega.errors import UserError
from sgl_muse_mega.megakernel.cuda import CudaMachine
from sgl_muse_mega.megakernel.instance import row_cap_of
from sgl_muse_mega.megakernel.machine import Machine
from sgl_muse_mega.megakernel.mailbox import LoopBack, Mail
from sgl_muse_mega.megakernel.peers import Group, PeerMemory, StoreGroup
from sgl_muse_mega.megakernel.place import Place
from sgl_muse_mega.megakernel.random_step import EXPERTS, HEADS, RandomStep, random_weights, spark_config
from sgl_muse_mega.results import Figure

EXCHANGES = 4  # of a layer
POINTS = {  # csrc/layer/points.cuh
    "o_proj, sum": "O_PROJ_MAIL_AT",
    "pre_expert_proj, gather": "PRE_PROJ_MAIL_AT",
    "experts, sum": "EXPERT_MAIL_AT",
    "post_expert_proj, gather": "POST_PROJ_MAIL_AT",
}
FIGURES = {"exchange.reduce_8192.us": "o_proj, sum", "exchange.reduce_4096.us": "experts, sum"}  # at T = 8
READY_SECONDS = 240.0  # that a rank may take to compile, make its weights and connect


def model(arguments: argparse.Namespace) -> tuple[TargetConfig, int]:
    """Muse Spark's sizes so that each of the ranks has what one of `share` has, and experts per rank."""
    local = EXPERTS // arguments.share
    heads = HEADS // arguments.share * arguments.ranks
    return spark_config(arguments.layers + 1, experts=local * arguments.ranks, heads=heads), local


class Chain:
    """Embedding and layers of one rank as a graph."""

    def __init__(self, arguments: argparse.Namespace, weights: Any, config: TargetConfig, machine: CudaMachine,
                 mail: Mail, rows: int) -> None:  # fmt: skip
        self.rows, self.machine = rows, machine
        self.case = RandomStep.create(
            config, weights, machine, row_cap=row_cap_of(rows), max_context=arguments.context, kv_dtype="fp8",
            mail=mail,
        )  # fmt: skip
        self.case.fill(arguments.context, arguments.seed)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.case.step.launch_embed(rows)
            for index in range(arguments.layers):
                self.case.step.launch_layer(index, rows)
        stream = self.case.step.activations.stream[:rows].view(torch.int32)
        self.expected, self.wrong = torch.zeros_like(stream), torch.zeros((), dtype=torch.int64, device=machine.device)
        self.check = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.check):
            self.wrong += (stream != self.expected).any()

    def replay_checked(self) -> None:
        """One replay, and a note on the device if its stream has other bits than `expected`."""
        self.graph.replay()
        self.check.replay()

    def expect_last(self) -> None:
        """From now on every replay is to give the bits of the last one."""
        self.machine.synchronize()
        self.expected.copy_(self.case.step.activations.stream[: self.rows].view(torch.int32))
        self.wrong.zero_()

    def digest(self) -> bytes:
        """Bits of the stream after the chain."""
        self.machine.synchronize()
        stream = self.case.step.activations.stream[: self.rows].cpu()
        return hashlib.sha256(stream.view(torch.uint8).numpy().tobytes()).digest()

    def us(self, replays: int) -> float:
        """Microseconds of one replay, over `replays` of them."""
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        self.graph.replay()
        start.record()
        for _ in range(replays):
            self.graph.replay()
        end.record()
        self.machine.synchronize()
        return float(start.elapsed_time(end)) * 1e3 / replays


def measure(machine: Machine, place: Place, arguments: argparse.Namespace, tell: rank_workers.Tell) -> None:
    """All rows of one rank: times in turn, and every replay's bits, with random pauses of the host."""
    assert isinstance(machine, CudaMachine)
    group, mail = place.group, place.mail
    tell("gpu", torch.cuda.get_device_name(machine.device))
    config, local = model(arguments)
    weights = random_weights(
        config, arguments.seed, machine.device, first_expert=group.rank * local, local_experts=local,
        rank=group.rank, ranks=group.ranks,
    )  # fmt: skip
    pauses = random.Random(arguments.seed + group.rank)
    for rows in arguments.rows:
        alone = Chain(arguments, weights, config, machine, LoopBack(group.ranks, group.rank), rows)
        joined = Chain(arguments, weights, config, machine, mail, rows)
        times: dict[str, list[float]] = {"loop_back": [], "peers": []}
        for _ in range(arguments.turns):
            for name, chain in (("loop_back", alone), ("peers", joined)):
                group.gather(b"ready")
                times[name].append(chain.us(arguments.repeats) / arguments.layers)
        joined.graph.replay()
        joined.expect_last()
        begin = time.monotonic()
        for block in range(arguments.replays // 100):
            for _ in range(100):
                joined.replay_checked()
                if pauses.random() < 0.02:
                    time.sleep(pauses.random() * 1e-3)
            machine.synchronize()
            if block % 10 == 0:
                group.gather(b"block")
        seconds, wrong = time.monotonic() - begin, int(joined.wrong)
        everybody = set(group.gather(joined.digest()))
        case = {
            "rows": rows, "us": times, "replays": arguments.replays, "other_bits": wrong, "seconds": seconds,
            "equal": wrong == 0 and len(everybody) == 1,
        }  # fmt: skip
        if arguments.points:
            case["points"] = each_point(group, mail, machine, arguments, weights, config, alone)
        tell("case", case)


def each_point(
    group: Group, mail: Mail, machine: CudaMachine, arguments: argparse.Namespace, weights: Any,
    config: TargetConfig, alone: Chain,
) -> dict[str, list[float]]:  # fmt: skip
    """us of a layer in which one exchange point alone reaches the peers, less the layer in loop-back, in turns."""
    found: dict[str, list[float]] = {}
    for name, at in POINTS.items():
        defines = (*arguments.define, f"PEERS_ONLY={at}")
        other = CudaMachine(machine.device, deadline_seconds=arguments.deadline, defines=defines)
        joined = Chain(arguments, weights, config, other, mail, alone.rows)
        found[name] = []
        for _ in range(arguments.turns):
            us = []
            for chain in (alone, joined):
                group.gather(b"ready")
                us.append(chain.us(arguments.repeats) / arguments.layers)
            found[name].append(us[1] - us[0])
    return found


def fail(
    group: StoreGroup, mail: Mail, machine: CudaMachine, arguments: argparse.Namespace, answer: Connection
) -> dict[str, Any]:
    """Says "ready", replays until another rank is gone, and returns the sentence that this rank stops with."""
    config, local = model(arguments)
    weights = random_weights(
        config, arguments.seed, machine.device, first_expert=group.rank * local, local_experts=local,
        rank=group.rank, ranks=group.ranks,
    )  # fmt: skip
    chain = Chain(arguments, weights, config, machine, mail, arguments.rows[0])
    group.gather(b"ready")
    answer.send("ready")
    while True:
        for _ in range(50):
            chain.graph.replay()
        last = time.monotonic()
        try:
            machine.synchronize()
        except UserError as error:
            return {"rank": group.rank, "sentence": str(error), "seconds": time.monotonic() - last}


def work(rank: int, port: int, arguments: argparse.Namespace, answer: Connection) -> None:
    """The process of one rank of those that are killed."""
    try:
        torch.cuda.set_device(rank)
        machine = CudaMachine(f"cuda:{rank}", deadline_seconds=arguments.deadline, defines=arguments.define)
        group = StoreGroup(rank_workers.client(port), rank, arguments.ranks)
        from cuda.bindings import driver  # after torch has made the context

        peers = PeerMemory(group, driver)
        answer.send(fail(group, peers.mail(), machine, arguments, answer))
    except Exception as error:  # whatever it is, the run must hear of it
        answer.send({"rank": rank, "sentence": f"before a rank was gone: {error}"})
    os._exit(0)  # the context is lost


def start(arguments: argparse.Namespace, port: int) -> list[tuple[Any, Connection]]:
    spawn, workers = multiprocessing.get_context("spawn"), []
    for rank in range(arguments.ranks):
        here, there = spawn.Pipe()
        process = spawn.Process(target=work, args=(rank, port, arguments, there), daemon=True)
        process.start()
        there.close()
        workers.append((process, here))
    return workers


def costs(arguments: argparse.Namespace) -> dict[str, Any]:
    """Runs all ranks and prints a table; "failed" when a rank had a problem, rows are missing or bits differ."""
    told = rank_workers.run_on_gpus(
        measure, arguments, arguments.ranks, seconds=arguments.timeout, deadline=arguments.deadline,
        defines=arguments.define,
    )  # fmt: skip
    return table(told, arguments)


def table(told: rank_workers.Found, arguments: argparse.Namespace) -> dict[str, Any]:
    """Prints what all ranks have measured, and returns it."""
    gpus = [next(iter(said), None) for said in told.of("gpu")]
    answers: list[dict[str, Any]] = [
        {"rank": rank, "gpu": gpu, "cases": cases}
        for rank, (gpu, cases) in enumerate(zip(gpus, told.of("case"), strict=True))
    ]
    done = min(len(answer["cases"]) for answer in answers)
    print("rows  us/layer loop-back  with peers  exposed us per exchange  bits")
    failed = bool(told.problems) or done < len(arguments.rows)
    for index, rows in enumerate(arguments.rows[:done]):
        cases = [answer["cases"][index] for answer in answers]
        alone, joined = (max(statistics.median(c["us"][k]) for c in cases) for k in ("loop_back", "peers"))
        equal = all(c["equal"] for c in cases)
        failed = failed or not equal
        exposed = (joined - alone) / EXCHANGES
        bits = f"equal in {arguments.replays} replays" if equal else "DIFFER"
        print(f"{rows:4d}  {alone:18.1f}  {joined:10.1f}  {exposed:23.2f}  {bits}")
        for name in POINTS if arguments.points else ():
            slower = max((c["points"][name] for c in cases), key=statistics.median)
            spread = f"{min(slower):.2f} .. {max(slower):.2f}"
            print(f"      {name:26s} alone reaches the peers: {statistics.median(slower):.2f} us exposed ({spread})")
    if done < len(arguments.rows):
        print(f"not measured: {', '.join(map(str, arguments.rows[done:]))} rows")
    print("problems:", "; ".join(told.problems) or "none")
    return {"failed": failed, "ranks": answers, "problems": told.problems}


def failures(arguments: argparse.Namespace) -> dict[str, Any]:
    """Kills or stops the last rank at random moments; every other rank must say which one is missing."""
    runs, failed = [], False
    moments = random.Random(arguments.seed)
    for turn in range(arguments.failures):
        kill = signal.SIGKILL if turn % 2 == 0 else signal.SIGSTOP
        store = rank_workers.Store()
        workers = start(arguments, store.port)
        first = [answer(pipe, READY_SECONDS) for _, pipe in workers]
        if set(map(str, first)) != {"ready"}:
            stop(workers)
            print(f"{kill.name}: not all ranks began: {first}", flush=True)
            return {"failed": True, "runs": [*runs, {"signal": kill.name, "began": first}]}
        time.sleep(moments.random())
        os.kill(workers[-1][0].pid, kill)
        for process, pipe in workers[:-1]:
            said = answer(pipe, arguments.deadline * 4)
            good = f"of rank {arguments.ranks - 1} (" in said.get("sentence", "")
            failed = failed or not good
            runs.append({"signal": kill.name, **said})
            print(f"{kill.name}: {said.get('sentence') or said}", flush=True)
            process.join(10)
        stop(workers)
    return {"failed": failed, "runs": runs}


def answer(pipe: Connection, seconds: float) -> Any:
    """What a rank says within so many seconds."""
    try:
        return pipe.recv() if pipe.poll(seconds) else {"sentence": f"nothing within {seconds:.0f} s"}
    except EOFError:
        return {"sentence": "nothing, it ended"}


def stop(workers: list[tuple[Any, Connection]]) -> None:
    for process, _ in workers:
        process.kill()
        process.join(10)


def main(given: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--share", type=int, default=4, help="each rank has the sizes of one rank of so many")
    parser.add_argument("--rows", type=lambda text: [int(part) for part in text.split(",")], default=[1, 4, 8, 16])
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--repeats", type=int, default=40)
    parser.add_argument("--replays", type=int, default=2000, help="with random pauses of each rank's host")
    parser.add_argument("--points", action="store_true", help="the exposed cost of each exchange point as well")
    parser.add_argument("--save", action="store_true", help="write the results and, with --points, the named figures")
    parser.add_argument("--failures", type=int, default=0, help="instead: so many ranks to kill or stop")
    parser.add_argument(
        "--define", action="append", default=[], help="macro for the kernels; RANDOM_DELAYS=2000: ns, in all CTAs"
    )
    parser.add_argument("--deadline", type=float, default=5.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--timeout", type=float, default=540.0, help="seconds of the ranks, which keep what they had")
    arguments = parser.parse_args(given)
    preflight.need_ranks(arguments.ranks)
    preflight.need_room_for(arguments.json, arguments.save)
    preflight.need_gpus(arguments.ranks)
    found = failures(arguments) if arguments.failures else costs(arguments)
    chosen = {name: value for name, value in vars(arguments).items() if name != "json"}
    environment = results.environment(torch.cuda.get_device_name(0), ("python", "benchmark/exchange_check.py"))
    content = {"options": chosen, **found}
    if arguments.json:
        arguments.json.write_text(json.dumps({"environment": environment, **content}, indent=1))
    if arguments.save:
        print(results.save("exchange", environment, content, named_figures(found) if arguments.ranks == 2 else {}))
    return int(found["failed"])


def named_figures(found: dict[str, Any]) -> dict[str, Figure]:
    """Of the slower rank at T = 8."""
    eights = [case["points"] for rank in found.get("ranks", ()) for case in rank["cases"] if case["rows"] == 8]
    if found["failed"] or not eights:
        return {}
    return {
        figure: Figure.of(max((points[name] for points in eights), key=statistics.median), "us")
        for figure, name in FIGURES.items()
    }


if __name__ == "__main__":
    sys.exit(preflight.guarded(main))
