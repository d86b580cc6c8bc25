"""The step loop: prefill, then draft, verify, accept and commit until something ends the text.

With n prompt tokens and c new ones the backend holds n + c - 1 committed rows: the last token, the anchor of the next
step, has no KV yet. Every step keeps this, also one that is cut by a stop token or by the length limit.
"""

import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Literal, cast

from torch import Tensor

from sgl_muse_mega.errors import UserError
from sgl_muse_mega.speculative.backend import Backend, StepBackend, TreeBackend
from sgl_muse_mega.speculative.calibration import State, updated
from sgl_muse_mega.speculative.philox import Purpose, uniform
from sgl_muse_mega.speculative.rows import Branches, Chain, RowPlan, anchor_alone, choose_rows
from sgl_muse_mega.speculative.sampling import SamplingParams, argmax, draw, target_distribution

FinishReason = Literal["stop", "length", "context"]
"""A stop token (it is the last id of the output), `max_new_tokens`, or the context is full; the earliest of them."""


@dataclass(frozen=True, slots=True)
class StepEvent:
    """What one step added to the text. Step 0 is the prefill, which always gives one token."""

    step: int
    tokens: tuple[int, ...]  # those that are part of the output: after cutting at a stop token or limit
    drafted: int  # rows that were verified - 1
    accepted: int  # drafts the target kept, before cutting
    finish_reason: FinishReason | None


@dataclass(slots=True)
class Stats:
    """Counts and seconds of one generation so far.

    The first token comes from the prefill and belongs to no verify step. `accept_length` leaves it out; the published
    convention C / V, completion tokens over verify steps, counts it and is `completion_per_step`.
    """

    prompt_tokens: int
    completion_tokens: int = 0  # C: all new ids, with the first token and a final stop token
    steps: int = 0  # V: verify steps
    tokens_per_step: dict[int, int] = field(default_factory=dict)  # how many steps added how many tokens
    rows_per_step: dict[int, int] = field(default_factory=dict)  # how many steps verified how many rows
    finish_reason: FinishReason | None = None
    prefill_seconds: float = 0.0
    draft_seconds: float = 0.0  # proposing, and writing the draft context of committed rows
    verify_seconds: float = 0.0
    host_seconds: float = 0.0  # the rest of the steps: uniforms, accept rule, bookkeeping

    @property
    def accept_length(self) -> float:
        """Mean tokens a verify step added to the output, kept drafts and the target's own token: (C - 1) / V.

        0 without a step. Between 1 and the verify width.
        """
        return (self.completion_tokens - 1) / self.steps if self.steps else 0.0

    @property
    def completion_per_step(self) -> float:
        """C / V, the accept length of the published cards. 0 without a step."""
        return self.completion_tokens / self.steps if self.steps else 0.0

    @property
    def mean_rows(self) -> float:
        """Mean rows that a verify step had; 0 without a step."""
        return sum(rows * n for rows, n in self.rows_per_step.items()) / self.steps if self.steps else 0.0

    @property
    def step_seconds(self) -> float:
        """Time in steps: prefill and whatever the consumer does between steps are not in it."""
        return self.draft_seconds + self.verify_seconds + self.host_seconds

    @property
    def tokens_per_second(self) -> float:
        """Tokens of the steps over the time in steps; 0 without a step."""
        return (self.completion_tokens - 1) / self.step_seconds if self.steps else 0.0


