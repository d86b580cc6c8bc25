"""Greedy decoding of the bundled problems on the GPU: with draft, without draft, and against the reference.

    python benchmark/decode_check.py --problems 200 --json decode.json

With and without draft must agree token by token. The reference reads each finished text once and must choose the same
token at every place, except where its two best logits are closer than the bound.
"""

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch

from sgl_muse_mega.checkpoint import tiny
from sgl_muse_mega.checkpoint.draft import load_draft
from sgl_muse_mega.checkpoint.target import load_target
from sgl_muse_mega.commands.problems import read_problems
from sgl_muse_mega.commands.text import Text
from sgl_muse_mega.config import load_draft_config, load_target_config
from sgl_muse_mega.megakernel.backend import KernelBackend, to_device
from sgl_muse_mega.megakernel.cuda import CudaMachine
from sgl_muse_mega.reference.backend import ReferenceBackend
from sgl_muse_mega.speculative.backend import Backend
from sgl_muse_mega.speculative.generate import generate
from sgl_muse_mega.speculative.sampling import SamplingParams

GAP_BOUND = 0.05  # logits; decided before the first run


def decode(backend: Backend, ids: list[int], width: int, limit: int, stop: tuple[int, ...]) -> tuple[list[int], float]:
    """Greedy tokens and the accept length."""
    run = generate(backend, ids, SamplingParams(), width=width, max_new_tokens=limit, stop_ids=stop, ignore_eos=False)
    for _ in run:
        pass
    return run.tokens, run.stats.accept_length


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--problems", type=int, default=200)
    parser.add_argument("--width", type=int, default=8)
    parser.add_argument("--max-new-tokens", type=int, default=256)
    parser.add_argument("--kv", default="bf16")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    config, draft_config = load_target_config(tiny.target_directory()), load_draft_config(tiny.draft_directory())
    weights, draft = load_target(tiny.target_directory(), config), load_draft(tiny.draft_directory(), draft_config)
    machine = CudaMachine()
    backend = KernelBackend(
        config, weights, draft_config, draft, machine=machine, max_context=1024, kv_dtype=arguments.kv
    )
    reference = ReferenceBackend(config, to_device(weights, machine.device), max_context=1024, kv_dtype=arguments.kv)
    text = Text(tiny.target_directory())
    rows: list[dict[str, Any]] = []
    plain_seconds = draft_seconds = 0.0
    for problem in read_problems(tiny.problems_path(), arguments.problems):
        ids = text.encode(problem.question, raw=False)
        start = time.monotonic()
        plain, _ = decode(backend, ids, 1, arguments.max_new_tokens, config.eos_token_ids)
        middle = time.monotonic()
        drafted, accept = decode(backend, ids, arguments.width, arguments.max_new_tokens, config.eos_token_ids)
        plain_seconds += middle - start
        draft_seconds += time.monotonic() - middle
        reference.prefill(ids[:1])
        logits = reference.verify([*ids[1:], *plain])[len(ids) - 2 :]
        tokens = torch.tensor(plain, device=logits.device)
        best = logits[:-1].argmax(dim=1)
        top = logits[:-1].topk(2, dim=1).values
        places = (best != tokens).nonzero()[:, 0].tolist()
        gaps = [float(top[place, 0] - top[place, 1]) for place in places]
        rows.append(
            {"line": problem.line, "tokens": len(plain), "same_with_draft": plain == drafted, "accept_length": accept,
             "differs_from_reference": places, "gaps": gaps}
        )  # fmt: skip
    machine.synchronize()
    total = sum(r["tokens"] for r in rows)
    unequal = [r["line"] for r in rows if not r["same_with_draft"]]
    gaps = [gap for r in rows for gap in r["gaps"]]
    far = sum(gap >= GAP_BOUND for gap in gaps)
    accept = sum(r["accept_length"] for r in rows) / len(rows)
    print(
        f"{len(rows)} problems, {total} tokens, accept length {accept:.3f}: {len(unequal)} differ with draft; "
        f"{len(gaps)} tokens are not the reference's first choice, {far} of them by {GAP_BOUND} or more "
        f"(largest gap {max(gaps, default=0.0):.4f}); {plain_seconds:.1f} s plain, {draft_seconds:.1f} s with draft"
    )
    if arguments.json:
        arguments.json.write_text(json.dumps(rows))
    return int(bool(unequal) or far > 0)


if __name__ == "__main__":
    sys.exit(main())
