"""What the step loop needs from a pair of models, whatever runs them."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from torch import Tensor

from sgl_muse_mega.errors import UserError
from sgl_muse_mega.speculative.calibration import State
from sgl_muse_mega.speculative.sampling import SamplingParams

if TYPE_CHECKING:
    from sgl_muse_mega.speculative.rows import RowPlan  # it builds on this module


@dataclass(frozen=True, slots=True)
class DraftBlock:
    """The proposals for one step (specification section 7.3).

    Row t proposes the token at position length + t + 1. `probabilities` must be the numbers that the walk sampled
    from, in the same precision: acceptance divides by them.
    """

    tokens: Tensor  # int64 [W - 1]
    candidates: Tensor  # int64 [W - 1, k], the ids that could have been proposed
    probabilities: Tensor  # float32 [W - 1, k], q over the candidates; one-hot rows for a greedy walk
    lattice: Tensor | None = None  # [W - 1, k, k]: S[slot, predecessor, candidate]; trees and automatic widths need it


class Backend(Protocol):
    """One sequence at a time: a target with its KV cache and, if `has_draft`, a draft with its own.

    Calls are synchronous: a result is complete when the call returns, so that the loop's times mean something.
    """

    @property
    def vocab_size(self) -> int: ...

    @property
    def max_context(self) -> int:
        """Number of positions; rows are only ever written at 0 .. max_context - 1."""

    @property
    def has_draft(self) -> bool: ...

    @property
    def width_limit(self) -> int:
        """Most rows one `verify` takes."""

    @property
    def length(self) -> int:
        """Committed rows, those whose KV is part of the sequence."""

    def prefill(self, ids: Sequence[int]) -> Tensor:
        """Start a sequence: target KV and draft context of all prompt rows; float32 logits [V] of the last row."""

    def draft(self, anchor: int, width: int, temperature: float, uniforms: Sequence[float]) -> DraftBlock:
        """Propose the width - 1 tokens after `anchor`, which sits at position `length`.

        Temperature 0 walks greedily and gets no uniforms; otherwise `uniforms` holds width - 1 of them, one a slot.
        """

    def verify(self, tokens: Sequence[int]) -> Tensor:
        """Float32 logits [T, V] for tokens[0] = anchor and the drafts, at positions length .. length + T - 1.

        Their KV rows are written but not part of the sequence until `commit`.
        """

    def commit(self, rows: int) -> None:
        """Make the first `rows` rows of the last verify part of the sequence and write their draft context."""


@runtime_checkable
class TreeBackend(Backend, Protocol):
    """A backend whose verify also takes trees, and whose draft blocks have their lattice."""

    def verify_tree(self, tokens: Sequence[int], parents: Sequence[int]) -> Tensor:
        """Float32 logits [T, V] of rows that see the committed rows, themselves and their ancestors.

        tokens[0] = anchor, parents[0] = -1, parents[r] < r; a row's position is length plus its depth. Row r's KV is
        written where position length + r belongs, and is not part of the sequence until `commit_path`.
        """

    def commit_path(self, rows: Sequence[int]) -> None:
        """Make `rows` of the last verify part of the sequence: 0, then each a child of the one before it.

        Their KV moves to the places of their positions, and their draft context is written.
        """


class StepReport(Protocol):
    """What one whole step did."""

    @property
    def tokens(self) -> tuple[int, ...]:
        """What the step added to the text, cut behind the token that ends it."""

    @property
    def rows(self) -> int:
        """Rows that were verified for their own sake."""

    @property
    def accepted(self) -> int:
        """Drafts the target kept, before cutting."""

    @property
    def reason(self) -> str | None:
        """Why the text ended ("stop", "length", "context"), or None."""


@runtime_checkable
class StepBackend(Protocol):
    """A backend that runs whole steps by itself: draft, verify, accept, commit and the end of the text.

    It has what `Backend` has apart from `draft`, `verify` and `commit`, and follows the same rules to the token.
    """

    @property
    def vocab_size(self) -> int: ...

    @property
    def max_context(self) -> int: ...

    @property
    def has_draft(self) -> bool: ...

    @property
    def width_limit(self) -> int: ...

    @property
    def length(self) -> int: ...

    def prefill(self, ids: Sequence[int]) -> Tensor: ...

    @property
    def calibration(self) -> State:
        """What the steps of this text have learnt, if its plan learns."""

    def begin(
        self,
        anchor: int,
        params: SamplingParams,
        *,
        width: int,
        max_new_tokens: int,
        stop_ids: Collection[int],
        plan: "RowPlan",
    ) -> None:
        """Decoding starts behind `anchor`, the first of `max_new_tokens` new tokens."""

    def next_step(self) -> StepReport:
        """Run the next step, of at most max_context - 1 - length rows, or wait for it if it was started ahead."""


def check_prompt(ids: Sequence[int], max_context: int) -> None:
    """What every `prefill` refuses: raises UserError for an empty prompt and for one the context cannot hold."""
    if not ids:
        raise UserError("The prompt is empty; at least one token is needed.")
    if len(ids) > max_context:
        raise UserError(f"The prompt has {len(ids)} tokens, but the context holds {max_context}.")


def check_rows(end: int, max_context: int) -> None:
    """What every `verify` refuses: raises UserError when the row before position `end` lies outside the context."""
    if end > max_context:
        raise UserError(f"Position {end - 1} lies outside the context of {max_context} positions.")
