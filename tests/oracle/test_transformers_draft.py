"""The plain DFlash part of the reference draft against transformers' `muse_glimmer_assistant` and its generator."""

from types import SimpleNamespace

import pytest
import torch
import transformers_draft as oracle
from equations import difference
from models import DRAFT, LAYERS, SEED, TARGET, draft_weights, token_ids
from report import note
from torch import Tensor, nn
from transformers.cache_utils import DFlashCache
from transformers.generation.candidate_generator import DFlashTokenCandidateGenerator

from sgl_muse_mega.checkpoint.weights import DraftWeights, TargetWeights
from sgl_muse_mega.reference.cache import KVCache
from sgl_muse_mega.reference.draft import ReferenceDraft
from sgl_muse_mega.reference.numerics import Numerics, norm_absolute
from sgl_muse_mega.reference.selector import walk_greedy

EXACT = Numerics(exact=True)
RAW = DRAFT.model_copy(update={"normed_embedding": False})  # D-16
WIDTH, CONTEXT = DRAFT.block_size, 3 * DRAFT.sliding_window
BOUND = 2e-6


@pytest.fixture(scope="module")
def draft() -> DraftWeights:
    return oracle.plain(draft_weights())


@pytest.fixture(scope="module")
def taps() -> Tensor:
    generator = torch.Generator().manual_seed(SEED + 4)
    return torch.randn(len(DRAFT.target_layer_ids), CONTEXT, DRAFT.hidden_size, generator=generator).double()


@pytest.fixture(scope="module")
def ids() -> Tensor:
    block = torch.full((WIDTH,), DRAFT.mask_token_id)
    block[0] = 11
    return block


def ours(draft: DraftWeights, target: TargetWeights, taps: Tensor, ids: Tensor, window: int) -> Tensor:
    """The hidden rows of the block after the final norm, [W, H]."""
    config = RAW.model_copy(update={"sliding_window": window})
    reference = ReferenceDraft(config, draft, target.embed_tokens, target.lm_head, TARGET.rms_norm_eps, EXACT)
    caches = [
        KVCache(CONTEXT, config.num_key_value_heads, config.head_dim, torch.float64, torch.device("cpu"))
        for _ in range(config.num_hidden_layers)
    ]
    positions = torch.arange(CONTEXT)
    reference.write_context(reference.context(taps), positions, positions, caches)
    h = reference.block(ids, CONTEXT, positions, 0, caches)
    return norm_absolute(h, draft.norm, config.rms_norm_eps)


def theirs(draft: DraftWeights, target: TargetWeights, taps: Tensor, ids: Tensor, window: int) -> Tensor:
    """The same from transformers, the context given in two pieces as in two steps of a generation."""
    model = oracle.build(DRAFT, draft, torch.float64, window)
    cache = DFlashCache(config=model.config)
    cache.activate_past_recording()
    embeddings = target.embed_tokens[ids].double()
    with torch.inference_mode():
        for start, end in ((0, CONTEXT - 5), (CONTEXT - 5, CONTEXT)):
            cache.set_previous_accepted_tokens(end - start)
            if start:
                cache.crop(-WIDTH)
            hidden = model(
                noise_embeds=embeddings[None],
                context_hidden_states=taps[:, start:end].transpose(0, 1).flatten(1)[None],
                position_ids=torch.arange(start, end + WIDTH)[None],
                cache=cache,
            ).last_hidden_state[0]
    return hidden


def test_block(draft: DraftWeights, weights: TargetWeights, taps: Tensor, ids: Tensor) -> None:
    """Context projection, K and V, bidirectional block, window; and the one key by which the windows differ (D-38)."""
    window = DRAFT.sliding_window
    reference = ours(draft, weights, taps, ids, window)
    found = {
        "window one shorter": difference(reference, theirs(draft, weights, taps, ids, window - 1)),
        "same window": difference(reference, theirs(draft, weights, taps, ids, window)),
        "no window": difference(ours(draft, weights, taps, ids, 1000), theirs(draft, weights, taps, ids, 1000)),
    }
    note("transformers draft, float64", found)
    assert found["window one shorter"].rms < BOUND
    assert found["no window"].rms < BOUND
    assert found["same window"].rms > 100 * BOUND


def test_plain_draft_has_no_other_parts(weights: TargetWeights, taps: Tensor, ids: Tensor) -> None:
    """With its convolutions the draft is another one: the test above does not pass by leaving them out everywhere."""
    window = DRAFT.sliding_window
    full, plain = draft_weights(), oracle.plain(draft_weights())
    assert difference(ours(full, weights, taps, ids, window), ours(plain, weights, taps, ids, window)).rms > 1e-2


def test_candidate_generator(draft: DraftWeights, weights: TargetWeights, taps: Tensor) -> None:
    """transformers' generator: which rows become context, positions, raw embeddings, and the proposed tokens."""
    model = oracle.build(DRAFT, draft, torch.float64, DRAFT.sliding_window - 1)
    embedding = nn.Embedding.from_pretrained(weights.embed_tokens.double())
    head = nn.Linear(DRAFT.hidden_size, DRAFT.vocab_size, bias=False)
    head.weight = nn.Parameter(weights.lm_head.double())
    settings = SimpleNamespace(max_length=1000, do_sample=False)
    generator = DFlashTokenCandidateGenerator(model, embedding, head, settings)
    ids = token_ids(CONTEXT + 1, SEED + 5)
    states = [torch.zeros(1, CONTEXT, DRAFT.hidden_size, dtype=torch.float64) for _ in range(LAYERS + 1)]
    for layer, tap in zip(DRAFT.target_layer_ids, taps, strict=True):
        states[layer + 1] = tap[None]  # after the layer (D-19)
    with torch.inference_mode():
        proposed, logits = generator.get_candidates(
            input_ids=ids[None],
            model_kwargs={
                "position_ids": torch.arange(CONTEXT + 1)[None],
                "attention_mask": torch.ones(1, CONTEXT + 1),
            },
            model_outputs=SimpleNamespace(hidden_states=states),
            is_first_iteration=False,
            n_last_matches=0,
        )
    block = torch.full((WIDTH,), DRAFT.mask_token_id)
    block[0] = ids[-1]
    hidden = ours(draft, weights, taps, block, DRAFT.sliding_window)
    found = difference(hidden[1:] @ weights.lm_head.double().T, logits[0])
    note("transformers draft, float64", {"logits of the generator": found})
    assert found.rms < BOUND

    reference = ReferenceDraft(RAW, draft, weights.embed_tokens, weights.lm_head, TARGET.rms_norm_eps, EXACT)
    h = hidden / draft.norm.double()  # the head norms once more; unit rows stay what they are
    proposals = reference.candidates(h, int(ids[-1]))
    path = walk_greedy(proposals.lattice)
    tokens = proposals.candidates.gather(1, path[:, None])[:, 0]
    assert torch.equal(path, torch.zeros_like(path))  # each slot's own first candidate
    assert torch.equal(tokens, proposed[0, -(WIDTH - 1) :])
