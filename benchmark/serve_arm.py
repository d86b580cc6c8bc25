"""One server of `serve_check.py`: an SGLang engine that does what lines of JSON on its standard input say.

    serve_arm.py REPLY_FD ARGUMENTS.json

Every reply is one line of JSON on the file descriptor; everything else on the outputs is SGLang's log.
"""

import functools
import json
import os
import sys
import time
from pathlib import Path
from typing import Any


class Arm:
    """The engine and what can be asked of it: each method is an operation by its name."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        import sglang

        start = time.perf_counter()
        self.engine = sglang.Engine(**arguments)
        self.seconds = time.perf_counter() - start

    def generate(
        self, prompts: list[list[int]], sampling: list[dict[str, Any]], together: bool = False, top_logprobs: int = 0
    ) -> Any:
        """Token ids and numbers of every prompt, one after the other or all at once; a refusal is its text."""
        options: dict[str, Any] = {}
        if top_logprobs:
            options = {"return_logprob": True, "top_logprobs_num": top_logprobs}
        if together:
            return [_output(o) for o in self.engine.generate(input_ids=prompts, sampling_params=sampling, **options)]
        found = []
        for ids, params in zip(prompts, sampling, strict=True):
            try:
                found.append(_output(self.engine.generate(input_ids=ids, sampling_params=params, **options)))
            except ValueError as error:
                found.append({"ids": [], "completion_tokens": 0, "finish_reason": str(error)})
        return found

    def abort(self, prompts: list[list[int]], sampling: dict[str, Any], delays: list[float]) -> Any:
        """Outputs of requests that are told to end `delay` seconds after they were sent, one after the other; empties
        the prefix cache behind them. SGLang's own check ends the server when pages are missing then."""
        found = []
        for number, (ids, delay) in enumerate(zip(prompts, delays, strict=True)):
            rid, output = f"aborted-{time.monotonic_ns()}-{number}", None
            self.engine.loop.call_later(delay, functools.partial(self.engine.tokenizer_manager.abort_request, rid=rid))
            for piece in self.engine.generate(input_ids=ids, sampling_params=sampling, stream=True, rid=rid):
                output = piece
            found.append(_output(output) if output else {"ids": [], "completion_tokens": 0, "finish_reason": None})
        flushed = self.engine.loop.run_until_complete(self.engine.tokenizer_manager.flush_cache(timeout_s=10.0))
        return {"outputs": found, "flushed": bool(flushed.success)}

    def step_time(self, prompt: list[int], new: int, lead: int = 8) -> dict[str, float]:
        """ms per step of `new` tokens; the prompt and the first tokens are taken out by a second run."""

        def run(tokens: int) -> tuple[float, int]:
            sampling = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
            start = time.perf_counter()
            output = self.engine.generate(input_ids=prompt, sampling_params=sampling)
            seconds = time.perf_counter() - start
            return seconds, int(output["meta_info"].get("spec_verify_ct") or tokens)

        short, long = run(lead), run(lead + new)
        steps = long[1] - short[1]
        return {"ms": (long[0] - short[0]) / steps * 1e3, "steps": steps, "tokens": new}

    def profile(self, prompt: list[int], new: int, folder: str) -> dict[str, float]:
        """us per GPU kernel over one text of `new` tokens, and its steps, the prompt's own forward included; `idle`: of
        the second half, the share in which the GPU did nothing."""
        import collections
        import gzip

        self.engine.start_profile(output_dir=folder, activities=["GPU"])
        sampling = {"temperature": 0, "max_new_tokens": new, "ignore_eos": True}
        output = self.engine.generate(input_ids=prompt, sampling_params=sampling)
        self.engine.stop_profile()
        deadline, files = time.monotonic() + 20, []
        while not files and time.monotonic() < deadline:
            time.sleep(1)
            files = sorted(Path(folder).rglob("*trace.json*"))
        stored = files[0].read_bytes()
        trace = json.loads(gzip.decompress(stored) if files[0].suffix == ".gz" else stored)
        times: dict[str, float] = collections.defaultdict(float)
        for event in trace["traceEvents"]:
            if event.get("cat") == "kernel":
                times[event["name"][:90]] += event["dur"]
        work = [e for e in trace["traceEvents"] if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
        steps = int(output["meta_info"].get("spec_verify_ct") or new)
        return {"steps": steps, "idle": idle_share([(e["ts"], e["ts"] + e["dur"]) for e in work]), **times}


def idle_share(busy: list[tuple[float, float]]) -> float:
    """Of the second half of the time from the first beginning to the last end, what lies in none of the stretches."""
    if not busy:
        return 0.0
    first, last = min(start for start, _ in busy), max(end for _, end in busy)
    reached = middle = (first + last) / 2
    idle = 0.0
    for start, end in sorted(busy):
        idle += max(0.0, start - reached)
        reached = max(reached, end)
    return idle / (last - middle) if last > middle else 0.0


def _output(raw: dict[str, Any]) -> dict[str, Any]:
    meta = raw["meta_info"]
    kept = ("completion_tokens", "cached_tokens", "spec_verify_ct", "finish_reason", "output_token_logprobs")
    found = {"ids": raw["output_ids"], **{name: meta[name] for name in kept if name in meta}}
    top = meta.get("output_top_logprobs")
    return found | ({"top": [[entry[:2] for entry in row] for row in top]} if top else {})


def main() -> None:
    replies = os.fdopen(int(sys.argv[1]), "w", buffering=1)
    arm = Arm(json.loads(Path(sys.argv[2]).read_text()))
    replies.write(json.dumps({"ready": arm.seconds}) + "\n")
    for line in sys.stdin:
        request = json.loads(line)
        try:
            reply = {"result": getattr(arm, request.pop("op"))(**request)}
        except Exception as error:
            reply = {"error": f"{type(error).__name__}: {error}"}
        replies.write(json.dumps(reply) + "\n")
    arm.engine.shutdown()


if __name__ == "__main__":
    main()