class Generation:
    """One text in the making: iterate over it for the step events; `tokens` and `stats` hold all so far.

    Make it with `generate`. It can be iterated once, and left at any event.
    """

    def __init__(
        self,
        backend: Backend | StepBackend,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        width: int,
        max_new_tokens: int,
        stop_ids: frozenset[int],
        plan: RowPlan,
    ) -> None:
        self.tokens: list[int] = []
        self.stats = Stats(prompt_tokens=len(prompt_ids))
        self._backend = backend
        self._prompt_ids = prompt_ids
        self._params = params
        self._width = width
        self._max_new_tokens = max_new_tokens
        self._stop_ids = stop_ids
        self._plan = plan
        self._state = plan.first_state()
        self._uniform = partial(uniform, params.seed)

    @property
    def calibration(self) -> State:
        """What trees and automatic widths have learnt about the draft so far; another text's plan can start with it."""
        if self._plan.learns and self.stats.steps and isinstance(self._backend, StepBackend):
            return self._backend.calibration
        return self._state

    def __iter__(self) -> Iterator[StepEvent]:
        event = self._prefill()
        yield event
        while event.finish_reason is None:
            event = self._step()
            yield event

    def _prefill(self) -> StepEvent:
        start = time.perf_counter()
        logits = self._backend.prefill(self._prompt_ids)
        tokens, reason = self._cut((self._choose(logits, len(self._prompt_ids)),))
        self._record(tokens, reason)
        if reason is None and isinstance(self._backend, StepBackend):
            self._backend.begin(
                tokens[0],
                self._params,
                width=self._width,
                max_new_tokens=self._max_new_tokens,
                stop_ids=self._stop_ids,
                plan=self._plan,
            )
        self.stats.prefill_seconds = time.perf_counter() - start
        return StepEvent(0, tokens, 0, 0, reason)

    def _whole_step(self, backend: StepBackend) -> StepEvent:
        """A step that the backend runs by itself; its seconds are the time the host waited."""
        start, stats = time.perf_counter(), self.stats
        report = backend.next_step()
        stats.verify_seconds += time.perf_counter() - start
        tokens, reason = report.tokens, cast(FinishReason | None, report.reason)
        self._count_step(tokens, reason, report.rows)
        return StepEvent(stats.steps, tokens, report.rows - 1, report.accepted, reason)

    def _step(self) -> StepEvent:
        if isinstance(self._backend, StepBackend):
            return self._whole_step(self._backend)
        start = time.perf_counter()
        backend, stats = self._backend, self.stats
        # A step of width w adds up to w tokens, the last at position length + w. Only the context makes it narrower and
        # not max_new_tokens: a narrower last step would draw a token where a wider one accepts a draft, and a shorter
        # run of the same seed would not be the beginning of a longer one.
        room = backend.max_context - 1 - backend.length
        width = min(self._width, room)
        anchor = self.tokens[-1]
        draft_seconds = verify_seconds = 0.0
        first = backend.length + 1  # position of the first draft
        rows: Chain | Branches = anchor_alone(anchor)
        if width > 1:
            walk_greedily = self._params.greedy or self._plan.nodes is not None  # a tree has no use for the walk
            slots = range(first, first + width - 1)
            uniforms = [] if walk_greedily else [self._uniform(position, Purpose.DRAFT) for position in slots]
            before = time.perf_counter()
            block = backend.draft(anchor, width, 0.0 if walk_greedily else self._params.temperature, uniforms)
            draft_seconds += time.perf_counter() - before
            rows = choose_rows(self._plan, self._state, anchor, block, self._params, room)

        before = time.perf_counter()
        logits = rows.verify(backend)
        verify_seconds += time.perf_counter() - before

        kept = rows.accept(logits, self._params, first, self._uniform)
        if self._plan.learns:
            self._state = updated(self._state, rows.trials(kept))
        tokens, reason = self._cut(kept.tokens)

        before = time.perf_counter()
        rows.commit(backend, kept.rows[: len(tokens)])
        draft_seconds += time.perf_counter() - before

        self._count_step(tokens, reason, len(rows))
        stats.draft_seconds += draft_seconds
        stats.verify_seconds += verify_seconds
        stats.host_seconds += time.perf_counter() - start - draft_seconds - verify_seconds
        return StepEvent(stats.steps, tokens, len(rows) - 1, len(kept.rows) - 1, reason)

    def _choose(self, logits: Tensor, position: int) -> int:
        """The target's own token at a position without a draft; logits float32 [V]."""
        if self._params.greedy:
            return argmax(logits)
        return draw(target_distribution(logits, self._params), self._uniform(position, Purpose.SAMPLE))

    def _cut(self, run: tuple[int, ...]) -> tuple[tuple[int, ...], FinishReason | None]:
        """The part of a run up to and with the token that ends the text, and why it ends; the whole run otherwise."""
        limit = self._max_new_tokens - len(self.tokens)
        room = self._backend.max_context - len(self._prompt_ids) - len(self.tokens)
        for count, token in enumerate(run, start=1):
            if token in self._stop_ids:
                return run[:count], "stop"
            if count == limit:
                return run[:count], "length"
            if count == room:
                return run[:count], "context"
        return run, None

    def _count_step(self, tokens: tuple[int, ...], reason: FinishReason | None, rows: int) -> None:
        self._record(tokens, reason)
        self.stats.steps += 1
        self.stats.tokens_per_step[len(tokens)] = self.stats.tokens_per_step.get(len(tokens), 0) + 1
        self.stats.rows_per_step[rows] = self.stats.rows_per_step.get(rows, 0) + 1

    def _record(self, tokens: tuple[int, ...], reason: FinishReason | None) -> None:
        self.tokens.extend(tokens)
        self.stats.completion_tokens = len(self.tokens)
        self.stats.finish_reason = reason


