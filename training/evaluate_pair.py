"""Evaluates a pair on disk: `python -m training.evaluate_pair DIR [--problems N]`, DIR as `build_pair` writes it.

Reads the files through the package's loader, so that it measures what is shipped: exact answers of the greedy target
on DIR/problems.jsonl, and the draft's accept length on those answers.
"""

import argparse
import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from sgl_muse_mega.checkpoint.draft import load_draft
from sgl_muse_mega.checkpoint.nvfp4 import dequantize
from sgl_muse_mega.checkpoint.target import load_target
from sgl_muse_mega.checkpoint.weights import DraftWeights, Nvfp4Experts, TargetWeights
from sgl_muse_mega.config import TargetConfig, load_draft_config, load_target_config
from training.draft_model import Draft
from training.evaluate import HeldOut, accept_length, greedy
from training.model import Target
from training.problems import Problem


def evaluate_pair(directory: Path, count: int | None, device: torch.device) -> dict[str, Any]:
    """Held-out figures of the pair in `directory` on its first `count` problems (all by default)."""
    config, draft_config = load_target_config(directory / "target"), load_draft_config(directory / "draft")
    target = target_of(config, load_target(directory / "target", config)).to(device)
    draft = draft_of(Draft(draft_config), load_draft(directory / "draft", draft_config)).to(device)
    tokenizer = Tokenizer.from_file(str(directory / "target" / "tokenizer.json"))
    items = [Problem(**json.loads(line)) for line in (directory / "problems.jsonl").read_text("utf-8").splitlines()]
    held_out = HeldOut.of(tokenizer, items[:count], device)
    answers = greedy(target, held_out.examples)
    lengths = (answers.lengths - answers.prompts).float()
    return {
        "problems": len(held_out.results),
        "exact": held_out.exact_rate(answers),
        "answer_tokens_mean": float(lengths.mean()),
        "accept_length": accept_length(target, draft, answers),
    }


def target_of(config: TargetConfig, weights: TargetWeights) -> Target:
    """A frozen training model that computes with the loaded weights; NVFP4 experts are decoded once."""
    target = Target(config.model_copy(update={"quantization": None}))
    state: dict[str, torch.Tensor] = {name: getattr(weights, name) for name in ("embed_tokens", "norm", "lm_head")}
    for i, layer in enumerate(weights.layers):
        for field in fields(layer):
            value = getattr(layer, field.name)
            if field.name != "first_expert":
                value = dequantize(value) if isinstance(value, Nvfp4Experts) else value
                state[f"layers.{i}.{field.name}"] = value
    target.load_state_dict(state)
    return target.requires_grad_(False)


def draft_of(draft: Draft, weights: DraftWeights) -> Draft:
    """Fills `draft` with the loaded weights and freezes it; a replaced mask embedding does not occur in this pair."""
    state: dict[str, torch.Tensor] = {
        field.name: getattr(weights, field.name)
        for field in fields(weights)
        if field.name not in ("layers", "mask_embedding")
    }
    for i, layer in enumerate(weights.layers):
        for field in fields(layer):
            value = getattr(layer, field.name)
            if isinstance(value, torch.Tensor):
                state[f"layers.{i}.{field.name}"] = value
            else:
                for part in fields(value):
                    state[f"layers.{i}.{field.name}.{part.name}"] = getattr(value, part.name)
    draft.load_state_dict(state)
    return draft.requires_grad_(False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--problems", type=int)
    arguments = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    print(json.dumps(evaluate_pair(arguments.directory, arguments.problems, device), indent=1))


if __name__ == "__main__":
    main()
