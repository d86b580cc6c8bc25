"""The reference as a backend of the step loop: one sequence, target and draft caches, any torch device."""

from collections.abc import Sequence

import torch
from torch import Tensor

from sgl_muse_mega.checkpoint.weights import DraftWeights, TargetWeights
from sgl_muse_mega.config import DraftConfig, TargetConfig, check_pair
from sgl_muse_mega.reference.cache import KVCache, PageTable
from sgl_muse_mega.reference.draft import ReferenceDraft
from sgl_muse_mega.reference.numerics import Numerics
from sgl_muse_mega.reference.selector import walk_greedy, walk_sampled
from sgl_muse_mega.reference.target import ReferenceTarget, Rows, TargetOutput
from sgl_muse_mega.speculative.backend import DraftBlock, check_prompt, check_rows
from sgl_muse_mega.speculative.tree import ancestor_mask

MAX_ROWS = 16
PREFILL_ROWS = 256
KV_DTYPES = {"bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn}


class ReferenceBackend:
    """Implements `speculative.backend.TreeBackend` on the executable specification.

    The sliding layers of the target, and the draft, own pools of one window plus one prefill chunk, whose pages are
    freed as the window moves on; the full layers keep every position.
    """

    def __init__(
        self,
        target_config: TargetConfig,
        target_weights: TargetWeights,
        draft_config: DraftConfig | None = None,
        draft_weights: DraftWeights | None = None,
        *,
        max_context: int | None = None,
        page_size: int = 16,
        kv_dtype: str = "bf16",
        numerics: Numerics | None = None,
    ) -> None:
        """max_context: positions to hold, at most the model's (default). kv_dtype: "bf16" or "fp8" for the target's
        cache; the draft's stays bf16. Raises UserError when draft and target do not fit each other."""
        limit = target_config.max_position_embeddings
        self._max_context = limit if max_context is None else min(max_context, limit)
        self._device = target_weights.embed_tokens.device
        self._num = numerics or Numerics()
        taps = draft_config.target_layer_ids if draft_config else ()
        self._target = ReferenceTarget(target_config, target_weights, self._num, taps)
        storage = torch.float64 if self._num.exact else KV_DTYPES[kv_dtype]

        self._full = self._table(self._max_context, page_size)
        self._sliding = self._window_table(target_config, page_size)
        self._caches = [
            self._cache(self._full_or_sliding(i), target_config, storage)
            for i in range(target_config.num_hidden_layers)
        ]
        self._draft: ReferenceDraft | None = None
        if draft_config is not None and draft_weights is not None:
            check_pair(target_config, draft_config)
            self._draft = ReferenceDraft(
                draft_config,
                draft_weights,
                target_weights.embed_tokens,
                target_weights.lm_head,
                target_config.rms_norm_eps,
                self._num,
            )
            self._draft_table = self._window_table(draft_config, page_size)
            draft_storage = torch.float64 if self._num.exact else torch.bfloat16
            self._draft_caches = [
                self._cache(self._draft_table, draft_config, draft_storage) for _ in draft_weights.layers
            ]
        self._length = 0
        self._pending: TargetOutput | None = None

    @property
    def vocab_size(self) -> int:
        return self._target.config.vocab_size

    @property
    def max_context(self) -> int:
        return self._max_context

    @property
    def has_draft(self) -> bool:
        return self._draft is not None

    @property
    def width_limit(self) -> int:
        return MAX_ROWS

    @property
    def length(self) -> int:
        return self._length

    def prefill(self, ids: Sequence[int]) -> Tensor:
        """Starts a sequence; float32 logits [V] of the last prompt row. Raises UserError on an empty or long prompt."""
        check_prompt(ids, self._max_context)
        self._length = 0
        self._pending = None
        tables = [self._full, self._sliding]
        for table in [*tables, self._draft_table] if self._draft else tables:
            table.reset()
        for start in range(0, len(ids), PREFILL_ROWS):
            chunk = ids[start : start + PREFILL_ROWS]
            self._pending = self._forward(chunk, logit_rows=1)
            logits = self._pending.logits[-1]
            self.commit(len(chunk))
        return logits

    def draft(self, anchor: int, width: int, temperature: float, uniforms: Sequence[float]) -> DraftBlock:
        """Proposes width - 1 tokens after `anchor`; temperature 0 walks greedily."""
        assert self._draft is not None, "draft() needs a draft model"
        config = self._draft.config
        start = max(0, self._length + 1 - config.sliding_window)
        context = self._draft_table.slots(self._positions(start, self._length))
        ids = torch.full((width,), config.mask_token_id, device=self._device)
        ids[0] = anchor
        h = self._draft.block(ids, self._length, context, start, self._draft_caches)
        proposals = self._draft.candidates(h, anchor)
        if temperature == 0:
            path = walk_greedy(proposals.lattice)
            probabilities = torch.nn.functional.one_hot(path, proposals.candidates.shape[1]).float()
        else:
            path, probabilities = walk_sampled(proposals.lattice, temperature, uniforms)
        tokens = proposals.candidates.gather(1, path[:, None])[:, 0]
        return DraftBlock(tokens, proposals.candidates, probabilities, proposals.lattice)

    def verify(self, tokens: Sequence[int]) -> Tensor:
        """Float32 logits [T, V] of the rows at positions length .. length + T - 1."""
        self._pending = self._forward(tokens)
        return self._pending.logits

    def verify_tree(self, tokens: Sequence[int], parents: Sequence[int]) -> Tensor:
        """Float32 logits [T, V] of rows that see their ancestors alone, at positions length + depth."""
        self._pending = self._forward(tokens, parents=parents)
        return self._pending.logits

    def commit(self, rows: int) -> None:
        """Makes the first `rows` of the last forward part of the sequence and writes their draft context."""
        self._commit(rows, slice(rows))

    def commit_path(self, rows: Sequence[int]) -> None:
        """Makes `rows`, a path from the anchor on, part of the sequence; their K and V move together behind it."""
        path = torch.tensor(list(rows), device=self._device)
        before = self._length + path
        after = self._positions(self._length, self._length + len(path))
        for layer, cache in enumerate(self._caches):
            table = self._full_or_sliding(layer)
            cache.move(table.slots(before), table.slots(after))
        self._commit(len(path), path)

    def _commit(self, rows: int, which: slice | Tensor) -> None:
        assert self._pending is not None, "commit() needs a verify before it"
        end = self._length + rows
        if self._draft is not None and rows:
            self._draft_table.evict_before(end + 1 - self._draft.config.sliding_window)
            self._draft_table.reserve(end)
            positions = self._positions(self._length, end)
            context = self._draft.context(self._pending.taps[:, which])
            self._draft.write_context(context, positions, self._draft_table.slots(positions), self._draft_caches)
        self._length = end
        self._pending = None

    def _forward(
        self, tokens: Sequence[int], logit_rows: int | None = None, parents: Sequence[int] | None = None
    ) -> TargetOutput:
        end = self._length + len(tokens)
        check_rows(end, self._max_context)
        window = self._target.config.sliding_window
        start = max(0, self._length + 1 - window)
        self._sliding.evict_before(start)
        for table in (self._full, self._sliding):
            table.reserve(end)
        places = self._positions(self._length, end)
        positions, ancestors = places, None
        if parents is not None:
            ancestors = torch.from_numpy(ancestor_mask(parents)).to(self._device)
            positions = self._length + ancestors.sum(dim=1) - 1
        rows = Rows(
            positions=positions,
            full_slots=self._full.slots(places),
            sliding_slots=self._sliding.slots(places),
            full_context=self._full.slots(self._positions(0, self._length)),
            sliding_context=self._sliding.slots(self._positions(start, self._length)),
            sliding_start=start,
            ancestors=ancestors,
        )
        ids = torch.tensor(list(tokens), device=self._device)
        with torch.inference_mode():
            return self._target.forward(ids, rows, self._caches, logit_rows)

    def _full_or_sliding(self, layer: int) -> PageTable:
        return self._full if self._target.config.is_full(layer) else self._sliding

    def _table(self, positions: int, page_size: int) -> PageTable:
        # One page for padding, one because a window rarely starts on a page's edge, one for the verify rows.
        return PageTable(-(-positions // page_size) + 3, page_size)

    def _window_table(self, config: TargetConfig | DraftConfig, page_size: int) -> PageTable:
        return self._table(min(config.sliding_window, self._max_context) + PREFILL_ROWS, page_size)

    def _cache(self, table: PageTable, config: TargetConfig | DraftConfig, dtype: torch.dtype) -> KVCache:
        slots = (table.free_pages + 1) * table.page_size
        return KVCache(slots, config.num_key_value_heads, config.head_dim, dtype, self._device)

    def _positions(self, start: int, end: int) -> Tensor:
        return torch.arange(start, end, device=self._device)
