"""The accept rules of one verify step (specification section 8), for one sequence.

Row i of the logits is the target's distribution for the position after the row's own. Rows are looked at in order and
only as far as the first rejection.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sgl_muse_mega.errors import UserError
from sgl_muse_mega.speculative.backend import DraftBlock
from sgl_muse_mega.speculative.philox import Purpose
from sgl_muse_mega.speculative.sampling import SamplingParams, argmax, draw, target_distribution

Uniforms = Callable[[int, Purpose], float]
"""(absolute position, purpose) -> uniform in [0, 1)."""


@dataclass(frozen=True, slots=True)
class Accepted:
    """`drafts` were kept and `token` follows: drafts + 1 new tokens, and as many rows to commit (anchor and drafts)."""

    drafts: int
    token: int


def accept_greedy(logits: Tensor, drafts: Sequence[int]) -> Accepted:
    """Keep the longest prefix of the drafts that equals the target's first maxima; the maximum after it follows.

    logits float32 [len(drafts) + 1, V]. Raises UserError for a row without a maximum.
    """
    for row, token in enumerate(drafts):
        best = argmax(logits[row])
        if best != token:
            return Accepted(row, best)
    return Accepted(len(drafts), argmax(logits[len(drafts)]))


def accept_sampled(
    logits: Tensor, block: DraftBlock, params: SamplingParams, position: int, uniforms: Uniforms
) -> Accepted:
    """Lossless acceptance by rejection sampling; the tokens follow the target's distribution whatever the draft is.

    logits float32 [T, V], block of T - 1 slots, `position` that of the first draft. Draft x of slot i with proposal
    probability q(x) is kept iff u q(x) < p_i(x), u in [0, 1): never for p_i(x) = 0, also when u is 0. The first
    rejected slot draws from max(p_i - q, 0); after the last slot the next token is drawn from p itself.
    Raises UserError for a row without a maximum or a proposal probability that is NaN, and ValueError for a block that
    breaks its contract.
    """
    drafts: list[int] = block.tokens.tolist()
    for row, token in enumerate(drafts):
        p = target_distribution(logits[row], params)
        candidates = block.candidates[row].cpu()
        q = block.probabilities[row].to("cpu", torch.float64)
        proposed = candidates == token
        if not proposed.any():
            raise ValueError(f"The draft proposed id {token} in slot {row + 1}, which is not one of its candidates")
        q_token = float(q[proposed].sum())
        if math.isnan(q_token):
            raise UserError(
                f"The draft's probability of id {token} is not a number; the draft's weights or the kernels that ran "
                "them are broken."
            )
        if not 0 <= q_token <= 1 + 1e-3:  # float32 probabilities need not sum to 1 exactly
            raise ValueError(f"The draft gave id {token} in slot {row + 1} the probability {q_token}")
        # q = 0 happens when rounding lets the walk run past the last candidate that has any mass; such a token was
        # never proposed as far as q knows, so it must not pass on 0 < p
        if q_token > 0 and uniforms(position + row, Purpose.ACCEPT) * q_token < float(p[token]):
            continue
        return Accepted(row, draw(residual(p, candidates, q), uniforms(position + row, Purpose.SAMPLE)))
    p = target_distribution(logits[len(drafts)], params)
    return Accepted(len(drafts), draw(p, uniforms(position + len(drafts), Purpose.SAMPLE)))


def residual(p: Tensor, candidates: Tensor, q: Tensor) -> Tensor:
    """max(p - q, 0), not renormalised: p float64 [V], q float64 [k] over the ids `candidates` [k] and 0 elsewhere.

    p itself if nothing is left, which only rounding can cause after a rejection [D-40].
    """
    rest = p.index_add(0, candidates, q, alpha=-1).clamp_(min=0)
    return rest if float(rest.sum()) > 0 else p
