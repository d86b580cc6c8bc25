"""Candidates, lattice and walk of the DFlash2 selector (model specification, section 7.3)."""

from collections.abc import Sequence

import torch
from torch import Tensor

from sgl_muse_mega.reference.numerics import Numerics, linear


def candidates(z: Tensor, top_k: int) -> Tensor:
    """The top_k ids with the largest z [S, V] per slot, descending, ties to the lower id: int64 [S, k]."""
    return torch.sort(z, dim=-1, descending=True, stable=True).indices[:, :top_k]


def lattice(
    u: Tensor, chosen: Tensor, anchor: int, e: Tensor, predecessors: Tensor, successors: Tensor, num: Numerics
) -> Tensor:
    """S_t[p, c] = U_t[c] + <A[pred] . e_t, B[cand_t[c]]>: [S, k, k], float32 inside (D-39).

    u [S, k] softcapped candidate logits, chosen int64 [S, k], e [S, rank]; predecessors A and successors B [V, rank].
    The predecessor is the anchor at slot 0 (the same for every p) and candidate p of the slot before elsewhere.
    """
    first = torch.full_like(chosen[:1], anchor)
    before = torch.cat((first, chosen[:-1]))
    pairs = torch.einsum(
        "spr,scr->spc",
        (num.value(predecessors[before]) * e[:, None, :]).double(),
        successors[chosen].double(),
    )
    return u[:, None, :] + pairs.to(u.dtype)


def selector_state(hf: Tensor, hidden_projection: Tensor, num: Numerics) -> Tensor:
    """e_t = bf(hf_t W_sel^T): [S, rank]."""
    return num.bf(linear(hf, hidden_projection))


def walk_greedy(scores: Tensor) -> Tensor:
    """Index per slot of the path that takes the first maximum of S_t[p, .]; NaN is above infinity: int64 [S]."""
    path, p = [], 0
    for slot in scores:
        p = int(slot[p].numpy(force=True).argmax())  # numpy documents the first occurrence and NaN as the maximum
        path.append(p)
    return torch.tensor(path, device=scores.device)


def walk_sampled(scores: Tensor, temperature: float, uniforms: Sequence[float]) -> tuple[Tensor, Tensor]:
    """Samples one index per slot from softmax(S_t[p, .] / temperature) by inverse transform.

    uniforms: one float in [0, 1) per slot. Returns the path int64 [S] and the probabilities float32 [S, k] that were
    drawn from, which verification needs as q.
    """
    path, probabilities, p = [], [], 0
    for slot, uniform in zip(scores, uniforms, strict=True):
        pi = torch.softmax(slot[p].float() / temperature, dim=-1)
        p = min(int((pi.cumsum(0) <= uniform).sum()), len(pi) - 1)
        path.append(p)
        probabilities.append(pi)
    return torch.tensor(path, device=scores.device), torch.stack(probabilities)
