"""Stock SGLang beside SGLang with the plugin, on one H200.

    python benchmark/serve_check.py --stock FOLDER --parts text --json text.json
    python benchmark/serve_check.py --stock FOLDER --parts time --json time.json --save

text: the bundled pair; greedy texts of --problems questions and the field reports' cases (serve_texts.py), accept
lengths within 3 %. time: 14 layers of one rank of four with random weights (serve_weights.py), ms per step at width 8
(target's forward alone, and the whole step) and at T = 1, stock and plugin in turns. FOLDER is that of stock_step.py.
Exit status 1 when anything fails.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import serve_texts
from serve_arms import ROOT, Arm, ArmError, install, stock_environment

SHAPE = "14 64 2 32 4 8"
PROMPT, NEW = 1024, 192
ATTENTION = ("_fwd_kernel", "_fwd_grouped_kernel_stage1", "_fwd_kernel_stage2")
BOUNDS = {"w8.full": 1.7, "w8.target": 1.7, "t1": 1.8}


class Servers:
    """Starts arms with a common environment and ends them all."""

    def __init__(self, stock: Path, work: Path, logs: Path) -> None:
        site = work / "site"
        site.mkdir()
        install(site)
        self._base = stock_environment(stock)
        paths = [str(site), str(ROOT), str(ROOT / "benchmark"), self._base.get("PYTHONPATH", "")]
        self._base["PYTHONPATH"] = ":".join(filter(None, paths))
        self._logs = logs
        self.arms: list[Arm] = []

    def start(self, name: str, arguments: dict[str, Any], step: str | None = None, weights: bool = False) -> Arm:
        """step: SGLANG_MUSE_MEGA_STEP of a server with the plugin; None: stock."""
        environment = dict(self._base)
        arguments = arguments | {"port": 31000 + 200 * len(self.arms)}
        if step is not None:
            arguments["enable_nvidia_megakernel"] = True
            environment["SGLANG_MUSE_MEGA_STEP"] = step
        if weights:
            environment["SERVE_CHECK_WEIGHTS"] = "1"
        arm = Arm(name, arguments, environment, self._logs)
        self.arms.append(arm)
        return arm

    def stop(self, *arms: Arm) -> None:
        for arm in arms or self.arms:
            arm.stop()


def common(**changes: Any) -> dict[str, Any]:
    return {
        "attention_backend": "triton", "sampling_backend": "pytorch", "grammar_backend": "none",
        "skip_tokenizer_init": True, "enable_multimodal": False, "disable_prefill_cuda_graph": True,
        "mem_fraction_static": 0.93, "max_total_tokens": 16384, "log_level": "info",
    } | changes  # fmt: skip


def speculative(draft: str) -> dict[str, Any]:
    return {
        "speculative_algorithm": "DFLASH", "speculative_draft_model_path": draft, "speculative_num_draft_tokens": 8,
        "speculative_draft_kv_cache_dtype": "bfloat16",
    }  # fmt: skip


def check_texts(servers: Servers, options: argparse.Namespace) -> dict[str, Any]:
    from sgl_muse_mega.checkpoint import tiny

    plain = common(
        model_path=str(tiny.target_directory()), context_length=serve_texts.CONTEXT, max_running_requests=4,
        cuda_graph_bs_decode=[1, 2, 4],
    )  # fmt: skip
    dflash = plain | speculative(str(tiny.draft_directory()))
    texts = serve_texts.Texts(options.problems)
    stock = servers.start("stock", dflash)
    say(f"stock is up after {stock.ready(options.timeout):.0f} s")  # alone: what it compiles is cached for the others
    arms = [servers.start("target", dflash, "target"), servers.start("full", dflash, "full")]
    single = [servers.start("stock-t1", plain), servers.start("plugin-t1", plain, "target")]
    failed = []
    for arm in (*arms, *single):
        try:
            say(f"{arm.name} is up after {arm.ready(options.timeout):.0f} s")
        except ArmError as error:
            say(f"FAIL {error}")
            failed.append(arm.name)
    up = [arm for arm in arms if arm.name not in failed]
    record = serve_texts.run(texts, stock, up, say)
    if not failed or set(failed).isdisjoint({"stock-t1", "plugin-t1"}):
        answers = [texts.answer_all(arm) for arm in single]
        outcome = serve_texts.compare("texts", single[0], single[1], texts.prompts, *answers)
        outcome.case = "texts, T = 1"
        say(outcome.line())
        record["outcomes"].append(vars(outcome) | {"passed": outcome.passed})
    lengths = record["accept_length"]
    for name in (arm.name for arm in up):
        change = lengths[name] / lengths["stock"] - 1
        record["outcomes"].append({"case": "accept length", "arm": name, "passed": abs(change) <= 0.03})
        say(f"{'ok  ' if abs(change) <= 0.03 else 'FAIL'} accept length {name}: {lengths[name]:.3f}, {change:+.2%}")
    say(f"accept length of stock {lengths['stock']:.3f}; exact answers {record['exact']}")
    record["failed"] = failed + [o["case"] for o in record["outcomes"] if not o["passed"]]
    return record


def check_times(servers: Servers, stock_folder: Path, work: Path, options: argparse.Namespace) -> dict[str, Any]:
    models = work / "models"
    command = [sys.executable, str(stock_folder / "make_models.py"), str(models), *SHAPE.split()]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    plain = common(
        model_path=str(models / "target"), load_format="dummy", context_length=8192, max_running_requests=1,
        cuda_graph_bs_decode=[1], disable_radix_cache=True, chunked_prefill_size=2048, page_size=64,
    )  # fmt: skip
    dflash = plain | speculative(str(models / "draft"))
    prompt = [(i * 7919) % 200000 for i in range(PROMPT)]
    record: dict[str, Any] = {"ms": {}, "steps": {}, "ratio": {}, "failed": []}

    def turns(name: str, theirs: Arm, ours: Arm) -> None:
        """Both servers in turns; neither works while the other is measured."""
        times: dict[str, list[float]] = {"stock": [], "plugin": []}
        for arm in (theirs, ours):
            arm.ask("step_time", prompt=prompt, new=32)
        for _ in range(options.rounds):
            for label, arm in (("stock", theirs), ("plugin", ours)):
                found = arm.ask("step_time", prompt=prompt, new=NEW)
                times[label].append(found["ms"])
                record["steps"].setdefault(arm.name, []).append(found["steps"])
        record["ms"][name] = times
        ratios = [a / b for a, b in zip(times["stock"], times["plugin"], strict=True)]
        record["ratio"][name] = ratios
        stock_ms, ours_ms = (statistics.median(times[label]) for label in ("stock", "plugin"))
        ratio = statistics.median(ratios)
        if ratio < BOUNDS[name]:
            record["failed"].append(name)
        spread = f"{ratio:.3f} ({min(ratios):.3f}..{max(ratios):.3f}), wanted {BOUNDS[name]}"
        mark = "ok  " if ratio >= BOUNDS[name] else "FAIL"
        say(f"{mark} {name:<10} stock {stock_ms:.3f} ms, plugin {ours_ms:.3f} ms, ratio {spread}")

    rival = servers.start("stock-w8", dflash, weights=True)
    full = servers.start("full-w8", dflash, "full", weights=True)
    for arm in (rival, full):
        say(f"{arm.name} is up after {arm.ready(options.timeout):.0f} s")
    turns("w8.full", rival, full)
    servers.stop(full)
    target = servers.start("target-w8", dflash, "target", weights=True)
    single = servers.start("stock-t1", plain, weights=True)
    for arm in (target, single):
        say(f"{arm.name} is up after {arm.ready(options.timeout):.0f} s")
    turns("w8.target", rival, target)
    servers.stop(target)
    ours = servers.start("plugin-t1", plain, "target", weights=True)
    say(f"{ours.name} is up after {ours.ready(options.timeout):.0f} s")
    turns("t1", single, ours)
    profile = rival.ask("profile", prompt=prompt, new=48, folder=str(work / "trace"))
    steps = profile.pop("steps")
    attention = sum(us for name, us in profile.items() if name.strip() in ATTENTION) / steps / 1e3
    record |= {"kernels": profile, "profiled_steps": steps, "attention_ms": attention}
    for name in ("w8.full", "w8.target"):
        pairs = zip(record["ms"][name]["stock"], record["ms"][name]["plugin"], strict=True)
        record["ratio"][f"{name}.without_attention"] = [(a - attention) / b for a, b in pairs]
    least = {name: statistics.median(values) for name, values in record["ratio"].items()}
    say(f"stock's attention kernels {attention:.3f} ms per step; ratios {json.dumps(least)}")
    return record


def say(text: str) -> None:
    print(f"[{time.monotonic() - START:5.0f} s] {text}", flush=True)


START = time.monotonic()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stock", type=Path, required=True, help="folder of the rival's scripts and packages")
    parser.add_argument("--parts", default="text,time")
    parser.add_argument("--problems", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--timeout", type=float, default=400.0, help="seconds until a server must be up")
    parser.add_argument("--logs", type=Path, default=Path("serve_check_logs"))
    parser.add_argument("--keep-cache", type=Path, help="file for what SGLang compiled, to be its next cache.tar.xz")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--save", action="store_true", help="write the results and figures")
    options = parser.parse_args()
    stock = options.stock.resolve()
    options.logs.mkdir(parents=True, exist_ok=True)
    record: dict[str, Any] = {"near_tie_nats": serve_texts.NEAR_TIE, "shape": SHAPE}
    parts = options.parts.split(",")
    with tempfile.TemporaryDirectory() as folder:
        for part in parts:
            work = Path(folder) / part
            work.mkdir()
            servers = Servers(stock, work, options.logs)
            try:
                if part == "text":
                    record[part] = check_texts(servers, options)
                else:
                    record[part] = check_times(servers, stock, work, options)
            except ArmError as error:
                say(f"FAIL {error}")
                record[part] = {"failed": [part], "error": str(error)}
            finally:
                servers.stop()
            for arm in servers.arms:
                for line in [*arm.lines("NVIDIA megakernel"), *arm.lines("Muse megakernel")]:
                    print(f"  {arm.name}: {line[-300:]}")
    save(record, options)
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
        figures = {
            name: Figure.of(ratios[part], "ratio")
            for name, part in (("serve.w8.ratio_stock", "w8.full"), ("serve.t1.ratio_stock", "t1"))
            if part in ratios
        }
        print(results.save("serve_check", environment, record, figures))


if __name__ == "__main__":
    sys.exit(main())
