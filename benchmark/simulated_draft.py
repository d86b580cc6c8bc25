"""A simulated draft of a given accept length: lattices and the text that they should have met.

Every anchor position P has a block of 15 slots with 16 candidates behind each of 16 predecessors.

    z[i, p, c]   = sqrt(0.6) u[i, c] + sqrt(0.4) v[i, p, c]            u, v standard normal
    sharpness a  = exp(level + h(P + i)) FADING^(i - 1)                h: how easy the text is there, AR(1)
    text         ~ softmax(a z[i, p, .]) behind the text's own path p, or with probability MISSING none of the 16
    draft        S = boldness a z + noise e                            e standard normal

So the draft's probabilities say much about the text and are not right: too sure of themselves (boldness > 1), off at
random (noise), ignorant of what is missing, and worse deeper in the block. The text is drawn, which makes every rule
accept as the greedy one does: a draft is kept when the text is the same. `level` alone is fitted, to an accept length
of fixed width 8; the rest is the same for all profiles. (boldness, noise) is INFORMED or ROUGH.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

SLOTS, K = 15, 16
EASE_SPREAD, EASE_MEMORY = 0.5, 0.9  # standard deviation and correlation from token to token of h
FADING = 0.97
MISSING = 0.02
INFORMED = (1.3, 0.7)
ROUGH = (1.8, 2.5)  # more wrong: what a profile says about the rules should not hang on one draft


@dataclass(frozen=True, slots=True)
class Text:
    """One text of n positions, each of them with the block that a step anchored there would get."""

    lattice: NDArray[np.float32]  # [n, SLOTS, K, K]
    truth: NDArray[np.int64]  # [n, SLOTS]: index of the text's token among the candidates, -1 from where it is missing
    chain: NDArray[np.int64]  # [n, SLOTS]: the greedy walk

    def kept(self) -> NDArray[np.int64]:
        """[n]: drafts of the greedy walk that agree with the text before the first that does not."""
        return np.cumprod(self.chain == self.truth, axis=1).sum(axis=1)


def simulate(level: float, positions: int, seed: int, rough: bool = False) -> Text:
    """A text and its blocks; the random numbers depend on the seed alone."""
    generator = np.random.default_rng(seed)
    ease = np.empty(positions + SLOTS)
    ease[0] = generator.normal()
    for t in range(1, len(ease)):
        ease[t] = EASE_MEMORY * ease[t - 1] + np.sqrt(1 - EASE_MEMORY**2) * generator.normal()
    z = np.empty((positions, SLOTS, K, K), dtype=np.float32)
    z[:] = np.sqrt(0.6) * generator.standard_normal((positions, SLOTS, 1, K), dtype=np.float32)
    z += np.sqrt(0.4) * generator.standard_normal(z.shape, dtype=np.float32)
    z[:, 0] = z[:, 0, :1]
    noise = generator.standard_normal(z.shape, dtype=np.float32)
    noise[:, 0] = noise[:, 0, :1]
    slots = np.arange(SLOTS)
    sharpness = np.exp(level + EASE_SPREAD * ease[np.arange(positions)[:, None] + slots]) * FADING**slots
    scores = (sharpness.astype(np.float32)[:, :, None, None]) * z
    truth = _text(scores, generator.random((positions, SLOTS)), generator.random((positions, SLOTS)) < MISSING)
    boldness, sway = ROUGH if rough else INFORMED
    lattice = boldness * scores + sway * noise
    return Text(lattice.astype(np.float32), truth, _walk(lattice))


def fitted_level(accept_length: float, positions: int, seeds: Sequence[int], rough: bool, width: int = 8) -> float:
    """The level at which steps of a fixed width give so many tokens, over the texts of `seeds`."""
    low, high = 0.0, 4.0
    for _ in range(9):
        level = (low + high) / 2
        steps = sum(fixed_steps(simulate(level, positions, seed, rough).kept(), width) for seed in seeds)
        low, high = (level, high) if positions * len(seeds) / steps < accept_length else (low, level)
    return (low + high) / 2


def fixed_steps(kept: NDArray[np.int64], width: int) -> int:
    """Steps of a fixed width through a text; kept[P] drafts are right in the block anchored at P."""
    at = steps = 0
    while at < len(kept):
        at += int(min(kept[at], width - 1)) + 1
        steps += 1
    return steps


def _text(scores: NDArray[np.float32], uniforms: NDArray[np.float64], missing: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Draws the path of every block by inverse transform."""
    rows = np.arange(len(scores))
    p = np.zeros(len(scores), dtype=np.int64)
    gone = np.zeros(len(scores), dtype=np.bool_)
    truth = np.empty(scores.shape[:2], dtype=np.int64)
    for slot in range(SLOTS):
        row = scores[rows, slot, p].astype(np.float64)
        weights = np.exp(row - row.max(axis=1, keepdims=True))
        running = np.cumsum(weights / weights.sum(axis=1, keepdims=True), axis=1)
        p = np.minimum((running <= uniforms[:, slot, None]).sum(axis=1), K - 1)
        gone |= missing[:, slot]
        truth[:, slot] = np.where(gone, -1, p)
    return truth


def _walk(lattice: NDArray[np.float32]) -> NDArray[np.int64]:
    rows = np.arange(len(lattice))
    p = np.zeros(len(lattice), dtype=np.int64)
    chain = np.empty(lattice.shape[:2], dtype=np.int64)
    for slot in range(SLOTS):
        p = lattice[rows, slot, p].argmax(axis=1)
        chain[:, slot] = p
    return chain
