"""The reference against the specification's own self-checks (section 11) and against itself where it must agree."""

from dataclasses import replace

import pytest
import torch
from small_models import small_draft, small_target
from torch import Tensor

from sgl_muse_mega.checkpoint.nvfp4 import dequantize
from sgl_muse_mega.checkpoint.random_weights import random_draft, random_layer, random_target
from sgl_muse_mega.checkpoint.weights import ConvWeights, Nvfp4Experts
from sgl_muse_mega.config import TargetConfig
from sgl_muse_mega.errors import UserError
from sgl_muse_mega.reference import attention, experts, selector
from sgl_muse_mega.reference.backend import ReferenceBackend
from sgl_muse_mega.reference.cache import KVCache, PageTable
from sgl_muse_mega.reference.draft import ReferenceDraft, conv
from sgl_muse_mega.reference.numerics import Numerics, norm_weight_first
from sgl_muse_mega.reference.target import ReferenceLayer, Rows

NUM = Numerics()
EXACT = Numerics(exact=True)


def chain(length: int, shift: int = 0) -> Rows:
    """Rows 0 .. length - 1 of a fresh sequence, positions moved by `shift`."""
    slots = torch.arange(length) + 1
    none = torch.empty(0, dtype=torch.int64)
    return Rows(torch.arange(length) + shift, slots, slots, none, none)


def run_layer(
    config: TargetConfig, index: int, stream: Tensor, rows: Rows, num: Numerics = NUM, seed: int = 7
) -> Tensor:
    layer = ReferenceLayer(config, index, random_layer(config, index, seed), num)
    cache = KVCache(
        len(rows.positions) + 1, config.num_key_value_heads, config.head_dim, torch.float64, torch.device("cpu")
    )
    return layer.forward(num.value(stream), rows, cache)[0]


def test_gate_preserves_the_norm_until_its_clamp() -> None:
    alpha, beta = attention.residual_gate(torch.linspace(-3, 3, 1001), 0.3, EXACT)
    clamped = beta.square() > 0.999
    torch.testing.assert_close((alpha.square() + beta.square())[~clamped], torch.ones(int((~clamped).sum())).double())
    assert clamped.any()
    torch.testing.assert_close(alpha[clamped], torch.full_like(alpha[clamped], 0.001).sqrt())


def test_weight_first_norm_has_unit_rms_for_any_gamma() -> None:
    m = norm_weight_first(torch.randn(5, 64) * 3, torch.randn(64), 1e-8)
    torch.testing.assert_close(m.square().mean(-1).sqrt(), torch.ones(5), rtol=1e-5, atol=0)


@pytest.mark.parametrize("w4a16", ["normative", "marlin"])
def test_scale_of_up_rows_cancels_in_the_post_expert_norm(w4a16: str) -> None:
    config = small_target()
    weights = random_layer(config, 1, seed=3)
    assert isinstance(weights.gate_up_proj, Nvfp4Experts)
    scaled = replace(weights.gate_up_proj, scale_2=weights.gate_up_proj.scale_2 * torch.tensor([1.0, 4.0]))
    x, selected = NUM.bf(torch.randn(3, 32)), torch.tensor([[0, 1, 2], [3, 4, 5], [0, 5, 7]])
    omega = torch.rand(3, 3)
    num = Numerics(w4a16=w4a16)  # type: ignore[arg-type]
    results = [
        experts.f8_to_f12_experts(
            x, selected, omega, experts.ExpertStack(gate_up, num), experts.ExpertStack(weights.down_proj, num),
            weights.post_expert_norm, 1e-8, num,
        )
        for gate_up in (weights.gate_up_proj, scaled)
    ]  # fmt: skip
    torch.testing.assert_close(results[0], results[1], rtol=0.01, atol=0.01)


def test_marlin_rounding_differs_from_the_normative_one_by_bf16_steps() -> None:
    config = small_target()
    stream = torch.randn(9, 64)
    normative = run_layer(config, 1, stream, chain(9))
    marlin = run_layer(config, 1, stream, chain(9), Numerics(w4a16="marlin"))
    assert not torch.equal(normative, marlin)
    assert (normative - marlin).norm() < 0.02 * normative.norm()


