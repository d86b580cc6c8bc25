"""One rank's share of a draft.

Rank r of R holds contiguous blocks: query heads as rows of q_proj and columns of o_proj, the KV heads those queries use
(a KV head is held by several ranks where R exceeds their number), rows of gate_proj and up_proj and columns of
down_proj, and output rows of fc. The convolutions, the norms and the selector are held whole. Embedding and head are
the target's share (`checkpoint.target`).
"""

from dataclasses import replace

from torch import Tensor

from sgl_muse_mega.checkpoint.weights import DraftLayerWeights, DraftWeights
from sgl_muse_mega.config import DraftConfig
from sgl_muse_mega.errors import UserError


def share_draft(config: DraftConfig, weights: DraftWeights, *, rank: int, ranks: int) -> DraftWeights:
    """Rank `rank`'s share of a whole draft, in memory of its own.

    Raises UserError when the draft does not divide among the ranks.
    """
    if not 0 <= rank < ranks:
        raise ValueError(f"rank {rank} is not one of {ranks} ranks")
    if ranks == 1:
        return weights
    names = ("num_attention_heads", "intermediate_size", "hidden_size", "vocab_size")
    problems = [f"{name} = {getattr(config, name)}" for name in names if getattr(config, name) % ranks]
    kv_heads = config.num_key_value_heads
    if kv_heads % ranks and ranks % kv_heads:
        problems.append(f"num_key_value_heads = {kv_heads}")
    if problems:
        raise UserError(f"The draft does not divide among {ranks} ranks: {', '.join(problems)}; use another number.")
    layers = tuple(_layer(config, layer, rank, ranks) for layer in weights.layers)
    return replace(weights, layers=layers, fc=_block(weights.fc, 0, rank, ranks))


def _layer(config: DraftConfig, layer: DraftLayerWeights, rank: int, ranks: int) -> DraftLayerWeights:
    kv_heads, d = config.num_key_value_heads, config.head_dim
    first = rank * kv_heads // ranks
    kv = slice(first * d, (first + max(1, kv_heads // ranks)) * d)
    return replace(
        layer,
        q_proj=_block(layer.q_proj, 0, rank, ranks),
        k_proj=layer.k_proj[kv].clone(),
        v_proj=layer.v_proj[kv].clone(),
        o_proj=_block(layer.o_proj, 1, rank, ranks),
        gate_proj=_block(layer.gate_proj, 0, rank, ranks),
        up_proj=_block(layer.up_proj, 0, rank, ranks),
        down_proj=_block(layer.down_proj, 1, rank, ranks),
    )


def _block(whole: Tensor, dimension: int, rank: int, ranks: int) -> Tensor:
    return whole.chunk(ranks, dimension)[rank].contiguous().clone()
