"""The reference draft against SGLang's DFlash2 modules: context, block, convolution, candidates and lattice."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import sglang_draft as oracle
import torch
from equations import difference
from models import DRAFT, PROMPT, SEED, TARGET, draft_weights
from report import note
from torch import Tensor

from sgl_muse_mega.checkpoint.draft import save_draft
from sgl_muse_mega.checkpoint.weights import DraftWeights, TargetWeights
from sgl_muse_mega.reference import selector
from sgl_muse_mega.reference.cache import KVCache
from sgl_muse_mega.reference.draft import ReferenceDraft, conv, conv_coefficients
from sgl_muse_mega.reference.numerics import Numerics, norm_absolute
from sgl_muse_mega.reference.rope import rope_tables

NUM, EXACT = Numerics(), Numerics(exact=True)
SAME = 6e-4
WIDTH, ANCHOR = DRAFT.block_size, 7


@dataclass
class Pair:
    weights: DraftWeights
    taps: Tensor  # [taps, T, H] bf16
    ids: Tensor  # of the block
    past: oracle.Context
    embeddings: Tensor
    block: oracle.Block
    draft: Any

    def reference(self, target: TargetWeights, num: Numerics) -> ReferenceDraft:
        return ReferenceDraft(DRAFT, self.weights, target.embed_tokens, target.lm_head, TARGET.rms_norm_eps, num)


@pytest.fixture(scope="module")
def pair(sglang_runner: Any, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    weights, directory = draft_weights(), Path(tmp_path_factory.mktemp("draft")) / "checkpoint"
    save_draft(directory, DRAFT, weights)
    draft = oracle.load(directory, sglang_runner.model)
    generator = torch.Generator().manual_seed(SEED + 3)
    shape = (len(DRAFT.target_layer_ids), PROMPT, DRAFT.hidden_size)
    taps = torch.randn(shape, generator=generator).to(torch.bfloat16)
    ids = torch.full((WIDTH,), DRAFT.mask_token_id)
    ids[0] = ANCHOR
    past = oracle.context(draft, taps)
    with torch.inference_mode():
        embeddings = sglang_runner.model.get_input_embeddings()(ids)
    return Pair(weights, taps, ids, past, embeddings, oracle.block(draft, embeddings, past), draft)


def test_context(pair: Pair, weights: TargetWeights) -> None:
    """c, V and K; SGLang's CPU path rotates in bf16, its CUDA path in float32 as we do (D-6)."""
    reference = pair.reference(weights, NUM)
    positions = torch.arange(PROMPT)
    c = reference.context(NUM.value(pair.taps))
    caches = _caches(NUM)
    reference.write_context(NUM.value(pair.past.c), positions, positions, caches)
    found = {"c": difference(c, pair.past.c)}
    cos, sin = (NUM.bf(t)[:, None] for t in rope_tables(positions, DRAFT.head_dim, DRAFT.rope_theta, torch.float32))
    for layer, w, cache, keys, values in zip(
        pair.draft.layers, pair.weights.layers, caches, pair.past.keys, pair.past.values, strict=True
    ):
        ours_k, ours_v = cache.read(positions, torch.float32)
        found |= {
            f"{n} {layer.self_attn.attn.layer_id}": difference(o, t)
            for n, o, t in (("K", ours_k, keys), ("V", ours_v, values))
        }
        k = NUM.bf(pair.past.c.float() @ w.k_proj.float().T).unflatten(-1, (-1, DRAFT.head_dim))
        first, second = NUM.bf(norm_absolute(k, w.k_norm, DRAFT.rms_norm_eps)).chunk(2, dim=-1)
        low = NUM.bf(first * cos) - NUM.bf(second * sin)
        high = NUM.bf(second * cos) + NUM.bf(first * sin)
        found[f"K {layer.self_attn.attn.layer_id}, rotated in bf16"] = difference(
            NUM.bf(torch.cat((low, high), -1)), keys
        )
    note("SGLang draft, bf16: context", found)
    plain_keys = {f"K {i}" for i in range(DRAFT.num_hidden_layers)}
    assert {n: str(d) for n, d in found.items() if n not in plain_keys and d.rms > SAME} == {}
    assert all(1e-3 < found[n].rms < 4e-3 for n in plain_keys)


def test_block_input_is_the_normed_embedding(pair: Pair, weights: TargetWeights) -> None:
    """SGLang's wrapper hands the draft the embedding after the target's norm (D-16)."""
    assert torch.equal(pair.reference(weights, NUM).block_input(pair.ids), pair.embeddings.float())