def test_nvfp4_layer_equals_a_bf16_layer_of_the_dequantised_weights() -> None:
    config = small_target()
    weights = random_layer(config, 1, seed=5)
    assert isinstance(weights.gate_up_proj, Nvfp4Experts)
    assert isinstance(weights.down_proj, Nvfp4Experts)
    plain = replace(
        weights,
        gate_up_proj=dequantize(weights.gate_up_proj, torch.float64),
        down_proj=dequantize(weights.down_proj, torch.float64),
    )
    stream = torch.randn(4, 64).double()
    results = []
    for w in (weights, plain):
        cache = KVCache(5, 2, 16, torch.float64, torch.device("cpu"))
        results.append(ReferenceLayer(config, 1, w, EXACT).forward(stream, chain(4), cache)[0])
    torch.testing.assert_close(results[0], results[1], rtol=1e-5, atol=1e-5)  # dequantize() rounds to float32


@pytest.mark.parametrize("layer", [0, 3])
def test_permuted_query_and_key_rows_give_the_same_layer(layer: int) -> None:
    """Rotate-half rows with pairs (j, j + d/2) equal adjacent-pair rows with adjacent rotation (section 2.3)."""
    config = small_target()
    q, k = (NUM.bf(torch.randn(5, heads, 16)) for heads in (4, 2))
    order = torch.stack((torch.arange(8), torch.arange(8) + 8), dim=1).flatten()
    positions = torch.arange(5) + 40
    theta = config.rope_theta(layer)
    plain = [attention.a4_rotate(x, positions, theta, NUM) for x in (q, k)]
    adjacent = []
    for x in (q, k):
        y = x[..., order]
        if theta:
            angle = positions[:, None, None] * theta ** (-torch.arange(0, 16, 2) / 16)
            even, odd = y[..., 0::2], y[..., 1::2]
            y = NUM.bf(
                torch.stack((even * angle.cos() - odd * angle.sin(), odd * angle.cos() + even * angle.sin()), -1)
            )
            y = y.flatten(-2)
        adjacent.append(y)
    scores = [torch.einsum("thd,nhd->htn", a[0][:, :2], a[1]) for a in (plain, adjacent)]
    torch.testing.assert_close(scores[0], scores[1], rtol=1e-3, atol=1e-3)


def test_window_edge() -> None:
    """A sliding layer's output at position i depends on row i - 5 (window 6) and not on row i - 6."""
    config = small_target()
    stream = torch.randn(20, 64)
    for row, changes in ((9, False), (10, True), (16, False)):
        moved = stream.clone()
        moved[row] += 1
        # A change may be too small to survive rounding; unchanged means unchanged bits, which rounding gives.
        num = EXACT if changes else NUM
        assert torch.equal(*(run_layer(config, 0, x, chain(20), num)[15] for x in (stream, moved))) is not changes


def test_full_layer_has_no_positional_signal_and_sees_everything() -> None:
    config = small_target()
    stream = torch.randn(20, 64)
    still, shifted = (run_layer(config, 3, stream, chain(20, shift)) for shift in (0, 117))
    assert torch.equal(still, shifted)
    moved = stream.clone()
    moved[0] += 1
    first, last = (run_layer(config, 3, x, chain(20), EXACT)[15] for x in (stream, moved))
    assert not torch.equal(first, last)
    assert not torch.equal(run_layer(config, 0, stream, chain(20, 117)), run_layer(config, 0, stream, chain(20)) + 1)


def test_route_weights_sum_to_the_scaling_factor_and_ignore_a_common_bias() -> None:
    scores = torch.rand(6, 8)
    bias = torch.randn(8)
    chosen = experts.f4_select(scores, bias, 3)
    assert torch.equal(chosen, experts.f4_select(scores, bias + 5, 3))
    torch.testing.assert_close(experts.f5_route_weights(scores, chosen, 2.5).sum(-1), torch.full((6,), 2.5))