def check_max_new_tokens(max_new_tokens: int) -> None:
    """Raise UserError unless at least one new token is asked for."""
    if max_new_tokens < 1:
        raise UserError(f"The number of new tokens must be at least 1, found {max_new_tokens}; ask for one or more.")


def generate(
    backend: Backend | StepBackend,
    prompt_ids: Sequence[int],
    params: SamplingParams,
    *,
    width: int,
    max_new_tokens: int,
    stop_ids: Collection[int] = (),
    ignore_eos: bool = False,
    plan: RowPlan | None = None,
) -> Generation:
    """Check a request and return the generation, which starts running when it is iterated.

    `width` is the verify width: the anchor and width - 1 drafts a step; 1 is plain decoding through the same verify. It
    need not be the draft's trained block size. Generation ends behind a token of `stop_ids` (unless `ignore_eos`),
    after `max_new_tokens`, or when prompt and output fill `backend.max_context`; near that end steps get narrower.
    `plan` makes the rows a tree, or their number a choice of every step; by default they are a chain of `width` rows.
    Greedy output is that of plain decoding; sampled output follows the target's distribution and is a function of
    model, prompt, parameters with seed, width and plan (with others: the same distribution, not the same text).
    Raises UserError for a prompt, width, length or plan that does not fit the backend.
    """
    check_max_new_tokens(max_new_tokens)
    if not prompt_ids:
        raise UserError("The prompt is empty, so there is nothing to continue; give at least one token.")
    for index, token in enumerate(prompt_ids):
        if not 0 <= token < backend.vocab_size:
            raise UserError(
                f"Token {index} of the prompt is {token}, which is not in the target's vocabulary of "
                f"{backend.vocab_size} ids; use the tokenizer that belongs to the target."
            )
    if len(prompt_ids) >= backend.max_context:
        raise UserError(
            f"The prompt has {len(prompt_ids)} tokens and the context {backend.max_context}, which leaves no room "
            "for a new token; shorten the prompt."
        )
    if not 1 <= width <= backend.width_limit:
        raise UserError(f"The verify width must be between 1 and {backend.width_limit}, found {width}; change it.")
    if width > 1 and not backend.has_draft:
        raise UserError(f"Verify width {width} needs a draft and none is loaded; load one or use width 1.")
    plan = plan or RowPlan()
    plan.check(width)
    if plan.learns and not isinstance(backend, TreeBackend | StepBackend):
        raise UserError("This backend verifies chains of a fixed width; leave out the tree and the automatic width.")
    if plan.nodes is not None and plan.nodes > backend.width_limit:
        raise UserError(f"A tree of {plan.nodes} nodes is too large, {backend.width_limit} are possible; use fewer.")
    return Generation(
        backend, prompt_ids, params, width, max_new_tokens, frozenset() if ignore_eos else frozenset(stop_ids), plan
    )
