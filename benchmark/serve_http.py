"""Starts one SGLang server on the loopback interface for serve_ab.sh; the command line stands for SGLang's own.

    python benchmark/serve_http.py --model DIR --draft DIR --port 30000 [--plugin] [--random] [--tp 4] [--extra JSON]

With --random: random weights of a trained model's scale (serve_weights.py) in folders that hold configurations alone;
the server then takes and gives token ids.
"""

import argparse
import json
import os
from collections.abc import Sequence
from typing import Any

from serve_arms import common, speculative

HOST = "127.0.0.1"


def arguments(options: argparse.Namespace) -> dict[str, Any]:
    """SGLang's server arguments."""
    shared = {
        "model_path": options.model, "host": HOST, "port": options.port, "tp_size": options.tp, "ep_size": options.tp,
        "context_length": options.context, "max_running_requests": 1, "cuda_graph_bs_decode": [1],
    }  # fmt: skip
    if options.random:
        shared = common(load_format="dummy", page_size=64, chunked_prefill_size=2048) | shared
    if options.draft:
        shared |= speculative(options.draft) | {"speculative_num_draft_tokens": options.width}
    if options.plugin:
        shared["enable_nvidia_megakernel"] = True
    return shared | options.extra


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--draft", help="without it, one token a step")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--width", type=int, default=8)
    parser.add_argument("--context", type=int, default=8192)
    parser.add_argument("--plugin", action="store_true")
    parser.add_argument("--random", action="store_true")
    parser.add_argument("--extra", type=json.loads, default={}, help="more server arguments, over these")
    return parser.parse_args(words)


def main() -> None:
    options = parse()
    os.environ["SGLANG_EXPOSE_OWN_ENV_VARS"] = "1"  # so that the benchmark sees whether acceptance is simulated
    if options.random:
        os.environ["SERVE_CHECK_WEIGHTS"] = "1"
    from sglang.srt.plugins import load_plugins

    load_plugins()
    from sglang.srt.entrypoints.http_server import launch_server
    from sglang.srt.server_args import ServerArgs

    launch_server(ServerArgs(**arguments(options)))


if __name__ == "__main__":  # the ranks import this file, too
    main()
