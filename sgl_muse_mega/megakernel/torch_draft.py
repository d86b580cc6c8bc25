"""The draft of a CUDA or emulator backend, run through torch: the reference draft with its own window of context."""

from collections.abc import Sequence

import torch
from torch import Tensor

from sgl_muse_mega.checkpoint.weights import DraftWeights, TargetWeights
from sgl_muse_mega.config import DraftConfig
from sgl_muse_mega.reference.cache import KVCache, PageTable
from sgl_muse_mega.reference.draft import ReferenceDraft
from sgl_muse_mega.reference.selector import walk_greedy, walk_sampled
from sgl_muse_mega.speculative.backend import DraftBlock

_PAGE = 16


class TorchDraft:
    """Proposes blocks; its context grows by the taps of committed rows."""

    def __init__(
        self,
        config: DraftConfig,
        weights: DraftWeights,
        target: TargetWeights,
        embedding_eps: float,
        rows: int,
    ) -> None:
        """rows: most rows written at once."""
        self._config = config
        self._draft = ReferenceDraft(config, weights, target.embed_tokens, target.lm_head, embedding_eps)
        self._device = target.embed_tokens.device
        pages = -(-(config.sliding_window + rows) // _PAGE) + 3
        self._table = PageTable(pages, _PAGE)
        self._caches = [
            KVCache(pages * _PAGE, config.num_key_value_heads, config.head_dim, torch.bfloat16, self._device)
            for _ in weights.layers
        ]

    def reset(self) -> None:
        """Forgets the sequence."""
        self._table.reset()

    def extend(self, taps: Tensor, start: int) -> None:
        """Writes the context of rows at positions start ..; taps bf16 [n_taps, rows, H]."""
        end = start + taps.shape[1]
        self._table.evict_before(end + 1 - self._config.sliding_window)
        self._table.reserve(end)
        positions = torch.arange(start, end, device=self._device)
        context = self._draft.context(taps.float())
        self._draft.write_context(context, positions, self._table.slots(positions), self._caches)

    def propose(
        self, anchor: int, length: int, width: int, temperature: float, uniforms: Sequence[float]
    ) -> DraftBlock:
        """The width - 1 tokens after `anchor` at position `length`; temperature 0 walks greedily."""
        start = max(0, length + 1 - self._config.sliding_window)
        context = self._table.slots(torch.arange(start, length, device=self._device))
        ids = torch.full((width,), self._config.mask_token_id, device=self._device)
        ids[0] = anchor
        h = self._draft.block(ids, length, context, start, self._caches)
        proposals = self._draft.candidates(h, anchor)
        if temperature == 0:
            path = walk_greedy(proposals.lattice)
            probabilities = torch.nn.functional.one_hot(path, proposals.candidates.shape[1]).float()
        else:
            path, probabilities = walk_sampled(proposals.lattice, temperature, uniforms)
        tokens = proposals.candidates.gather(1, path[:, None])[:, 0]
        return DraftBlock(tokens.cpu(), proposals.candidates.cpu(), probabilities.cpu())
