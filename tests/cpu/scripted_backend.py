"""A backend without models: a hash-based language model over a few ids and any draft one can think of."""

from collections.abc import Callable, Sequence
from types import ModuleType

import numpy as np
import pytest
import torch
from torch import Tensor

from sgl_muse_mega.speculative.backend import DraftBlock
from sgl_muse_mega.speculative.sampling import SamplingParams, target_distribution

Draft = Callable[["ScriptedBackend", int, int, float, Sequence[float]], DraftBlock]


def one_hot_block(tokens: Sequence[int]) -> DraftBlock:
    ids = torch.tensor(tokens, dtype=torch.int64).reshape(-1)
    return DraftBlock(ids, ids.reshape(-1, 1), torch.ones(len(tokens), 1))


def walk(candidates: Tensor, q: Tensor, uniforms: Sequence[float]) -> DraftBlock:
    """Specification section 7.3, sampled: q float32 [slots, k] over candidates [slots, k], whatever the predecessor."""
    u = torch.tensor(uniforms, dtype=torch.float32).reshape(-1, 1)
    index = (torch.cumsum(q, dim=1) <= u).sum(dim=1).clamp(max=q.shape[1] - 1)
    tokens = candidates.gather(1, index.reshape(-1, 1)).reshape(-1)
    return DraftBlock(tokens, candidates, q)


class ScriptedBackend:
    """Follows the protocol to the letter and asserts that the caller does.

    The next token's logits are a function of `seed` and of the last `order` tokens; with `levels` they are quantised,
    so that ties are common. `forced` maps a position to the id that the model is most sure of there.
    """

    def __init__(
        self,
        *,
        vocab_size: int = 8,
        max_context: int = 64,
        draft: Draft | None = None,
        seed: int = 0,
        order: int = 2,
        levels: int | None = None,
        width_limit: int = 16,
        scale: float = 1.5,
    ) -> None:
        self.vocab_size = vocab_size
        self.max_context = max_context
        self.has_draft = draft is not None
        self.width_limit = width_limit
        self.committed: list[int] = []
        self.pending: list[int] = []
        self.widths: list[int] = []
        self.forced: dict[int, int] = {}
        self._draft = draft
        self._seed = seed
        self._order = order
        self._levels = levels
        self._scale = scale
        self._cache: dict[tuple[int, ...], Tensor] = {}

    @property
    def length(self) -> int:
        return len(self.committed)

    def logits(self, context: Sequence[int]) -> Tensor:
        """float32 [V]: the model itself."""
        if len(context) in self.forced:
            return torch.nn.functional.one_hot(torch.tensor(self.forced[len(context)]), self.vocab_size).float()
        key = tuple(context[-self._order :])
        if key not in self._cache:
            generator = np.random.default_rng([self._seed, *key])
            if self._levels:
                row = generator.integers(0, self._levels, self.vocab_size).astype(np.float32)
            else:
                row = generator.normal(0, self._scale, self.vocab_size).astype(np.float32)
            self._cache[key] = torch.from_numpy(row)
        return self._cache[key]

    def prefill(self, ids: Sequence[int]) -> Tensor:
        assert 0 < len(ids) < self.max_context
        self.committed, self.pending, self.widths = list(ids), [], []
        return self.logits(self.committed)

    def draft(self, anchor: int, width: int, temperature: float, uniforms: Sequence[float]) -> DraftBlock:
        assert self._draft is not None
        assert 2 <= width <= self.width_limit
        assert len(uniforms) == (width - 1 if temperature else 0)
        assert all(0 <= u < 1 for u in uniforms)
        block = self._draft(self, anchor, width, temperature, uniforms)
        assert block.tokens.shape == (width - 1,)
        return block

    def verify(self, tokens: Sequence[int]) -> Tensor:
        assert 1 <= len(tokens) <= self.width_limit
        assert self.length + len(tokens) <= self.max_context, "a row past the context"
        self.pending = list(tokens)
        self.widths.append(len(tokens))
        return torch.stack([self.logits(self.committed + self.pending[: i + 1]) for i in range(len(tokens))])

    def commit(self, rows: int) -> None:
        assert 1 <= rows <= len(self.pending)
        self.committed += self.pending[:rows]
        self.pending = []


def plain_greedy(backend: ScriptedBackend, prompt: Sequence[int], count: int) -> list[int]:
    """What token-by-token decoding gives, with the first of equal maxima, and no stop."""
    text = list(prompt)
    for _ in range(count):
        row = backend.logits(text).tolist()
        text.append(row.index(max(row)))
    return text[len(prompt) :]


def cache_distributions(monkeypatch: pytest.MonkeyPatch, *modules: ModuleType) -> None:
    """The rows of a chi-square run never change, so the modules compute the distribution of each once, for any seed."""
    cache: dict[tuple[object, ...], Tensor] = {}

    def cached(logits: Tensor, params: SamplingParams) -> Tensor:
        key = (params.temperature, params.top_p, params.top_k, params.min_p, *logits.tolist())
        if key not in cache:
            cache[key] = target_distribution(logits, params)
        return cache[key]

    for module in modules:
        monkeypatch.setattr(module, "target_distribution", cached)