def test_convolution(pair: Pair) -> None:
    """Both sides of both sublayers of every layer; SGLang rounds coefficients, products and sum to bf16 (D-20)."""
    convolutions = [c for w in pair.weights.layers for c in (w.attention_conv, w.mlp_conv)]
    assert len(pair.block.convolutions) == len(convolutions)
    found, explained = [], []
    for w, (_, x, xc, y, yc) in zip(convolutions, pair.block.convolutions, strict=True):
        x, y = x.float(), y.float()
        dynamic = conv_coefficients(x, w, NUM)
        for side, (rows, result) in enumerate(((x, xc), (y, yc))):
            found.append(difference(conv(rows, w.base_kernel[side], dynamic[:, side], NUM), result))
            explained.append(difference(_conv_in_bf16(rows, w.base_kernel[side], dynamic[:, side]), result))
    for name, values in (("normative", found), ("rounded as there", explained)):
        for value in values:
            note("SGLang draft, bf16: convolution", {name: value})
    assert all(1e-3 < d.rms < 5e-3 for d in found)
    assert all(d.rms < SAME for d in explained)


def test_block(pair: Pair, weights: TargetWeights) -> None:
    """The hidden rows of the whole block, judged by the distance to a float64 run in units of the reference's own."""
    ours, exact = (_block(pair.reference(weights, num), pair, num) for num in (NUM, EXACT))
    unit = (ours - exact).square().mean().sqrt()
    ratio = float((pair.block.hidden - exact).square().mean().sqrt() / unit)
    apart = float((pair.block.hidden - ours).square().mean().sqrt() / unit)
    note(
        "SGLang draft, bf16: distance of the block, in the reference's own",
        {"to float64": ratio, "to the reference": apart},
    )
    assert unit < 0.02 * exact.square().mean().sqrt()
    assert 0.5 < ratio < 3
    assert apart < 3


def test_candidates_and_lattice(pair: Pair, weights: TargetWeights) -> None:
    """From SGLang's own hidden rows. Ids are compared by their logits: bf16 logits tie, also at the last rank."""
    hidden = pair.block.hidden[1:]
    with torch.inference_mode():
        ids, u = pair.draft.compute_candidates(hidden)
        lattice = pair.draft.candidate_selector.build_lattice(
            candidate_ids=ids[None],
            unary_logits=u[None],
            hidden_states=hidden[None],
            anchor_token_ids=torch.tensor([ANCHOR]),
        )[0]
    c, w = DRAFT, pair.weights
    z = NUM.bf(hidden.float() @ weights.lm_head.float().T)
    ours = selector.candidates(z, c.selector_top_k)
    softcapped = c.final_logit_softcapping * torch.tanh(z * c.output_multiplier / c.final_logit_softcapping)
    assert torch.equal(z.gather(1, ours), z.gather(1, ids))
    e = selector.selector_state(hidden.float(), w.hidden_projection, NUM)
    tables = (w.predecessor_codebook, w.successor_codebook)
    scores = selector.lattice(u, ids, ANCHOR, e, *tables, NUM)
    before = torch.cat((torch.full_like(ids[:1], ANCHOR), ids[:-1]))
    state = NUM.bf(tables[0][before].float() * e[:, None])
    in_bf16 = u[:, None] + NUM.bf(torch.einsum("spr,scr->spc", state, tables[1][ids].float()))
    found = {
        "U": difference(softcapped.gather(1, ids), u),
        "S": difference(scores, lattice),
        "S, rounded as there": difference(in_bf16, lattice),
    }
    note("SGLang draft, bf16: selector", found)
    assert found["U"].rms < 1e-6
    assert 1e-4 < found["S"].rms < 5e-3
    assert found["S, rounded as there"].rms < SAME
    assert not torch.equal(lattice[1, 0], lattice[1, 1])  # the predecessor counts


def _caches(num: Numerics) -> list[KVCache]:
    dtype = torch.float64 if num.exact else torch.bfloat16
    kv_heads, d = DRAFT.num_key_value_heads, DRAFT.head_dim
    return [KVCache(PROMPT, kv_heads, d, dtype, torch.device("cpu")) for _ in range(DRAFT.num_hidden_layers)]


def _block(reference: ReferenceDraft, pair: Pair, num: Numerics) -> Tensor:
    positions, caches = torch.arange(PROMPT), _caches(num)
    reference.write_context(reference.context(num.value(pair.taps)), positions, positions, caches)
    start = PROMPT + 1 - DRAFT.sliding_window
    h = reference.block(pair.ids, PROMPT, positions[start:], start, caches)
    return num.bf(norm_absolute(h, pair.weights.norm, DRAFT.rms_norm_eps))


def _conv_in_bf16(x: Tensor, base: Tensor, dynamic: Tensor) -> Tensor:
    taps = NUM.bf(base.float()[None] + dynamic.repeat_interleave(DRAFT.conv_group_size, dim=-1))
    previous = torch.cat((torch.zeros_like(x[:1]), x[:-1]))
    return NUM.bf(NUM.bf(taps[:, 0] * x) + NUM.bf(taps[:, 1] * previous))
