"""Embedding and head of the target, equations E1 and O1-O3 (model specification, section 2.2)."""

import torch
from torch import Tensor

from sgl_muse_mega.reference.numerics import Numerics, linear, norm_absolute, norm_weightless


def e1_embedding(ids: Tensor, embed_tokens: Tensor, eps: float, num: Numerics) -> Tensor:
    """s = f32(bf(N0(Emb[id]))): the stream starts from a bf16-rounded norm (D-1)."""
    return num.bf(norm_weightless(num.value(embed_tokens[ids]), eps))


def o1_final_norm(stream: Tensor, weight: Tensor, eps: float, num: Numerics) -> Tensor:
    """hf = bf(NF(s; w_final)): the float32 stream is normed and rounded once (D-2)."""
    return num.bf(norm_absolute(stream, weight, eps))


def o2_head(hf: Tensor, lm_head: Tensor) -> Tensor:
    """z = hf W_lm^T, float32 output (D-41)."""
    return linear(hf, lm_head)


def o3_softcap(z: Tensor, output_multiplier: float, softcap: float) -> Tensor:
    """logits = softcap * tanh(z * output_multiplier / softcap)."""
    return softcap * torch.tanh((z * output_multiplier / softcap).double()).to(z.dtype)
