"""Optimiser and learning-rate schedule shared by both trainings."""

import torch
from torch import nn

WEIGHT_DECAY = 0.05


def optimiser(model: nn.Module, rate: float) -> torch.optim.AdamW:
    """AdamW with decay on matrices only; tables (embedding, head, codebooks) are left alone, because the rows of tokens
    that never occur, the mask token's among them, would decay to zero."""
    tables = ("embed_tokens", "lm_head", "predecessor_codebook", "successor_codebook")
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    decayed = [p for name, p in named if p.ndim >= 2 and name not in tables]
    others = [p for name, p in named if p.ndim < 2 or name in tables]
    groups = [{"params": decayed, "weight_decay": WEIGHT_DECAY}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.98), fused=next(model.parameters()).is_cuda)


def schedule(step: int, steps: int) -> float:
    """Factor on the learning rate: 3 % warm-up, constant, linear to zero over the second half."""
    return min(1.0, (step + 1) / max(1, round(0.03 * steps)), 2 * (steps - step) / steps)


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate
