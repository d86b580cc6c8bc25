"""The differentiable models of training/ against the executable specification, on perturbed random weights."""

import pytest
import torch
from torch import Tensor

from sgl_muse_mega.reference.cache import KVCache
from sgl_muse_mega.reference.draft import ReferenceDraft
from sgl_muse_mega.reference.head import e1_embedding, o1_final_norm, o2_head, o3_softcap
from sgl_muse_mega.reference.numerics import Numerics, norm_absolute
from sgl_muse_mega.reference.target import ReferenceLayer, Rows
from training import sizes
from training.data import Examples
from training.draft_model import Blocks, Draft
from training.evaluate import greedy
from training.layout import Layout
from training.model import Layer, Target, causal_mask
from training.tokenizer import PAD
from training.train_target import balance

LENGTHS = (90, 71)  # both longer than the window of 64


def relative_error(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm())


def perturb(model: torch.nn.Module, generator: torch.Generator) -> None:
    """Moves every vector off its neutral value, so that no term can be left out unnoticed."""
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.ndim == 1 or "base_kernel" in name:
                p += 0.2 * torch.randn(p.shape, generator=generator)
            elif "kernel_projection" in name:
                p += 0.02 * torch.randn(p.shape, generator=generator)
        for name, buffer in model.named_buffers():
            if "router_bias" in name:
                buffer += 0.05 * torch.randn(buffer.shape, generator=generator)


@pytest.fixture(scope="module")
def pair() -> tuple[Target, Draft, Tensor, Layout]:
    torch.manual_seed(20261130)
    generator = torch.Generator().manual_seed(7)
    target, draft = Target(sizes.TARGET), Draft(sizes.DRAFT)
    for model in (target, draft):
        perturb(model, generator)
        model.requires_grad_(False)
    layout = Layout.of(torch.tensor(LENGTHS), 96)
    ids = torch.randint(0, sizes.TARGET.vocab_size, (sum(LENGTHS),), generator=generator)
    return target, draft, ids, layout


def row_errors(found: Tensor, expected: Tensor) -> Tensor:
    return (found.double() - expected.double()).norm(dim=-1) / expected.double().norm(dim=-1)


@pytest.mark.parametrize("index", range(sizes.LAYERS))
def test_each_layer_follows_the_reference(pair: tuple[Target, Draft, Tensor, Layout], index: int) -> None:
    """Layer by layer on the same stream: through a random stack, one near tie in the routing decides the result."""
    target, _, _, layout = pair
    stream = torch.randn(sum(LENGTHS), sizes.TARGET.hidden_size, generator=torch.Generator().manual_seed(index))
    window = sizes.TARGET.window(index)
    found, load = target.layers[index](stream, layout, causal_mask(layout.width, window, stream.device))
    reference = ReferenceLayer(sizes.TARGET, index, target.layers[index].weights(), Numerics())
    nothing = torch.empty(0, dtype=torch.int64)
    selections = []
    for row, length in enumerate(LENGTHS):
        positions = torch.arange(length)
        cache = KVCache(length, 2, 64, torch.bfloat16, torch.device("cpu"))
        rows = Rows(positions, positions, positions, nothing, nothing)
        sequence = layout.row == row
        expected, selected = reference.forward(stream[sequence].double(), rows, cache)
        selections.append(selected)
        errors = row_errors(found[sequence], expected)
        assert errors.median() < 0.005
        assert (errors > 0.02).float().mean() < 0.05  # rows with a near tie may have another expert
    counts = torch.cat(selections).flatten().bincount(minlength=sizes.TARGET.num_local_experts)
    assert (load - counts).abs().sum() <= 0.05 * load.sum()


def test_embedding_and_head_follow_the_reference(pair: tuple[Target, Draft, Tensor, Layout]) -> None:
    target, _, ids, _ = pair
    config, weights = sizes.TARGET, target.weights()
    embedding = e1_embedding(ids, weights.embed_tokens, config.rms_norm_eps, Numerics())
    assert relative_error(target.embed(ids), embedding) < 1e-3
    stream = torch.randn(len(ids), config.hidden_size, generator=torch.Generator().manual_seed(3))
    hf = o1_final_norm(stream.double(), weights.norm, config.rms_norm_eps, Numerics())
    z = o2_head(hf, weights.lm_head.double())
    expected = o3_softcap(z, config.output_multiplier, config.final_logit_softcapping)
    assert relative_error(target.head(target.final_norm(stream)), expected) < 1e-3


def test_nvfp4_and_selection_bias_matter_in_that_comparison(pair: tuple[Target, Draft, Tensor, Layout]) -> None:
    target, _, _, layout = pair
    stream = torch.randn(sum(LENGTHS), sizes.TARGET.hidden_size, generator=torch.Generator().manual_seed(2))
    mask = causal_mask(layout.width, sizes.WINDOW, stream.device)
    layer = target.layers[2]
    expected, _ = layer(stream, layout, mask)
    plain = Layer(sizes.TARGET.model_copy(update={"quantization": None}), 2)
    plain.load_state_dict(layer.state_dict())
    unbiased = Layer(sizes.TARGET, 2)
    unbiased.load_state_dict({**layer.state_dict(), "router_bias": torch.zeros(sizes.TARGET.num_local_experts)})
    for other in (plain, unbiased):
        with torch.no_grad():
            found, _ = other(stream, layout, mask)
        assert row_errors(found, expected).quantile(0.9) > 0.02


def test_draft_blocks_follow_the_reference(pair: tuple[Target, Draft, Tensor, Layout]) -> None:
    target, draft, ids, layout = pair
    config = sizes.DRAFT
    taps = target(ids, layout, config.target_layer_ids).taps
    grid = layout.pad(ids)
    start = torch.tensor([[80, 3, 50], [66, 20, 67]])
    hf = draft(taps, layout, Blocks.of(target, config, grid, start))
    weights, embed = draft.weights(), target.weights()
    reference = ReferenceDraft(config, weights, embed.embed_tokens, embed.lm_head, sizes.TARGET.rms_norm_eps)
    for row, length in enumerate(LENGTHS):
        caches = [KVCache(length, 2, 128, torch.bfloat16, torch.device("cpu")) for _ in weights.layers]
        positions = torch.arange(length)
        c = reference.context(torch.stack([tap[layout.row == row] for tap in taps]).double())
        reference.write_context(c, positions, positions, caches)
        for column, begin in enumerate(start[row].tolist()):
            block = torch.tensor([int(grid[row, begin])] + [config.mask_token_id] * 7)
            first = max(0, begin + 1 - config.sliding_window)
            h = reference.block(block, begin, torch.arange(first, begin), first, caches)
            expected = norm_absolute(h, weights.norm, config.rms_norm_eps)
            assert relative_error(hf[row, column], expected) < 0.02
            logits = target.head(hf[row, column, 1:])
            path = draft.walk(hf[row, column, 1:], logits, block[0])
            found = reference.candidates(h, int(block[0]))
            overlap = (path[:, None] == found.candidates).any(-1)
            assert overlap.float().mean() > 0.9


def test_balancing_raises_the_bias_of_idle_experts_only(pair: tuple[Target, Draft, Tensor, Layout]) -> None:
    target, _, ids, layout = pair
    output = target(ids, layout)
    before = torch.stack([layer.router_bias.clone() for layer in target.layers])
    balance(target, output, 0.01)
    moved = torch.stack([layer.router_bias for layer in target.layers]) - before
    idle = output.load < output.load.mean(-1, keepdim=True)
    busy = output.load > output.load.mean(-1, keepdim=True)
    assert torch.allclose(moved[idle], torch.tensor(0.01), atol=1e-6)
    assert torch.allclose(moved[busy], torch.tensor(-0.01), atol=1e-6)
    for layer, bias in zip(target.layers, before, strict=True):
        layer.router_bias.copy_(bias)


def test_greedy_extends_each_prompt_by_its_own_argmax(pair: tuple[Target, Draft, Tensor, Layout]) -> None:
    """Grids are wider than the layout of short prompts; every row must still read its own tokens."""
    target, _, ids, layout = pair
    grid = torch.full((2, 24), PAD, dtype=torch.int16)
    grid[:, :12] = layout.pad(ids)[:, :12].to(torch.int16)
    prompts = torch.tensor([9, 12])
    generated = greedy(target, Examples(grid, torch.tensor([24, 24]), prompts))
    for row, prompt in enumerate(prompts.tolist()):
        text = generated.ids[row, : generated.lengths[row]].long()
        assert torch.equal(text[:prompt], grid[row, :prompt].long())
        whole = Layout.of(torch.tensor([len(text)]), 24)
        logits = target(text, whole).logits[prompt - 1 : -1]
        assert torch.equal(text[prompt:], logits.argmax(-1))