def test_selection_ties_go_to_the_lower_expert() -> None:
    scores = torch.tensor([[0.5, 0.75, 0.5, 0.75, 0.5, 0.25]])
    assert experts.f4_select(scores, torch.zeros(6), 4).tolist() == [[1, 3, 0, 2]]


@pytest.mark.parametrize("kv_dtype", ["bf16", "fp8"])
@pytest.mark.parametrize("page_size", [1, 16])
def test_verify_equals_prefill_and_single_rows(kv_dtype: str, page_size: int) -> None:
    """The same tokens in one prefill, in verifies of any width, and one by one: bit-identical logits."""
    config = small_target()
    weights = random_target(config, seed=11)
    ids = torch.randint(0, 96, (40,)).tolist()
    backend = ReferenceBackend(config, weights, max_context=64, page_size=page_size, kv_dtype=kv_dtype)
    expected = {n: backend.prefill(ids[:n]) for n in (1, 5, 6, 7, 12, 13, 30, 40)}
    for widths in ((1,), (2, 5), (16,), (3, 1, 8)):
        backend.prefill(ids[:1])
        step = 0
        while backend.length < 40:
            width = min(widths[step % len(widths)], 40 - backend.length)
            logits = backend.verify(ids[backend.length : backend.length + width])
            for row in range(width):
                if backend.length + row + 1 in expected:
                    assert torch.equal(logits[row], expected[backend.length + row + 1])
            backend.commit(width)
            step += 1


def test_rejected_rows_leave_no_trace() -> None:
    config = small_target()
    weights = random_target(config, seed=12)
    draft_config = small_draft(config)
    draft_weights = random_draft(draft_config, seed=2)
    ids = torch.randint(0, 96, (30,)).tolist()
    clean, messy = (ReferenceBackend(config, weights, draft_config, draft_weights, max_context=64) for _ in range(2))
    clean.prefill(ids[:10])
    messy.prefill(ids[:10])
    for _ in range(5):
        accepted = ids[clean.length : clean.length + 3]
        clean.verify(accepted)
        messy.verify(accepted + torch.randint(0, 96, (9,)).tolist())
        clean.commit(3)
        messy.commit(3)
        anchor = ids[clean.length]
        a, b = (backend.draft(anchor, 8, 0.0, ()) for backend in (clean, messy))
        assert torch.equal(a.candidates, b.candidates)
        assert torch.equal(a.tokens, b.tokens)
    assert torch.equal(clean.verify(ids[25:27]), messy.verify(ids[25:27]))


def test_a_window_beyond_the_context_takes_no_memory() -> None:
    """Published windows are 2,048; a context of a few rows must not pay for one, nor a damaged file end in a trap."""
    config = small_target().model_copy(update={"sliding_window": 10**15})
    draft_config = small_draft(config).model_copy(update={"sliding_window": 10**15})
    backend = ReferenceBackend(
        config, random_target(config, 1), draft_config, random_draft(draft_config, 2), max_context=40
    )
    assert backend.prefill([5] * 30).isfinite().all()
    backend.draft(5, 4, 0.0, [])
    backend.verify([5, 6, 7, 8])
    backend.commit(4)
    assert backend.length == 34


def test_sliding_pages_are_freed_and_their_content_is_never_read() -> None:
    config = small_target(num_hidden_layers=3, layer_types=["sliding_attention"] * 3)
    weights = random_target(config, seed=13)
    ids = torch.randint(0, 96, (400,)).tolist()
    backend = ReferenceBackend(config, weights, max_context=400, page_size=4)
    long = backend.prefill(ids)
    assert long.isfinite().all()
    # Three sliding layers of window 6 reach back 3 * 5 tokens.
    assert torch.equal(long, backend.prefill(ids[:100] + ids[100:]))
    changed = [(token + 1) % 96 for token in ids[:384]] + ids[384:]
    assert torch.equal(long, backend.prefill(changed))
    changed = [*ids[:396], (ids[396] + 1) % 96, *ids[397:]]
    assert not torch.equal(long, backend.prefill(changed))


