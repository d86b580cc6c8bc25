"""Walk and accept rules against SGLang's own: its PyTorch code, and its Triton kernels in Triton's interpreter."""

from types import SimpleNamespace

import pytest
import torch
from models import SEED
from sglang.kernels.ops.speculative import dflash
from sglang.kernels.ops.speculative.dspark import dspark_accept
from sglang.srt.models.dflash import CandidateSelector
from torch import Tensor

from sgl_muse_mega.reference.selector import walk_greedy, walk_sampled
from sgl_muse_mega.speculative.accept import accept_greedy, accept_sampled
from sgl_muse_mega.speculative.backend import DraftBlock
from sgl_muse_mega.speculative.philox import Purpose
from sgl_muse_mega.speculative.sampling import SamplingParams

SLOTS, TOP_K, VOCAB, TRIALS = 7, 16, 96, 60


@pytest.fixture
def random() -> torch.Generator:
    return torch.Generator().manual_seed(SEED + 7)


def their_walk(
    kernel: bool, chosen: Tensor, scores: Tensor, uniforms: Tensor, temperature: float, greedy: bool
) -> tuple:
    arguments = {
        "candidate_ids": chosen[None],
        "scores": scores[None],
        "uniforms": uniforms[None],
        "temperatures": torch.tensor([temperature or 1.0]),
        "greedy_mask": torch.tensor([greedy]),
    }
    if kernel:
        tokens, q = dflash.selector_walk_triton(**arguments)
    else:
        tokens, q = CandidateSelector.sample_path(SimpleNamespace(top_k=TOP_K), **arguments)
    return tokens[0], q[0]


@pytest.mark.parametrize("kernel", [False, True], ids=["torch", "triton"])
def test_walk(kernel: bool, random: torch.Generator) -> None:
    for trial in range(TRIALS):
        scores = 3 * torch.randn(SLOTS, TOP_K, TOP_K, generator=random)
        scores[0] = scores[0, :1]  # the anchor precedes every candidate of slot 0
        chosen = torch.stack([torch.randperm(VOCAB, generator=random)[:TOP_K] for _ in range(SLOTS)])
        uniforms = torch.rand(SLOTS, generator=random)
        if trial == 0:
            scores[2] = 1.5  # ties
        if trial == 1:
            scores[3, :, 5], scores[3, :, 9], scores[3, :, 2] = float("nan"), float("nan"), float("inf")
        tokens, q = their_walk(kernel, chosen, scores, uniforms, 0.0, greedy=True)
        path = walk_greedy(scores)
        assert torch.equal(chosen.gather(1, path[:, None])[:, 0], tokens)
        assert torch.equal(torch.nn.functional.one_hot(path, TOP_K).float(), q)

        if trial == 1:
            continue  # NaN has no distribution
        temperature = float(0.2 + 1.5 * torch.rand((), generator=random))
        tokens, q = their_walk(kernel, chosen, scores, uniforms, temperature, greedy=False)
        path, probabilities = walk_sampled(scores, temperature, uniforms.tolist())
        assert torch.equal(chosen.gather(1, path[:, None])[:, 0], tokens)
        assert (probabilities - q).abs().max() < 1e-6


def test_greedy_accept(random: torch.Generator) -> None:
    lengths = []
    for _ in range(TRIALS):
        logits = torch.randn(SLOTS + 1, VOCAB, generator=random)
        best = logits.argmax(dim=-1)
        keep = torch.rand(SLOTS, generator=random) < 0.8
        drafts = torch.where(keep, best[:SLOTS], torch.randint(VOCAB, (SLOTS,), generator=random))
        block = torch.cat((torch.tensor([3]), drafts))[None]
        lens, commit = (torch.empty(1, dtype=torch.int32) for _ in range(2))
        bonus, after = (torch.empty(1, dtype=torch.int64) for _ in range(2))
        out, prefix = torch.empty(1, SLOTS + 1, dtype=torch.int64), torch.tensor([40])
        dflash._compute_dflash_accept_bonus_triton_unchecked(
            block, best[None].contiguous(), lens, commit, bonus, out, prefix, after
        )
        ours = accept_greedy(logits, drafts.tolist())
        assert (ours.drafts, ours.token) == (int(lens), int(bonus))
        assert [*drafts[: ours.drafts].tolist(), ours.token] == out[0, : int(commit)].tolist()
        assert int(after) == 40 + ours.drafts + 1
        lengths.append(ours.drafts)
    assert len(set(lengths)) > 4


FILTERS = [(1.0, 0, 1.0), (0.7, 0, 1.0), (1.0, 12, 1.0), (1.3, 0, 0.9), (0.9, 20, 0.8)]


@pytest.mark.parametrize(("temperature", "top_k", "top_p"), FILTERS)
def test_sampled_accept(temperature: float, top_k: int, top_p: float, random: torch.Generator) -> None:
    """Acceptance, the residual distribution after a rejection, and the token after the last slot, draw by draw."""
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p)
    info = SimpleNamespace(
        need_top_k_sampling=top_k > 0,
        need_top_p_sampling=top_p < 1,
        temperatures=torch.tensor([[temperature]]),
        top_ks=torch.tensor([top_k or VOCAB]),
        top_ps=torch.tensor([top_p]),
    )
    lengths = []
    for trial in range(TRIALS):
        logits = 3 * torch.randn(SLOTS + 1, VOCAB, generator=random)
        # A draft that knows the target: its candidates are the target's, with noise on their logits.
        chosen = logits[:SLOTS].topk(TOP_K).indices
        noisy = logits.gather(1, chosen) / temperature + 0.5 * torch.randn(SLOTS, TOP_K, generator=random)
        q = torch.softmax(noisy, dim=-1)
        picked = torch.multinomial(q, 1, generator=random)
        drafts = chosen.gather(1, picked)[:, 0]

        dense = torch.zeros(1, SLOTS, VOCAB).scatter_(-1, chosen[None], q[None])
        torch.manual_seed(trial)
        length, bonus, _ = dspark_accept.accept_sampling(
            candidates=torch.cat((torch.tensor([3]), drafts))[None],
            target_logits=logits,
            draft_probs=dense,
            sampling_info=info,
            draft_input=SimpleNamespace(max_top_k=top_k or VOCAB, uniform_top_k_value=top_k or None),
            gamma=SLOTS,
            verify_num_draft_tokens=SLOTS + 1,
        )
        torch.manual_seed(trial)
        coins, final = torch.rand(1, SLOTS)[0].tolist(), float(torch.rand(1))

        def uniform(position: int, purpose: Purpose, coins: list[float] = coins, final: float = final) -> float:
            return coins[position] if purpose is Purpose.ACCEPT else final

        ours = accept_sampled(logits, DraftBlock(drafts, chosen, q), params, 0, uniform)
        assert (ours.drafts, ours.token) == (int(length), int(bonus))
        lengths.append(ours.drafts)
    assert len(set(lengths)) > 3
