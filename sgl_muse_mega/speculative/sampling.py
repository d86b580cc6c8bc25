"""Sampling parameters and the target distribution they define.

Order of the filters: temperature, softmax, top-k, top-p, min-p, each on the renormalised result of the one before.
This is SGLang's order where it computes the distribution that speculative tokens are verified against
(`build_speculative_verify_target_probs` in srt/speculative/dflash_utils.py: top-k first, top-p on what top-k left) and
in its FlashInfer sampler when min-p is set (srt/layers/sampler.py). Two differences: that sampler without min-p takes
top-p on the unfiltered distribution ("joint"), which matters only when top-k and top-p are both set; and the verify
path knows no min-p, which is applied here like everywhere else. Min-p is relative to the largest probability, so
renormalising does not change it.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from sgl_muse_mega.errors import UserError
from sgl_muse_mega.speculative.philox import SEED_LIMIT

GREEDY_BELOW = 1e-6
"""Temperatures below this one mean greedy, as in SGLang: float32 logits divided by it carry no information."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are chosen. Raises UserError when a field is out of its range."""

    temperature: float = 0.0  # >= 0; 0 is greedy
    top_p: float = 1.0  # in (0, 1]; 1 is off
    top_k: int = 0  # >= 0; 0 is off
    min_p: float = 0.0  # in [0, 1]; 0 is off
    seed: int = 0  # unsigned 64 bit

    def __post_init__(self) -> None:
        if not (0 <= self.temperature < math.inf):
            raise UserError(f"The temperature must be a number >= 0, found {self.temperature}; use 0 for greedy.")
        if not (0 < self.top_p <= 1):
            raise UserError(f"top-p must be above 0 and at most 1, found {self.top_p}; use 1 to switch it off.")
        if self.top_k < 0:
            raise UserError(f"top-k must be >= 0, found {self.top_k}; use 0 to switch it off.")
        if not (0 <= self.min_p <= 1):
            raise UserError(f"min-p must be between 0 and 1, found {self.min_p}; use 0 to switch it off.")
        if not (0 <= self.seed < SEED_LIMIT):
            raise UserError(f"The seed must be between 0 and 2**64 - 1, found {self.seed}; choose another one.")

    @property
    def greedy(self) -> bool:
        """Whether the target distribution is all on its first maximum, so that nothing needs to be drawn."""
        return self.temperature < GREEDY_BELOW or self.top_k == 1


def argmax(logits: Tensor) -> int:
    """The lowest id among the maxima of logits [V]. Raises UserError when there is no maximum (see `check_logits`)."""
    check_logits(logits)
    # numpy documents the first occurrence, torch leaves ties open
    return int(logits.numpy(force=True).argmax())


def check_logits(logits: Tensor) -> None:
    """Raise UserError unless logits [V] are numbers below infinity with a finite maximum; -inf is a masked id."""
    top = float(logits.max())  # NaN wins in torch.max
    if not math.isfinite(top):
        raise UserError(
            f"The target's logits have the maximum {top}, so no token can be chosen; "
            "the weights or the kernels that ran them are broken."
        )


def target_distribution(logits: Tensor, params: SamplingParams) -> Tensor:
    """p over the vocabulary from one row of logits.

    logits float32 [V] -> p float64 [V] on the CPU, sum 1, ids that a filter removed exactly 0. Equal logits rank by id,
    lower first. Greedy parameters give the one-hot of the first maximum. Raises UserError as `check_logits` does.
    """
    if params.greedy:
        p = torch.zeros(logits.shape[0], dtype=torch.float64)
        p[argmax(logits)] = 1.0
        return p
    check_logits(logits)
    z = logits.to("cpu", torch.float64)
    # the maximum goes first: a tiny temperature then gives exp(-inf) = 0 and never inf - inf
    p = torch.softmax((z - z.max()) / params.temperature, dim=0)
    if not (params.top_k or params.top_p < 1 or params.min_p):
        return p
    # float64 logits decide the rank: two logits can be distinct while their probabilities round to the same number
    order = torch.sort(z, descending=True, stable=True).indices
    if params.top_k:
        order = order[: params.top_k]
    ranked = p[order]
    ranked = ranked / ranked.sum()
    if params.top_p < 1:
        # the smallest set whose mass reaches top_p: an id stays while the mass before it has not
        before = torch.cumsum(ranked, dim=0) - ranked
        keep = before < params.top_p
        order, ranked = order[keep], ranked[keep]
    if params.min_p:
        keep = ranked >= params.min_p * ranked[0]
        order, ranked = order[keep], ranked[keep]
    p.zero_()
    p[order] = ranked / ranked.sum()
    return p


def draw(weights: Tensor, u: float) -> int:
    """The first id whose running sum exceeds u * total: weights float64 [V] >= 0 with a positive total, u in [0, 1).

    An id of weight 0 is never returned, also not for u = 0.
    """
    running = torch.cumsum(weights, dim=0)
    return int(torch.searchsorted(running, u * running[-1], right=True))
