"""Problems in GSM8K's form through a running SGLang server, one request at a time.

    python benchmark/bench_gsm8k.py --data test.jsonl --url http://127.0.0.1:30000 --runs 3
    python benchmark/bench_gsm8k.py --data test.jsonl --url http://127.0.0.1:30000 --compare http://127.0.0.1:30100

Without --data the 500 bundled problems, which the bundled pair can solve. Prints every run, then median and spread, of:
exact answers, tokens per second, ms per verify step, and accept length as the server, its requests and tokens per step
give it (gsm8k_numbers.py defines each). Before every run the server's prefix cache and metrics are emptied; --warmup
questions come first and are not counted. --compare asks two servers in turns, A B A B, and says how far they differ.
Clocks, power and reasons for lower clocks of this machine's GPUs are beside the figures.

Runs with simulated acceptance are refused; with --allow-simulated they are marked as such. Exit status 1 when a
question failed, 2 when the server could not be asked to the end. The HTTP client, httpx, comes with SGLang; a server's
API key is taken from SGLANG_API_KEY.
"""

import argparse
import itertools
import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import gsm8k_numbers
import preflight
from gpu_state import GpuState
from gsm8k_client import Answer, Asking, Server

from sgl_muse_mega import results
from sgl_muse_mega.commands.problems import Problem, read_problems
from sgl_muse_mega.errors import UserError

INSTRUCTION = 'Think step by step. End with a line "#### " followed by the answer as a number alone.'
IN_A_ROW = 3  # questions that may fail one after the other
BUNDLED = Path(__file__).parents[1] / "sgl_muse_mega" / "data" / "tiny" / "problems.jsonl"


def one_run(server: Server, problems: Sequence[Problem], options: argparse.Namespace) -> dict[str, Any]:
    """Numbers, answers, and what the GPUs did. Raises UserError when the server keeps failing."""
    for problem in problems[: options.warmup]:
        server.ask(problem.question)
    cleared = options.keep_cache or server.clear()
    with GpuState() as gpus:
        answers = ask_all(server, problems)
    found = gsm8k_numbers.numbers(problems, answers, server.accept_length())
    drafts = int(server.info.get("speculative_num_draft_tokens") or 0) - 1
    found["acceptance"], why = gsm8k_numbers.acceptance(server.environment(), answers, drafts)
    return {
        "url": server.url, "cleared": cleared and not options.keep_cache, "acceptance_because": why, **found,
        "gpus": gpus.result(), "answers": [asdict(answer) for answer in answers],
    }  # fmt: skip


def ask_all(server: Server, problems: Sequence[Problem]) -> list[Answer]:
    answers: list[Answer] = []
    for problem in problems:
        answers.append(server.ask(problem.question))
        last = answers[-IN_A_ROW:]
        if len(last) == IN_A_ROW and all(answer.error for answer in last):
            raise UserError(
                f"{server.url} failed {IN_A_ROW} questions in a row, the last (line {problem.line}) with: "
                f"{answers[-1].error}."
            )
    return answers


def measure(servers: Sequence[Server], problems: Sequence[Problem], options: argparse.Namespace) -> dict[str, Any]:
    """All runs, server by server in turns; printed as they end.

    A server that keeps failing ends it: what was measured before is kept, with the reason under "stopped". Raises
    UserError when there is nothing to keep.
    """
    for server in servers:  # before the first question
        state, why = gsm8k_numbers.acceptance(server.environment(), [])
        if state == "simulated" and not options.allow_simulated:
            raise UserError(
                f"Accept lengths of {server.url} are simulated ({why}); unset it, or add --allow-simulated."
            )
    record: dict[str, Any] = {"servers": [server.described() for server in servers], "runs": []}
    for turn in range(options.runs):
        for name, server in zip("AB", servers, strict=False):
            try:
                run = {"server": name, "turn": turn + 1, **one_run(server, problems, options)}
            except UserError as error:
                if not record["runs"]:
                    raise
                record["stopped"] = str(error)
                return record
            record["runs"].append(run)
            if options.json:  # whatever ends this program
                options.json.write_text(json.dumps({"unfinished": True, **record}, indent=1))
            print(
                f"{name}{turn + 1}: {run['right']} of {run['questions']} right, {run['failed']} failed, "
                f"{run['truncated']} cut at {options.max_new_tokens} tokens, {run['tokens']} tokens"
                f"{_speculation_line(server, run)}{'' if run['cleared'] else '; the prefix cache was not emptied'}",
                flush=True,
            )
            for number, answer in zip(itertools.count(1), run["answers"], strict=False):
                if answer["error"]:
                    print(f"  question {number}: {answer['error']}")
    return record


def _speculation_line(server: Server, run: dict[str, Any]) -> str:
    if not server.info.get("speculative_algorithm"):
        return "; no speculation"
    return (
        f", {run['without_accept_length']} without an accept length; acceptance {run['acceptance']} "
        f"({run['acceptance_because']})"
    )


