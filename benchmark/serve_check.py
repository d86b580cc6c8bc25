"""Stock SGLang beside SGLang with the plugin, on one H200.

    python benchmark/serve_check.py --stock FOLDER --parts text --json text.json
    python benchmark/serve_check.py --stock FOLDER --parts time --json time.json --save

text: the bundled pair over a bf16 cache; greedy texts of --problems questions and the field reports' cases
(serve_texts.py), accept lengths within 3 %; with the arm fp8, the questions again over an fp8 cache. time: 14 layers of
one rank of four with random weights (serve_weights.py), ms per step at width 8 (target's forward alone, and the whole
step) and at T = 1, stock and plugin in turns. FOLDER is that of stock_step.py.
With --tp 2 or 4 every server has as many GPUs, and each of them the sizes of one rank of four; the GPUs must be idle,
for SGLang refuses to start on GPUs that have less memory left than one another. Exit status 1 when anything fails.
"""

import argparse
import json
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import preflight
import serve_cases
import serve_texts
import serve_times
from serve_arms import Arm, ArmError, Servers, common, speculative


def check_texts(servers: Servers, options: argparse.Namespace, record: dict[str, Any]) -> None:
    """All servers start at once: SGLang's compilers wait for each other, so nothing is compiled twice."""
    from sgl_muse_mega.checkpoint import tiny

    plain = common(
        model_path=str(tiny.target_directory()), context_length=serve_texts.CONTEXT, max_running_requests=4,
        cuda_graph_bs_decode=[1, 2, 4], tp_size=options.tp, ep_size=options.tp, kv_cache_dtype="bfloat16",
    )  # fmt: skip
    dflash = plain | speculative(str(tiny.draft_directory()))
    wanted = options.arms.split(",")
    stock = servers.start("stock", dflash)
    arms = [servers.start(name, dflash, name) for name in wanted if name not in ("t1", "fp8")]
    rounded: list[Arm] = []
    if "fp8" in wanted:
        fp8 = dflash | {"kv_cache_dtype": "fp8_e4m3"}
        rounded = [servers.start("stock-fp8", fp8), servers.start("full-fp8", fp8, "full")]
    single = []
    if "t1" in wanted:
        single = [servers.start("stock-t1", plain), servers.start("plugin-t1", plain, "target")]
    texts = serve_texts.Texts(options.problems)
    for arm in (stock, *arms, *rounded, *single):
        wait(arm, options.timeout, record)
    if stock.name in record["failed"]:
        return
    up = [arm for arm in arms if arm.name not in record["failed"]]
    serve_texts.run(texts, stock, up, record, say)
    if rounded and not {arm.name for arm in rounded} & set(record["failed"]):
        serve_texts.greedy_texts(texts, rounded[0], rounded[1:], record, say, cache="fp8")
    say(f"accept lengths {record['accept_length']}; exact answers {record['exact']}")
    if single and not {arm.name for arm in single} & set(record["failed"]):
        answers = [texts.answer_all(arm) for arm in single]
        found = serve_texts.compare("texts, T = 1", single[0], single[1], texts.prompts, *answers)
        serve_texts.note(texts, found, record, say)
        for arm in (stock, *up):  # T01: speculation changes no text; what stock's own changes is said beside it
            ours = texts.answer_all(arm)
            found = serve_texts.compare("T01 no speculation", single[0], arm, texts.prompts, answers[0], ours)
            if arm is stock:
                say(found.line())
            else:
                serve_texts.note(texts, found, record, say)
    serve_texts.sampled(texts, stock, up, record, say)
    for outcome in serve_cases.run(texts, stock, up, options.draws):
        serve_texts.note(texts, outcome, record, say)
    record["failed"] += [f"{o['case']} ({o['arm']})" for o in record["outcomes"] if not o["passed"]]


def wait(arm: Arm, timeout: float, record: dict[str, Any]) -> None:
    try:
        say(f"{arm.name} is up, its engine took {arm.ready(timeout):.0f} s")
    except ArmError as error:
        say(f"FAIL {error}")
        record["failed"].append(arm.name)


def say(text: str) -> None:
    print(f"[{time.monotonic() - START:5.0f} s] {text}", flush=True)


