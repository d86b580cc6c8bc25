"""What a draft's probability is worth: conditionals of the lattice, and their calibration from outcomes.

A kernel gets the same bits from this arithmetic. All of it is float32, every operation is rounded by itself (no fused
multiply-add), and sums run from the first candidate to the last.

- Conditionals of a lattice row S[c] (specification 7.3): x_c = S[c] / temperature; top = the largest x that is a
  number; w_c = `exponential`(x_c - top); q_c = w_c / total. A row without a positive total gives zeros. So q of the
  first maximum is exactly 1 / total.
- State: int32 [GROUPS, BINS, 2] = (accepted, expected) in units of 2**-16. The group is that of the draft's depth
  d >= 1 behind the anchor (1, 2 - 3, 4 - 7, 8 -), the bin floor(BINS q), the last one for q = 1.
- `calibrated`: min(q * (accepted / expected), 1), both integers rounded to float32 first.
- A trial is one draft whose parent was kept, so that its own turn came, with its outcome. It adds floor(2**16 q) to
  expected and, if it was kept, 2**16 to accepted. After all trials of a step, a pair of which one has reached LIMIT is
  halved, both rounded up: old outcomes fade.

Only drafts whose turn came are trials. Counting the others (which were thrown away) would let a later decision look at
a draft that is drawn again with the same uniform (`philox`), and would mix "wrong" with "not reached".
"""

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from sgl_muse_mega.errors import UserError

GROUPS, BINS = 4, 16
DEEPEST = (1 << GROUPS) - 1  # drafts behind the anchor that the groups cover
ONE = 1 << 16
LIMIT = 1 << 26
PRIOR_WEIGHT = 4  # expected acceptances that a bin starts with

Row = NDArray[np.float32]
State = NDArray[np.int32]
Trial = tuple[int, float, bool]
"""Depth behind the anchor, the draft's conditional probability, whether the draft was kept."""

_LOG2_E = np.float32(1.4426950408889634)
_LEAST_EXPONENT = np.float32(-80)  # e^-80 is still a normal number, as are its multiples by 1 / 32
_COEFFICIENTS = tuple(
    np.float32(value)
    for value in (
        1.5403530393381608e-4,
        1.3333558146428443e-3,
        9.618129107628477e-3,
        5.550410866482158e-2,
        2.402265069591007e-1,
        6.931471805599453e-1,
        1.0,
    )
)
"""ln(2)^k / k!, k = 6 .. 0."""


def exponential(x: Row) -> Row:
    """e^x for x <= 0 within 2**-16: 0 below -80 and for what is not a number, exactly 1 at 0.

    2^n p(f) with n = floor(x log2(e) + 1/2), f = x log2(e) - n and p Horner's scheme over the Taylor coefficients.
    """
    inside = np.greater_equal(x, _LEAST_EXPONENT)
    scaled = np.where(inside, x, np.float32(0)) * _LOG2_E
    whole = np.floor(scaled + np.float32(0.5))
    rest = scaled - whole
    value = np.full_like(rest, _COEFFICIENTS[0])
    for coefficient in _COEFFICIENTS[1:]:
        value = value * rest + coefficient
    power = ((whole.astype(np.int32) + 127) << 23).view(np.float32)
    return np.where(inside, value * power, np.float32(0))


def conditionals(scores: Row, temperature: float) -> Row:
    """q over the candidates of one slot behind one predecessor: scores float32 [k] -> float32 [k]."""
    with np.errstate(invalid="ignore", over="ignore"):
        scaled = scores / np.float32(temperature)
        numbers = scaled[~np.isnan(scaled)]
        weights = exponential(scaled - (numbers.max() if len(numbers) else np.float32(0)))
    total = np.float32(0)
    for weight in weights:
        total = total + weight
    return weights / total if total > 0 else np.zeros_like(weights)


def place(depth: int, q: float) -> tuple[int, int]:
    """Group and bin of a draft `depth` >= 1 rows behind the anchor with conditional probability q."""
    return depth.bit_length() - 1, min(int(np.float32(q) * np.float32(BINS)), BINS - 1)


def calibrated(state: State, depth: int, q: float) -> np.float32:
    """The probability that a draft is kept once its parent is."""
    accepted, expected = state[place(depth, q)]
    worth = np.float32(q) * (np.float32(accepted) / np.float32(expected))
    return worth if worth < 1 else np.float32(1)


def updated(state: State, trials: Iterable[Trial]) -> State:
    """The state after one step's trials."""
    new = state.copy()
    for depth, q, kept in trials:
        new[place(depth, q)] += (ONE if kept else 0, int(np.float32(q) * np.float32(ONE)))
    full = (new >= LIMIT).any(axis=-1)
    new[full] = (new[full] + 1) >> 1
    return new


def default_prior() -> State:
    """Takes the draft at its word: accepted = expected in every bin."""
    return np.full((GROUPS, BINS, 2), PRIOR_WEIGHT * ONE, dtype=np.int32)


def check_prior(state: State) -> None:
    """Raise UserError unless `state` can be started from: its shape and type, 0 <= accepted, 1 <= expected < LIMIT."""
    if state.shape != (GROUPS, BINS, 2) or state.dtype != np.int32:
        raise UserError(
            f"The calibration is {state.dtype} {list(state.shape)}, but int32 {[GROUPS, BINS, 2]} is needed; start "
            "from the default."
        )
    if state.min() < 0 or state[..., 1].min() < 1 or state.max() >= LIMIT:
        raise UserError(
            f"The calibration holds numbers from {state.min()} to {state.max()}; accepted must be at least 0, expected "
            f"at least 1, both below {LIMIT}; start from the default."
        )
