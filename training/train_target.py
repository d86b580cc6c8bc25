"""Trains the tiny target, NVFP4 experts included, on freshly drawn problems."""

import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from training.data import Examples
from training.evaluate import HeldOut, greedy
from training.layout import Layout
from training.model import Target, TrainingOutput
from training.optimisation import optimiser, schedule, set_rate

# The question's words and numbers are drawn at random: little to learn there beyond the phrasing.
QUESTION_WEIGHT = 0.1


@dataclass(frozen=True, slots=True)
class TargetSettings:
    steps: int = 2100
    batch: int = 256
    rate: float = 2e-3
    bias_rate: float = 1e-3  # step of the selection bias towards even expert load
    evaluate_every: int = 1000


def train_target(
    target: Target, stream: Iterator[Examples], validation: HeldOut, settings: TargetSettings
) -> list[dict[str, float]]:
    """Trains in place; returns the progress table (step, losses, exact answers on part of the validation set)."""
    optimizer = optimiser(target, settings.rate)
    progress: list[dict[str, float]] = []
    begin = time.perf_counter()
    for step in range(settings.steps):
        factor = schedule(step, settings.steps)
        set_rate(optimizer, settings.rate * factor)
        examples = next(stream)
        layout = Layout.of(examples.lengths, examples.ids.shape[1])
        ids = layout.flatten(examples.ids).long()
        output = target(ids, layout)
        answer, question = _losses(output.logits, ids, layout, examples.prompts)
        optimizer.zero_grad(set_to_none=True)
        (answer + QUESTION_WEIGHT * question).backward()
        torch.nn.utils.clip_grad_norm_(target.parameters(), 1.0)
        optimizer.step()
        balance(target, output, settings.bias_rate * factor)
        last = step + 1 == settings.steps
        if step % 100 == 0 or last:
            row = {
                "step": step + 1,
                "answer_loss": answer.item(),
                "question_loss": question.item(),
                "load_max_over_mean": float((output.load.amax(-1) / output.load.mean(-1)).max()),
                "seconds": time.perf_counter() - begin,
            }
            if (step + 1 > 1 and step % settings.evaluate_every == 0) or last:
                part = validation.part(250)
                row["exact"] = part.exact_rate(greedy(target, part.examples))
            progress.append(row)
            print("target", {name: round(value, 4) for name, value in row.items()}, flush=True)
    return progress


@torch.no_grad()
def balance(target: Target, output: TrainingOutput, rate: float) -> None:
    """Moves each selection bias one step against its expert's load; no loss term is involved."""
    for layer, load in zip(target.layers, output.load, strict=True):
        layer.router_bias += rate * torch.sign(load.mean() - load)


def _losses(logits: Tensor, ids: Tensor, layout: Layout, prompts: Tensor) -> tuple[Tensor, Tensor]:
    """Mean next-token loss over answer tokens and over question tokens."""
    loss = F.cross_entropy(logits[:-1], ids[1:], reduction="none")
    follows = layout.column[1:] > 0  # the first token of a sequence is given
    answer = (layout.column[1:] >= prompts[layout.row[1:]]) & follows
    question = follows & ~answer
    return (loss * answer).sum() / answer.sum(), (loss * question).sum() / question.sum()