def report(record: dict[str, Any], options: argparse.Namespace) -> dict[str, Any]:
    """Prints tables; the medians and spreads."""
    found: dict[str, Any] = {}
    for place, server in enumerate(record["servers"]):
        name = "AB"[place]
        runs = [run for run in record["runs"] if run["server"] == name]
        if not runs:
            continue
        mega = "with" if server["enable_nvidia_megakernel"] else "without"
        print(f"\n{name}: {server['url']}, SGLang {server['version']} {mega} the megakernel")
        print("\n".join(gsm8k_numbers.table(runs)))
        gpus = runs[-1]["gpus"]
        for gpu, state in gpus.items():
            print(f"{gpu:<26}{state if isinstance(state, str) else _gpu_line(state)}")
        found[name] = gsm8k_numbers.spread(runs)
    effort = options.reasoning_effort or "the template's default"
    print(
        f"\napi {options.api}, reasoning effort {effort}, template arguments {options.template_arguments or 'none'}, "
        f"temperature {options.temperature}, top-p {options.top_p}"
    )
    if "B" in found:
        found["compared"] = compare(record["runs"])
        print(json.dumps(found["compared"]))
    if any(run["acceptance"] != "real" and run["verify_steps"] for run in record["runs"]):
        states = sorted({run["acceptance"] for run in record["runs"]})
        print(f"NOT FOR PUBLICATION AS IT IS: acceptance {', '.join(states)}")
    return found


def _gpu_line(state: dict[str, Any]) -> str:
    numbers = [f"{s['median']:.0f} {s['unit']} ({s['min']:.0f}..{s['max']:.0f})" for s in state.values() if _spread(s)]
    reasons = ", ".join(state["throttle_reasons"]) or "none"
    return f"{state['name']}, {', '.join(numbers)}, reasons for lower clocks: {reasons}"


def _spread(value: object) -> bool:
    return isinstance(value, dict) and "unit" in value


def compare(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """B over A, run by run, and how many texts of the last pair are the same."""
    pairs = list(zip(*([run for run in runs if run["server"] == name] for name in "AB"), strict=False))
    found: dict[str, Any] = {}
    for name in ("tokens_per_second", "decode_tokens_per_second", "ms_per_step", "accept_pooled"):
        ratios = [b[name] / a[name] for a, b in pairs if a[name] and b[name]]
        if ratios:
            found[f"{name}_ratio"] = {"median": statistics.median(ratios), "min": min(ratios), "max": max(ratios)}
    answers = zip(*(run["answers"] for run in pairs[-1]), strict=True)
    whole = [(a["text"], b["text"]) for a, b in answers if not a["error"] and not b["error"]]
    found |= {"texts": len(whole), "equal_texts": sum(a == b for a, b in whole)}
    return found


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=BUNDLED, help="JSON lines with question and answer (... #### 42)")
    parser.add_argument("--url", default="http://127.0.0.1:30000")
    parser.add_argument("--compare", metavar="URL", help="a second server, asked in turns with the first")
    parser.add_argument("--api", choices=("chat", "native"), default="chat")
    parser.add_argument("--tokenizer", type=Path, help="native API: model folder; sends token ids instead of text")
    parser.add_argument("--limit", type=int, help="the first questions only")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--warmup", type=int, default=4, help="questions before each run that do not count")
    parser.add_argument("--max-new-tokens", type=int, default=4096)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--seed", type=int)
    parser.add_argument("--ignore-eos", action="store_true", help="always --max-new-tokens, for random weights")
    parser.add_argument("--reasoning-effort", help="none, low, medium, high, ...: as the model's template has it")
    parser.add_argument("--template-arguments", type=json.loads, default={}, help="JSON object for the chat template")
    parser.add_argument("--instruction", default=INSTRUCTION, help="text behind every question; may be empty")
    parser.add_argument("--keep-cache", action="store_true", help="do not empty the prefix cache before a run")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds between two pieces of an answer")
    parser.add_argument("--allow-simulated", action="store_true")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--save", action="store_true", help="write everything to benchmark/results")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    servers: list[Server] = []
    try:
        if options.tokenizer and options.api != "native":
            raise UserError("--tokenizer sends token ids, which the chat API does not take; add --api native.")
        if options.runs < 1 or options.warmup < 0:
            raise UserError(f"--runs is {options.runs} and --warmup {options.warmup}; at least 1 and 0 are needed.")
        preflight.need_room_for(options.json, options.save)
        problems = read_problems(options.data, options.limit)
        asking = Asking(
            api=options.api, max_new_tokens=options.max_new_tokens, temperature=options.temperature,
            top_p=options.top_p, seed=options.seed, ignore_eos=options.ignore_eos,
            reasoning_effort=options.reasoning_effort, template_arguments=options.template_arguments,
            instruction=options.instruction, timeout=options.timeout,
        )  # fmt: skip
        for url in filter(None, (options.url, options.compare)):
            servers.append(Server(url, asking, options.tokenizer))
        record = measure(servers, problems, options)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    finally:
        for server in servers:
            server.close()
    record = {"asking": asdict(asking), "data": str(options.data), "spread": report(record, options)} | record
    gpus = [state["name"] for state in record["runs"][0]["gpus"].values() if isinstance(state, dict)]
    environment = results.environment(gpus[0] if gpus else None, ("python", "benchmark/bench_gsm8k.py"))
    if options.json:
        options.json.write_text(json.dumps({"environment": environment, **record}, indent=1))
    if options.save:
        print(results.save("gsm8k", environment, record, {}))
    if "stopped" in record:
        print(f"error: {record['stopped']}", file=sys.stderr)
        return 2
    return int(any(run["failed"] for run in record["runs"]))


if __name__ == "__main__":
    sys.exit(main())
