"""Builds the whole tiny pair: `python -m training.build_pair --seed 0 --out DIR`.

Writes DIR/target, DIR/draft, DIR/problems.jsonl and DIR/metrics.json; the target is written before the draft's training
starts, so that a build that is stopped early still leaves a usable target.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from sgl_muse_mega.checkpoint.draft import save_draft
from sgl_muse_mega.checkpoint.target import save_target
from training import sizes
from training.data import UNSEEN_COUNT, batches, held_out
from training.draft_model import Draft
from training.evaluate import HeldOut, greedy
from training.evaluate_pair import evaluate_pair
from training.model import Target
from training.problems import Problem
from training.tokenizer import save_tokenizer, train_tokenizer
from training.train_draft import DraftSettings, train_draft
from training.train_target import TargetSettings, train_target

# Draft training continues with chunks of problems that target training never reached.
_DRAFT_CHUNK = 1 << 16


def main() -> None:
    arguments = _arguments()
    begin = time.perf_counter()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(arguments.seed)
    out: Path = arguments.out
    for name in ("target", "draft"):
        (out / name).mkdir(parents=True, exist_ok=True)
    target_settings = TargetSettings(steps=arguments.steps, batch=arguments.batch)
    draft_settings = DraftSettings(steps=arguments.draft_steps, batch=arguments.batch)

    unseen, validation = held_out(arguments.seed)
    write_problems(unseen, out / "problems.jsonl")
    tokenizer = train_tokenizer(arguments.seed)
    save_tokenizer(tokenizer, out / "target", sizes.MAX_POSITIONS)
    metrics: dict[str, Any] = {
        **_environment(device),
        "seed": arguments.seed,
        "target_settings": asdict(target_settings),
        "draft_settings": asdict(draft_settings),
    }

    target = Target(sizes.TARGET).to(device)
    stream = batches(tokenizer, arguments.seed, 0, target_settings.batch, device)
    validation_set = HeldOut.of(tokenizer, validation, device).part(arguments.problems)
    metrics["target_progress"] = train_target(target, stream, validation_set, target_settings)
    stream.close()
    target.requires_grad_(False)
    save_target(out / "target", sizes.TARGET, target.weights())
    add_wrapper_stubs(out / "target" / "config.json")
    validation_answers = greedy(target, validation_set.examples)
    metrics["validation_exact"] = validation_set.exact_rate(validation_answers)
    _save_metrics(metrics, out)

    draft = Draft(sizes.DRAFT).to(device)
    stream = batches(tokenizer, arguments.seed, _DRAFT_CHUNK, draft_settings.batch, device)
    metrics["draft_progress"] = train_draft(draft, target, stream, validation_answers, draft_settings)
    stream.close()
    save_draft(out / "draft", sizes.DRAFT, draft.weights())
    metrics["unseen"] = evaluate_pair(out, arguments.problems, device)
    metrics["seconds"] = time.perf_counter() - begin
    _save_metrics(metrics, out)
    print(metrics["unseen"], flush=True)


def write_problems(items: list[Problem], path: Path) -> None:
    """GSM8K's form: one JSON object with "question" and "answer" a line."""
    lines = (json.dumps({"question": p.question, "answer": p.answer}) for p in items)
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def add_wrapper_stubs(path: Path) -> None:
    """Completes the target's config.json with what servers of the multimodal architecture ask for."""
    content = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps({**content, **sizes.WRAPPER_STUBS}, indent=2) + "\n", encoding="utf-8")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=TargetSettings().steps, help="target steps")
    parser.add_argument("--draft-steps", type=int, default=DraftSettings().steps, help="draft steps")
    parser.add_argument("--batch", type=int, default=TargetSettings().batch, help="sequences a step")
    parser.add_argument("--problems", type=int, default=UNSEEN_COUNT, help="problems of the final evaluation")
    return parser.parse_args()


def _environment(device: torch.device) -> dict[str, Any]:
    cuda = device.type == "cuda"
    return {
        "date": time.strftime("%Y-%m-%d"),
        "gpu": torch.cuda.get_device_name() if cuda else None,
        "driver": _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader") if cuda else None,
        "torch": torch.__version__,
        "cpus": os.cpu_count(),
        "commit": _output("git", "rev-parse", "--short", "HEAD"),
        "command": " ".join(["python", "-m", "training.build_pair", *sys.argv[1:]]),
    }


def _output(*command: str) -> str | None:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def _save_metrics(metrics: dict[str, Any], out: Path) -> None:
    (out / "metrics.json").write_text(json.dumps(metrics, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
