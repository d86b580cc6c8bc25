"""Token trees: which nodes of the selector's lattice a step verifies, and which of them it keeps.

Row 0 of a plan is the anchor; every other row is a candidate behind its parent's path. The lattice S[slot, predecessor,
candidate] (specification 7.3) gives the conditional q of a child, `calibration` what it is worth, and a node's
probability is the product along its path:

    P(anchor) = 1,   P(child) = P(parent) * calibrated(depth, q),   below 2**-100: 0

in float32, rounded after each operation. Rows are chosen best first: row r is the child of rows 0 .. r - 1, not chosen
yet, with the largest P; ties go to the lower parent row, then to the lower candidate index. P never grows along a path,
so the n best nodes are the first n of any longer plan.

Keeping
-------
From the anchor on, the target decides the token behind a row (its first maximum, or a draw from its distribution); if a
child of the row has that token, the child is kept and decides the next one, otherwise the text goes on with the token.
The nodes are a function of the committed text and of outcomes at committed positions: nothing is drawn to choose them.
Multi-branch rejection with one-hot proposals comes to the same rule: rejecting x_1, then x_2, ... in turn from p and
its residuals keeps x_i with probability p(x_i) and otherwise draws from p without the x_i. Every token is thus drawn
from the target's own distribution, by inverse transform with the SAMPLE uniform of its position. The text of a seed is
therefore that of plain decoding with this seed, up to the rounding of the verify rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from sgl_muse_mega.speculative.accept import Uniforms
from sgl_muse_mega.speculative.calibration import State, Trial, calibrated, conditionals
from sgl_muse_mega.speculative.philox import Purpose
from sgl_muse_mega.speculative.sampling import SamplingParams, argmax, draw, target_distribution

MAX_NODES = 16
_LEAST = np.float32(2.0**-100)  # products of what is larger are normal numbers, so flushing them plays no part
_ZERO = np.float32(0)


@dataclass(frozen=True, slots=True)
class Tree:
    """The rows of a step, best first. Row 0 is the anchor with parent -1, depth 0, q and probability 1."""

    parents: tuple[int, ...]  # parents[r] < r
    depths: tuple[int, ...]  # the row's position is length + depth
    tokens: tuple[int, ...]
    conditionals: tuple[float, ...]  # q of the row behind its parent, float32
    probabilities: tuple[float, ...]  # P, float32

    def __len__(self) -> int:
        return len(self.parents)

    def first(self, rows: int) -> "Tree":
        """The plan of the `rows` best nodes."""
        return Tree(
            self.parents[:rows],
            self.depths[:rows],
            self.tokens[:rows],
            self.conditionals[:rows],
            self.probabilities[:rows],
        )

    def ancestors(self) -> NDArray[np.bool_]:
        """[n, n]: row i sees row j, itself or one on its path."""
        return ancestor_mask(self.parents)

    def trials(self, path: Sequence[int]) -> list[Trial]:
        """What the calibration learns: the children of the anchor and of the rows in `path`, which were kept."""
        kept = {0, *path}
        return [
            (self.depths[row], self.conditionals[row], row in kept)
            for row in range(1, len(self))
            if self.parents[row] in kept
        ]


def ancestor_mask(parents: Sequence[int]) -> NDArray[np.bool_]:
    """bool [n, n] from parents[r] < r, -1 for the root."""
    mask = np.eye(len(parents), dtype=np.bool_)
    for row, parent in enumerate(parents):
        if parent >= 0:
            mask[row] |= mask[parent]
    return mask


def grow(
    anchor: int, candidates: Tensor, lattice: Tensor, state: State, *, nodes: int, temperature: float = 1.0
) -> Tree:
    """The `nodes` best rows, the anchor among them; fewer if the lattice has no more.

    candidates int64 [slots, k], lattice float32 [slots, k, k] (slot 0 has the same row for every predecessor);
    `temperature` of the request, 1 for greedy.
    """
    ids, scores = candidates.numpy(force=True), lattice.float().numpy(force=True)
    slots, k = ids.shape
    parents, depths, tokens, behind, probability = [-1], [0], [anchor], [np.float32(1)], [np.float32(1)]
    indices = [0]  # of the row among its slot's candidates, the predecessor index of its children
    frontier = np.full((nodes, k), -1, dtype=np.float32)  # P of the children not chosen yet, -1 for none
    children = np.zeros((nodes, k), dtype=np.float32)  # q
    while True:
        row, depth = len(parents) - 1, depths[-1]
        if depth < slots:
            children[row] = conditionals(scores[depth, indices[row]], temperature)
            for c, q in enumerate(children[row]):
                product = probability[row] * calibrated(state, depth + 1, q)
                frontier[row, c] = product if product >= _LEAST else _ZERO
        parent, index = divmod(int(frontier.argmax()), k)  # numpy documents the first of equal maxima
        if len(parents) == nodes or frontier[parent, index] < 0:
            break
        parents.append(parent)
        depths.append(depths[parent] + 1)
        tokens.append(int(ids[depths[parent], index]))
        behind.append(children[parent, index])
        probability.append(frontier[parent, index])
        indices.append(index)
        frontier[parent, index] = -1
    return Tree(tuple(parents), tuple(depths), tuple(tokens), tuple(map(float, behind)), tuple(map(float, probability)))


@dataclass(frozen=True, slots=True)
class AcceptedPath:
    """Rows kept behind the anchor, in order, and the token that follows them."""

    rows: tuple[int, ...]
    token: int


def accept_tree(logits: Tensor, tree: Tree, params: SamplingParams, position: int, uniforms: Uniforms) -> AcceptedPath:
    """Follow the target's own choices through the tree; `position` is that of the tokens behind the anchor.

    logits float32 [n, V]. Of children with equal tokens the lowest row is taken. Raises UserError for a row without a
    maximum.
    """
    row = 0
    path: list[int] = []
    while True:
        if params.greedy:
            token = argmax(logits[row])
        else:
            p = target_distribution(logits[row], params)
            token = draw(p, uniforms(position + tree.depths[row], Purpose.SAMPLE))
        child = next((r for r in range(1, len(tree)) if tree.parents[r] == row and tree.tokens[r] == token), None)
        if child is None:
            return AcceptedPath(tuple(path), token)
        path.append(child)
        row = child