def test_tree_rows_see_their_ancestors_only() -> None:
    """Two branches in one step equal each branch on its own."""
    config = small_target()
    layer = ReferenceLayer(config, 0, random_layer(config, 0, 5), NUM)
    stream = torch.randn(5, 64)  # root, branch a (1, 2), branch b (3, 4)
    none = torch.empty(0, dtype=torch.int64)
    ancestors = torch.eye(5, dtype=torch.bool)
    ancestors[:, 0] = True
    ancestors[2, 1] = ancestors[4, 3] = True
    positions, slots = torch.tensor([0, 1, 2, 1, 2]), torch.arange(5) + 1
    cache = KVCache(6, 2, 16, torch.bfloat16, torch.device("cpu"))
    tree = layer.forward(stream, Rows(positions, slots, slots, none, none, ancestors=ancestors), cache)[0]
    for branch in ([0, 1, 2], [0, 3, 4]):
        alone = layer.forward(stream[branch], chain(3), cache)[0]
        assert torch.equal(tree[branch], alone)


def test_page_table() -> None:
    table = PageTable(pages=4, page_size=8)
    table.reserve(17)
    slots = table.slots(torch.arange(17))
    assert len(set(slots.tolist())) == 17
    assert slots.min() >= 8  # page 0 is never handed out
    with pytest.raises(UserError, match=r"cache is full: position 24 needs another page of 8 slots"):
        table.reserve(25)
    table.evict_before(15)
    assert table.free_pages == 1
    table.reserve(25)
    table.reset()
    assert table.free_pages == 3


def test_fp8_cache_clamps_and_rounds() -> None:
    cache = KVCache(3, 1, 2, torch.float8_e4m3fn, torch.device("cpu"))
    cache.write(torch.tensor([1]), torch.tensor([[[1000.0, -0.3]]]), torch.tensor([[[-1000.0, 17.0]]]))
    keys, values = cache.read(torch.tensor([1]), torch.float32)
    assert keys.tolist() == [[[448.0, -0.3125]]]
    assert values.tolist() == [[[-448.0, 16.0]]]
    assert cache.read(torch.tensor([2]), torch.float32)[0].isnan().all()


def test_convolution_stays_inside_the_block() -> None:
    x = NUM.bf(torch.randn(4, 32)).double()
    base, dynamic = torch.randn(2, 32).double(), torch.randn(4, 2, 2).double()
    y = conv(x, base, dynamic, EXACT)
    for t in range(4):
        for channel in (0, 15, 16, 31):
            group = channel // 16
            previous = x[t - 1, channel] if t else 0.0
            expected = (base[0, channel] + dynamic[t, 0, group]) * x[t, channel]
            expected += (base[1, channel] + dynamic[t, 1, group]) * previous
            torch.testing.assert_close(y[t, channel], expected)


def test_identity_convolution_is_a_plain_draft() -> None:
    config = small_target()
    draft_config = small_draft(config)
    weights = random_draft(draft_config, seed=4)
    identity = torch.zeros(2, 2, 64, dtype=torch.bfloat16)
    identity[:, 0] = 1
    still = ConvWeights(identity, torch.zeros(16, 64, dtype=torch.bfloat16))
    x = NUM.bf(torch.randn(8, 64))
    assert torch.equal(conv(x, identity[0], torch.zeros(8, 2, 4), NUM), x)
    target = random_target(config, seed=4)
    layers = tuple(replace(w, attention_conv=still, mlp_conv=still) for w in weights.layers)
    ids, none = torch.randint(0, 96, (8,)), torch.empty(0, dtype=torch.int64)
    caches = [KVCache(1, 2, 16, torch.bfloat16, torch.device("cpu")) for _ in layers]
    outputs = []
    for w in (replace(weights, layers=layers), weights):
        draft = ReferenceDraft(draft_config, w, target.embed_tokens, target.lm_head, 1e-5)
        outputs.append(draft.block(ids, 0, none, 0, caches))
    assert not torch.equal(outputs[0], outputs[1])