START = time.monotonic()
FIGURES = {"serve.w8.ratio_stock": "w8.full", "serve.t1.ratio_stock": "t1"}  # of servers with one GPU


def check(options: argparse.Namespace, parts: list[str]) -> None:
    """Raises UserError for what would only be found out when servers are up, or would measure something else."""
    preflight.need_known("--parts", parts, ("text", "time"))
    preflight.need_known("--arms", options.arms.split(","), ("target", "full", "fp8", "t1"))
    preflight.need_known("--pairs", options.pairs.split(","), tuple(serve_times.STEPS))
    preflight.need_rival(options.stock)
    preflight.need_room_for(options.json, options.save)
    preflight.need_gpus(options.tp)


def main(given: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stock", type=Path, required=True, help="folder of the rival's scripts and packages")
    parser.add_argument("--parts", default="text,time")
    parser.add_argument("--problems", type=int, default=100)
    parser.add_argument("--tp", type=int, default=1, choices=tuple(serve_times.SHAPES), help="GPUs of every server")
    parser.add_argument("--draws", type=int, default=600, help="sampled requests of T07 for each server")
    parser.add_argument("--arms", default="target,full,fp8,t1", help="of the part text")
    parser.add_argument("--pairs", default="w8.full,w8.target,t1", help="what the part time compares")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--timeout", type=float, default=400.0, help="seconds until a server must be up")
    parser.add_argument("--seconds", type=int, default=0, help="of the whole run, which keeps what it had; 0: no end")
    parser.add_argument("--logs", type=Path, default=Path("serve_check_logs"))
    parser.add_argument("--keep-cache", type=Path, help="file for what SGLang compiled, to be its next cache.tar.xz")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--save", action="store_true", help="write the results and, of one GPU, the figures")
    options = parser.parse_args(given)
    parts = options.parts.split(",")
    check(options, parts)
    stock = options.stock.resolve()
    options.logs.mkdir(parents=True, exist_ok=True)
    record: dict[str, Any] = {"near_tie_nats": serve_texts.NEAR_TIE, "shape": serve_times.SHAPES[options.tp]}
    for end in (signal.SIGTERM, signal.SIGALRM):  # so that the servers end with this process, and results are kept
        signal.signal(end, lambda *_: sys.exit(143))
    signal.alarm(options.seconds)
    with tempfile.TemporaryDirectory() as folder:
        for part in parts:
            work = Path(folder) / part
            work.mkdir()
            found = record[part] = {"failed": []}
            servers = Servers(stock, work, options.logs)
            try:
                if part == "text":
                    check_texts(servers, options, found)
                else:
                    serve_times.check(servers, stock, work, options, found, say)
            except ArmError as error:
                say(f"FAIL {error}")
                found["failed"].append(part)
            except SystemExit:
                found["failed"].append(f"{part}: ended before it was done")
                raise
            finally:
                servers.stop()
                save(record, options)
            for arm in servers.arms:
                for line in [*arm.lines("NVIDIA megakernel"), *arm.lines("Muse megakernel")]:
                    print(f"  {arm.name}: {line[-300:]}")
    if options.keep_cache:
        script = f". ./device.sh && save_cache '{options.keep_cache.resolve()}'"
        subprocess.run(["bash", "-c", script], cwd=stock, check=True)
    failed = [name for part in parts for name in record[part]["failed"]]
    print(f"failed: {', '.join(failed) or 'nothing'}")
    return 1 if failed else 0


def save(record: dict[str, Any], options: argparse.Namespace) -> None:
    import torch

    from sgl_muse_mega import results
    from sgl_muse_mega.results import Figure

    environment = results.environment(torch.cuda.get_device_name(), ("python", "benchmark/serve_check.py"))
    if options.json:
        options.json.write_text(json.dumps({"environment": environment, **record}))
    if options.save:
        ratios = record.get("time", {}).get("ratio", {})
        named = FIGURES if options.tp == 1 else {}
        figures = {name: Figure.of(ratios[part], "ratio") for name, part in named.items() if part in ratios}
        print(results.save("serve_check", environment, record, figures))


if __name__ == "__main__":
    sys.exit(preflight.guarded(main))
