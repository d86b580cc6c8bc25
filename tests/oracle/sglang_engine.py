"""Greedy generation by SGLang's whole engine on a CPU: sglang_engine.py CHECKPOINT PROMPTS.json OUTPUT.json

A program of its own because the engine starts processes and expects to own the one it is created in. PROMPTS is
{"ids": [[...], ...], "new_tokens": n}; OUTPUT receives the generated ids per prompt.
"""

import json
import sys
from pathlib import Path

import sglang
from sglang_target import ARGUMENTS

from sgl_muse_mega import vector_math

vector_math.settle()  # also in the processes that the engine starts: they import this file


def main(checkpoint: str, prompts: str, output: str) -> None:
    request = json.loads(Path(prompts).read_text(encoding="utf-8"))
    engine = sglang.Engine(model_path=checkpoint, **ARGUMENTS)
    try:
        sampling = {"temperature": 0, "max_new_tokens": request["new_tokens"], "ignore_eos": True}
        results = engine.generate(input_ids=request["ids"], sampling_params=sampling)
    finally:
        engine.shutdown()
    Path(output).write_text(json.dumps([result["output_ids"] for result in results]), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
