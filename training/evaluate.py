"""Batched greedy evaluation: exact answers, and accept length by replaying the greedy text."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from tokenizers import Tokenizer
from torch import Tensor

from training.data import Examples, encode
from training.draft_model import Blocks, Draft
from training.layout import Layout, pad_width
from training.model import Target
from training.problems import Problem, final_answer
from training.tokenizer import EOS, PAD

# Sequences at once: every expert is computed for every token, and a replay has a block at every answer position.
_GREEDY_ROWS = 64
_REPLAY_ROWS = 16


@dataclass(frozen=True, slots=True)
class HeldOut:
    """Problems that training never sees, and their results as text."""

    tokenizer: Tokenizer
    examples: Examples
    results: tuple[str, ...]

    @classmethod
    def of(cls, tokenizer: Tokenizer, items: Sequence[Problem], device: torch.device) -> "HeldOut":
        return cls(tokenizer, encode(tokenizer, list(items)).to(device), tuple(p.result for p in items))

    def part(self, count: int) -> "HeldOut":
        return HeldOut(self.tokenizer, self.examples.rows(0, count), self.results[:count])

    def exact_rate(self, generated: Examples) -> float:
        """Share of the generated answers whose number after "####" is the right one."""
        rows = zip(generated.ids.tolist(), generated.prompts.tolist(), generated.lengths.tolist(), strict=True)
        texts = self.tokenizer.decode_batch([ids[begin:end] for ids, begin, end in rows])
        return sum(final_answer(text) == result for text, result in zip(texts, self.results, strict=True)) / len(texts)


@torch.no_grad()
def greedy(target: Target, examples: Examples) -> Examples:
    """Greedy answers to the prompts of `examples`: prompt and generated tokens up to and with the end of text, or
    to the end of the grid. Every step recomputes the unfinished sequences, which is cheap at this size."""
    ids, lengths = examples.ids.clone(), examples.prompts.clone()
    ids[torch.arange(ids.shape[1], device=ids.device) >= lengths[:, None]] = PAD
    for rows in torch.arange(len(lengths), device=ids.device).split(_GREEDY_ROWS):
        _extend(target, ids, lengths, rows)
    return Examples(ids, lengths, examples.prompts)


def _extend(target: Target, ids: Tensor, lengths: Tensor, active: Tensor) -> None:
    """Appends greedy tokens in place to the rows `active` until each has ended."""
    while len(active):
        layout = Layout.of(lengths[active], pad_width(int(lengths[active].max())))
        logits = target(layout.flatten(ids[active, : layout.width]).long(), layout).logits
        token = logits[lengths[active].cumsum(0) - 1].argmax(-1)
        ids[active, lengths[active]] = token.to(ids.dtype)
        lengths[active] += 1
        active = active[(token != EOS) & (lengths[active] < ids.shape[1])]


@torch.no_grad()
def accept_length(target: Target, draft: Draft, generated: Examples) -> dict[str, float]:
    """Tokens per verify step of greedy speculation, replayed over the target's own greedy text `generated`.

    "pooled" is all tokens over all steps, "mean" the average of each sequence's ratio. The first token comes from the
    prompt's logits and counts for no step; a step's tokens past the end of text do not count.
    """
    tokens = steps = 0
    ratios = []
    for begin in range(0, len(generated.lengths), _REPLAY_ROWS):
        rows = generated.rows(begin, begin + _REPLAY_ROWS)
        for prompt, end, accepted in zip(
            rows.prompts.tolist(), rows.lengths.tolist(), _accepted(target, draft, rows).tolist(), strict=True
        ):
            position, count = prompt, 0
            while position < end - 1:
                position += accepted[position - prompt] + 1
                count += 1
            if count:
                tokens, steps = tokens + end - 1 - prompt, steps + count
                ratios.append((end - 1 - prompt) / count)
    return {"pooled": tokens / max(steps, 1), "mean": sum(ratios) / max(len(ratios), 1), "steps": float(steps)}


def _accepted(target: Target, draft: Draft, rows: Examples) -> Tensor:
    """Accepted draft tokens of a block at every answer position, never past the last token: int64 [B, answer]."""
    layout = Layout.of(rows.lengths, rows.ids.shape[1])
    taps = target(layout.flatten(rows.ids).long(), layout, draft.config.target_layer_ids).taps
    count = int((rows.lengths - rows.prompts).max())
    start = rows.prompts[:, None] + torch.arange(count, device=rows.ids.device)
    start = torch.minimum(start, rows.lengths[:, None] - 1)
    hf = draft(taps, layout, Blocks.of(target, draft.config, rows.ids, start))[:, :, 1:]
    path = draft.walk(hf, target.head(hf), rows.ids.long().gather(1, start))
    position = start[..., None] + 1 + torch.arange(path.shape[-1], device=start.device)
    inside = position < rows.lengths[:, None, None]
    truth = rows.ids.long().gather(1, position.flatten(1).clamp(max=rows.ids.shape[1] - 1)).view(position.shape)
    return ((path == truth) & inside).long().cumprod(-1).sum(-1)
