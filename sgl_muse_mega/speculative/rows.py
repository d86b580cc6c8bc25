"""Which rows a step verifies, and what the step loop does with them: a chain of drafts or a tree."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from sgl_muse_mega.errors import UserError
from sgl_muse_mega.speculative.accept import Uniforms, accept_greedy, accept_sampled
from sgl_muse_mega.speculative.backend import Backend, DraftBlock, TreeBackend
from sgl_muse_mega.speculative.calibration import DEEPEST, State, Trial, check_prior, default_prior
from sgl_muse_mega.speculative.sampling import SamplingParams
from sgl_muse_mega.speculative.tree import MAX_NODES, Tree, accept_tree, grow
from sgl_muse_mega.speculative.width import CostTable, chain_maxima, chain_rows, tree_rows


@dataclass(frozen=True, slots=True, eq=False)
class RowPlan:
    """How the rows of a step are chosen. The default is a chain of the verify width.

    With `nodes` a step verifies a tree of so many rows, the anchor among them, over a block of the verify width. With
    `cost` (float32 [rows + 1], ms) the number of rows is chosen anew in every step, at most the width of a chain or
    the nodes of a tree. Both learn from the outcomes of earlier steps, from `prior` on (`calibration`).
    """

    nodes: int | None = None
    cost: CostTable | None = None
    prior: State | None = None  # None: `default_prior`

    @property
    def learns(self) -> bool:
        """Whether steps depend on the calibration, and need the draft's lattice."""
        return self.nodes is not None or self.cost is not None

    def first_state(self) -> State:
        """The calibration that a text starts with."""
        return default_prior() if self.prior is None else self.prior

    def check(self, width: int) -> None:
        """Raise UserError for a plan that cannot be followed over blocks of `width` rows."""
        if not self.learns:
            return
        if width < 2:
            name = "A token tree" if self.nodes is not None else "An automatic width"
            raise UserError(f"{name} needs drafts, but the verify width is {width}; load a draft, and use 2 or more.")
        if width > DEEPEST + 1:
            raise UserError(f"Trees and automatic widths take blocks of up to {DEEPEST + 1} rows, found {width}.")
        if self.nodes is not None and not 2 <= self.nodes <= MAX_NODES:
            raise UserError(f"A tree has between 2 and {MAX_NODES} nodes, found {self.nodes}; change their number.")
        rows = width if self.nodes is None else self.nodes
        if self.cost is not None and len(self.cost) <= rows:
            raise UserError(f"The cost table ends at {len(self.cost) - 1} rows, but a step can have {rows}; extend it.")
        check_prior(self.first_state())


@dataclass(frozen=True, slots=True)
class Kept:
    """What the target made of the rows: those it kept, the anchor first, and the tokens that the step gives."""

    rows: tuple[int, ...]
    tokens: tuple[int, ...]  # of the kept drafts, and the one that follows: as many as rows


class Chain:
    """The anchor and the first drafts of a block, each row behind the one before it."""

    def __init__(self, anchor: int, block: DraftBlock, maxima: Sequence[float] = ()) -> None:
        """maxima: the largest conditional of each slot, for what the calibration learns."""
        self._drafts: list[int] = block.tokens.tolist()
        self._anchor = anchor
        self._block = block
        self._maxima = maxima

    def __len__(self) -> int:
        return len(self._drafts) + 1

    def verify(self, backend: Backend) -> Tensor:
        return backend.verify([self._anchor, *self._drafts])

    def accept(self, logits: Tensor, params: SamplingParams, position: int, uniforms: Uniforms) -> Kept:
        """`position` is that of the first draft."""
        if params.greedy:
            accepted = accept_greedy(logits, self._drafts)
        else:
            accepted = accept_sampled(logits, self._block, params, position, uniforms)
        return Kept(tuple(range(accepted.drafts + 1)), (*self._drafts[: accepted.drafts], accepted.token))

    def commit(self, backend: Backend, rows: Sequence[int]) -> None:
        backend.commit(len(rows))

    def trials(self, kept: Kept) -> list[Trial]:
        """The slots whose turn came."""
        drafts = len(kept.rows) - 1
        return [(slot, self._maxima[slot - 1], slot <= drafts) for slot in range(1, min(drafts + 2, len(self)))]


class Branches:
    """A tree of drafts behind the anchor."""

    def __init__(self, tree: Tree) -> None:
        self._tree = tree

    def __len__(self) -> int:
        return len(self._tree)

    def verify(self, backend: Backend) -> Tensor:
        return cast(TreeBackend, backend).verify_tree(self._tree.tokens, self._tree.parents)

    def accept(self, logits: Tensor, params: SamplingParams, position: int, uniforms: Uniforms) -> Kept:
        """`position` is that of the anchor's children."""
        path = accept_tree(logits, self._tree, params, position, uniforms)
        return Kept((0, *path.rows), (*(self._tree.tokens[row] for row in path.rows), path.token))

    def commit(self, backend: Backend, rows: Sequence[int]) -> None:
        cast(TreeBackend, backend).commit_path(rows)

    def trials(self, kept: Kept) -> list[Trial]:
        return self._tree.trials(kept.rows)


def anchor_alone(anchor: int) -> Chain:
    """The row of plain decoding."""
    nothing = torch.empty(0, dtype=torch.int64)
    return Chain(anchor, DraftBlock(nothing, nothing.reshape(0, 1), torch.empty(0, 1)))


def choose_rows(
    plan: RowPlan, state: State, anchor: int, block: DraftBlock, params: SamplingParams, room: int
) -> Chain | Branches:
    """The rows of a step from the draft's block; `room` is the most rows that the context allows."""
    if not plan.learns:
        return Chain(anchor, block)
    assert block.lattice is not None, "trees and automatic widths need the draft's lattice"
    temperature = 1.0 if params.greedy else params.temperature
    if plan.nodes is not None:
        nodes = min(plan.nodes, room)
        tree = grow(anchor, block.candidates, block.lattice, state, nodes=nodes, temperature=temperature)
        return Branches(tree if plan.cost is None else tree.first(tree_rows(tree, plan.cost)))
    assert plan.cost is not None
    maxima = chain_maxima(block, block.lattice, temperature)
    drafts = chain_rows(state, maxima, plan.cost) - 1
    first = DraftBlock(block.tokens[:drafts], block.candidates[:drafts], block.probabilities[:drafts])
    return Chain(anchor, first, maxima)
