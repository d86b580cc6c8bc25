"""Opens a target and its draft for the commands that run them."""

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from sgl_muse_mega.checkpoint import tiny
from sgl_muse_mega.checkpoint.draft import load_draft
from sgl_muse_mega.checkpoint.target import load_target
from sgl_muse_mega.commands.ranks import RankProcesses
from sgl_muse_mega.commands.text import Text
from sgl_muse_mega.config import DraftConfig, TargetConfig, check_pair, load_draft_config, load_target_config
from sgl_muse_mega.errors import UserError
from sgl_muse_mega.reference.backend import KV_DTYPES, MAX_ROWS, ReferenceBackend
from sgl_muse_mega.speculative.backend import Backend, StepBackend
from sgl_muse_mega.speculative.generate import check_max_new_tokens
from sgl_muse_mega.speculative.rows import RowPlan
from sgl_muse_mega.speculative.width import default_cost, interpolated, read_cost_table

if TYPE_CHECKING:
    from sgl_muse_mega.megakernel.machine import Machine

DEFAULT_WIDTH = 8
BACKENDS = ("auto", "reference", "cuda", "emulator")

ONE_THREAD_HIDDEN_SIZE = 1024
"""Up to this size threads mostly wait for each other: a step of the tiny pair's shape takes 35 to 48 ms on one thread,
and 285 to 670 ms on two threads of a two-core machine that also does something else."""


@dataclass(frozen=True, slots=True)
class PairOptions:
    """Which models to run and how, as given on the command line."""

    model: Path | None  # None is the bundled tiny target
    draft: Path | None  # None is the bundled tiny draft, which only fits the bundled target
    no_draft: bool
    backend: str
    kv_cache_dtype: str
    width: int | None  # verify width; None is 8, or 1 without a draft
    automatic: bool = False  # choose the rows in every step, at most the draft's block size, or the tree's nodes
    tree: bool = False
    nodes: int | None = None  # most rows of a tree; None is the verify width
    cost_table: Path | None = None  # for `automatic`; None is the default table, of one H200 of four
    ranks: int = 1  # GPUs that share the models