@pytest.mark.parametrize("causal", [False, True])
def test_causality_inside_the_block(causal: bool) -> None:
    config = small_target()
    draft_config = small_draft(config, is_causal=causal)
    target = random_target(config, seed=6)
    draft = ReferenceDraft(draft_config, random_draft(draft_config, 6), target.embed_tokens, target.lm_head, 1e-5)
    caches = [KVCache(1, 2, 16, torch.bfloat16, torch.device("cpu")) for _ in range(2)]
    ids, none = torch.randint(0, 90, (8,)), torch.empty(0, dtype=torch.int64)
    changed = ids.clone()
    changed[7] = (ids[7] + 1) % 90
    before, after = (draft.block(x, 0, none, 0, caches) for x in (ids, changed))
    assert torch.equal(before[:7], after[:7]) is causal


def test_zero_selector_projection_returns_each_slots_best() -> None:
    config = small_target()
    draft_config = small_draft(config)
    weights = random_draft(draft_config, seed=9)
    target = random_target(config, seed=9)
    for projection, equal in (
        (torch.zeros_like(weights.hidden_projection), True),
        (weights.hidden_projection * 9, False),
    ):
        draft = ReferenceDraft(
            draft_config, replace(weights, hidden_projection=projection), target.embed_tokens, target.lm_head, 1e-5
        )
        found = draft.candidates(NUM.bf(torch.randn(8, 64)), anchor=3)
        assert (selector.walk_greedy(found.lattice).tolist() == [0] * 7) is equal


def test_lattice_by_hand() -> None:
    u, chosen = torch.randn(3, 4), torch.randint(0, 96, (3, 4))
    e, a, b = torch.randn(3, 5), torch.randn(96, 5), torch.randn(96, 5)
    scores = selector.lattice(u, chosen, 17, e, a, b, EXACT)
    for t in range(3):
        for p in range(4):
            for c in range(4):
                before = 17 if t == 0 else int(chosen[t - 1, p])
                expected = u[t, c].double() + sum(
                    a[before, r].double() * e[t, r] * b[chosen[t, c], r] for r in range(5)
                )
                torch.testing.assert_close(scores[t, p, c].double(), expected, rtol=1e-5, atol=1e-5)


def test_candidates_break_ties_by_id() -> None:
    z = torch.tensor([[1.0, 3.0, 3.0, 2.0, 3.0, 2.0]])
    assert selector.candidates(z, 5).tolist() == [[1, 2, 4, 3, 5]]


def test_greedy_walk_takes_the_first_maximum_and_nan() -> None:
    scores = torch.zeros(2, 3, 3)
    scores[0, 0] = torch.tensor([1.0, 5.0, 5.0])
    scores[1, 1] = torch.tensor([9.0, float("nan"), float("nan")])
    assert selector.walk_greedy(scores).tolist() == [1, 1]


def test_sampled_walk_inverts_the_distribution() -> None:
    scores = torch.log(torch.tensor([0.5, 0.25, 0.25])).expand(1, 3, 3)
    for uniform, index in ((0.0, 0), (0.49, 0), (0.51, 1), (0.76, 2), (0.9999999, 2)):
        path, q = selector.walk_sampled(scores, 1.0, [uniform])
        assert path.tolist() == [index]
        torch.testing.assert_close(q[0], torch.tensor([0.5, 0.25, 0.25]))


def test_prompt_limits() -> None:
    config = small_target()
    backend = ReferenceBackend(config, random_target(config, 1), max_context=8)
    with pytest.raises(UserError, match="prompt is empty"):
        backend.prefill([])
    with pytest.raises(UserError, match="prompt has 9 tokens, but the context holds 8"):
        backend.prefill([0] * 9)
    backend.prefill([0] * 7)
    with pytest.raises(UserError, match="Position 8 lies outside the context of 8"):
        backend.verify([1, 2])
