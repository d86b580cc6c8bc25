"""Trains the tiny draft against the frozen, quantised target."""

import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from training.data import Examples
from training.draft_model import Blocks, Draft
from training.evaluate import accept_length
from training.layout import Layout
from training.model import Target
from training.optimisation import optimiser, schedule, set_rate

DECAY = 0.85  # weight of slot t is DECAY ** (t - 1): a late slot only counts when the earlier ones were accepted


@dataclass(frozen=True, slots=True)
class DraftSettings:
    steps: int = 800
    batch: int = 256
    anchors: int = 16  # blocks per sequence and step
    rate: float = 2e-3
    evaluate_every: int = 500


def train_draft(
    draft: Draft, target: Target, stream: Iterator[Examples], generated: Examples, settings: DraftSettings
) -> list[dict[str, float]]:
    """Trains in place; returns the progress table (step, losses, accept length on part of `generated`, which holds the
    target's own greedy answers)."""
    optimizer = optimiser(draft, settings.rate)
    progress: list[dict[str, float]] = []
    begin = time.perf_counter()
    for step in range(settings.steps):
        set_rate(optimizer, settings.rate * schedule(step, settings.steps))
        examples = next(stream)
        layout = Layout.of(examples.lengths, examples.ids.shape[1])
        with torch.no_grad():
            taps = target(layout.flatten(examples.ids).long(), layout, draft.config.target_layer_ids).taps
        start = _draw_anchors(examples, settings.anchors)
        base, lattice = draft_losses(draft, target, examples, layout, taps, start)
        optimizer.zero_grad(set_to_none=True)
        (base + lattice).backward()
        torch.nn.utils.clip_grad_norm_(draft.parameters(), 1.0)
        optimizer.step()
        last = step + 1 == settings.steps
        if step % 100 == 0 or last:
            row = {
                "step": step + 1,
                "base_loss": base.item(),
                "lattice_loss": lattice.item(),
                "seconds": time.perf_counter() - begin,
            }
            if (step + 1 > 1 and step % settings.evaluate_every == 0) or last:
                row["accept_length"] = accept_length(target, draft, generated.rows(0, 250))["pooled"]
            progress.append(row)
            print("draft", {name: round(value, 4) for name, value in row.items()}, flush=True)
    return progress


def draft_losses(
    draft: Draft, target: Target, examples: Examples, layout: Layout, taps: tuple[Tensor, ...], start: Tensor
) -> tuple[Tensor, Tensor]:
    """Position-decayed loss of the independent slots, and of the lattice with the true predecessor.

    A slot whose true token is not among the candidates has no lattice loss: the selector cannot choose it.
    """
    width = draft.config.block_size
    hf = draft(taps, layout, Blocks.of(target, draft.config, examples.ids, start))[:, :, 1:]
    position = start[..., None] + torch.arange(width, device=start.device)
    valid = (position < examples.lengths[:, None, None])[..., 1:]
    tokens = _gather(examples.ids, position)
    logits = target.head(hf)
    weight = DECAY ** torch.arange(width - 1, device=start.device) * valid
    base = F.cross_entropy(logits.flatten(0, 2), tokens[..., 1:].flatten(), reduction="none").view(weight.shape)
    scores, candidates = logits.topk(draft.config.selector_top_k, dim=-1)
    hit = candidates == tokens[..., 1:, None]
    total = torch.log_softmax(scores + draft.pair_scores(hf, tokens[..., :-1], candidates), -1)
    lattice_weight = weight * hit.any(-1)
    lattice = -(total * hit).sum(-1)
    return (base * weight).sum() / weight.sum(), (lattice * lattice_weight).sum() / lattice_weight.sum().clamp(min=1)


def _draw_anchors(examples: Examples, count: int) -> Tensor:
    """Uniform positions from the first answer token to the one before the last, int64 [B, count]."""
    low, high = examples.prompts[:, None], examples.lengths[:, None] - 1
    u = torch.rand((low.shape[0], count), device=low.device)
    return low + (u * (high - low)).long()


def _gather(ids: Tensor, position: Tensor) -> Tensor:
    """Tokens at the positions [B, A, W], clamped to the grid, int64."""
    flat = position.flatten(1).clamp(max=ids.shape[1] - 1)
    return ids.long().gather(1, flat).view(position.shape)