class Pair:
    """A target folder, a draft folder unless decoding is plain, and the verify width; weights are read by `backend`."""

    def __init__(self, options: PairOptions) -> None:
        """Read and check configurations and tokenizer. Raises UserError for anything that cannot be run."""
        if options.backend not in BACKENDS:
            raise UserError(f"There is no backend {options.backend!r}; use {', '.join(BACKENDS)}.")
        self.backend_name = "reference" if options.backend == "auto" else options.backend
        if options.kv_cache_dtype not in KV_DTYPES:
            raise UserError(f"There is no KV cache type {options.kv_cache_dtype!r}; use {' or '.join(KV_DTYPES)}.")
        if options.draft and options.no_draft:
            raise UserError("Both --draft and --no-draft are given; leave one of them out.")
        self.kv_cache_dtype = options.kv_cache_dtype
        self.width = options.width if options.width is not None else (1 if options.no_draft else DEFAULT_WIDTH)
        if not 1 <= self.width <= MAX_ROWS:
            raise UserError(f"The verify width must be between 1 and {MAX_ROWS}, found {self.width}; change --width.")
        if options.no_draft and (options.tree or options.automatic):
            name = "--tree" if options.tree else "--width auto"
            raise UserError(f"{name} needs a draft; leave out --no-draft or {name}.")
        if self.width > 1 and options.no_draft:
            raise UserError(f"Verify width {self.width} needs a draft; leave out --no-draft or use --width 1.")
        self.bundled = options.model is None and options.draft is None
        self.directory = options.model or tiny.target_directory()
        self.draft_directory = self._draft_directory(options) if self.width > 1 else None
        self.config: TargetConfig = load_target_config(self.directory)
        self.draft_config: DraftConfig | None = None
        if self.draft_directory is not None:
            self.draft_config = load_draft_config(self.draft_directory)
            check_pair(self.config, self.draft_config)
            if options.automatic:
                self.width = min(self.draft_config.block_size, MAX_ROWS)
        self.plan = self._plan(options)
        if options.ranks != 1 and self.backend_name != "cuda":
            raise UserError(f"Several ranks need GPUs and the backend is {self.backend_name}; add --backend cuda.")
        self._ranks = RankProcesses(options.ranks, sys.argv[1:]) if options.ranks != 1 else None
        self.text = Text(self.directory)

    def check_prompt(self, ids: list[int], name: str = "The prompt") -> None:
        """Raise UserError unless a prompt fits the vocabulary and leaves room for a new token in the context."""
        if max(ids) >= self.config.vocab_size:
            raise UserError(
                f"{name} has the token id {max(ids)}, but the target knows only ids below {self.config.vocab_size}; "
                "use the tokenizer that belongs to the target."
            )
        limit = self.config.max_position_embeddings
        if len(ids) >= limit:
            raise UserError(f"{name} has {len(ids)} tokens, but the context holds {limit} with the answer; shorten it.")

    def backend(self, prompt_tokens: int, max_new_tokens: int) -> Backend | StepBackend:
        """Read the weights and make room for prompts of `prompt_tokens` and outputs of `max_new_tokens`.

        Raises UserError for weights that cannot be used, and for `max_new_tokens` below 1.
        """
        check_max_new_tokens(max_new_tokens)
        if self.config.hidden_size <= ONE_THREAD_HIDDEN_SIZE and "OMP_NUM_THREADS" not in os.environ:
            torch.set_num_threads(1)
        draft_weights = None
        if self.draft_directory is not None and self.draft_config is not None:
            draft_weights = load_draft(self.draft_directory, self.draft_config)
        machine, place = self._ranks.connect() if self._ranks else (None, None)
        rank, ranks = (place.rank, place.ranks) if place else (0, 1)
        weights = load_target(self.directory, self.config, rank=rank, ranks=ranks)
        # one step more than is needed, so that the last steps have as many rows as all others
        max_context = prompt_tokens + max_new_tokens + max(self.width, self.plan.nodes or 0)
        if self.backend_name in ("cuda", "emulator"):
            from sgl_muse_mega.megakernel.decode_backend import decode_backend

            return decode_backend(
                self.config,
                weights,
                self.draft_config,
                draft_weights,
                machine=machine or _machine(self.backend_name),
                width=max(self.width, self.plan.nodes or 0),
                max_context=max_context,
                kv_dtype=self.kv_cache_dtype,
                place=place,
                progress=lambda message: print(message, file=sys.stderr, flush=True),
            )
        return ReferenceBackend(
            self.config,
            weights,
            self.draft_config,
            draft_weights,
            max_context=max_context,
            kv_dtype=self.kv_cache_dtype,
        )

    def close(self) -> None:
        """After the last token: several ranks part in order."""
        if self._ranks:
            self._ranks.close()

    def _plan(self, options: PairOptions) -> RowPlan:
        if options.nodes is not None and not options.tree:
            raise UserError(f"--nodes {options.nodes} is for trees; add --tree or leave it out.")
        if options.cost_table is not None and not options.automatic:
            raise UserError("--cost-table is for automatic widths; add --width auto or leave it out.")
        nodes = None
        if options.tree:
            nodes = self.width if options.nodes is None else options.nodes
        cost = None
        if options.automatic:
            rows, table = nodes or self.width, options.cost_table
            cost = interpolated(read_cost_table(table), rows) if table else default_cost(rows)
        plan = RowPlan(nodes, cost)
        plan.check(self.width)
        return plan

    @staticmethod
    def _draft_directory(options: PairOptions) -> Path:
        if options.draft is not None:
            return options.draft
        if options.model is not None:
            raise UserError(f"No draft is given for {options.model}; add --draft DIR, or --no-draft.")
        return tiny.draft_directory()


def _machine(name: str) -> "Machine":
    """The GPU, or the emulator; neither is imported unless it is asked for."""
    if name == "emulator":
        from sgl_muse_mega.emulator.stepper import Emulator

        return Emulator()
    from sgl_muse_mega.megakernel.cuda import CudaMachine

    return CudaMachine()
