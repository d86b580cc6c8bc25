"""The reference against the Triton kernels that SGLang runs on a GPU, executed by Triton's interpreter.

Unlike its CPU path these have the rounding of the served model. Kernels written in CUDA (the norm boundary and routing
that have priority where their shapes fit) cannot run here; they are the twins of the ones below.
"""

import pytest
import torch
from equations import difference
from models import SEED, TARGET
from report import note
from sglang.kernels.ops.attention.muse_spark_qk_norm_rope_store import FusedQKNorm
from sglang.kernels.ops.layernorm.muse_spark_norm_gate import FusedRMSNormGate
from sglang.kernels.ops.layernorm.muse_spark_norm_residual import FusedPostNormResidualPreNorm
from sglang.kernels.ops.moe import muse_spark_routing as routing
from sglang.kernels.ops.moe.muse_spark_post_expert_finalize_triton import fused_post_expert_norm_weighted_sum
from sglang.srt.layers.muse_spark import muse_spark_layers as modules
from sglang.srt.layers.rotary_embedding import get_rope
from torch import Tensor, nn

from sgl_muse_mega.reference import attention, experts
from sgl_muse_mega.reference.cache import KVCache
from sgl_muse_mega.reference.numerics import Numerics, norm_weight_first, rms

NUM = Numerics()
ROWS, HIDDEN = 9, TARGET.hidden_size
SAME = 3e-4


@pytest.fixture
def random() -> torch.Generator:
    return torch.Generator().manual_seed(SEED + 6)


def bf16(random: torch.Generator, *shape: int, scale: float = 1.0) -> Tensor:
    return (scale * torch.randn(shape, generator=random)).to(torch.bfloat16)


def norm(kind: type, weight: Tensor | None, eps: float) -> nn.Module:
    made = kind(HIDDEN, eps=eps, has_weight=weight is not None, zero_centered_gamma=True)
    if weight is not None:
        made.weight = nn.Parameter(weight, requires_grad=False)
    made.precompute_effective_weight()
    return made


@pytest.mark.parametrize("after", ["attention", "experts"])
def test_norm_residual_norm_boundary(after: str, random: torch.Generator) -> None:
    """A9, A10, F1 and F15, F16, A1: gamma is bf16(1 + w) there (D-3), the router input the rounded row (D-7)."""
    branch, pre_weight = bf16(random, ROWS, HIDDEN), bf16(random, HIDDEN, scale=0.1)
    stream, gate = torch.randn(ROWS, HIDDEN, generator=random), bf16(random, HIDDEN, scale=0.5)
    gate[::16] = 3.0  # alpha's clamp
    post_weight = bf16(random, HIDDEN, scale=0.1) if after == "experts" else None
    kind = modules.MuseSpark1xRMSNormWithInputScale if after == "experts" else modules.MuseSpark1xRMSNorm
    residual = modules.MuseSpark1xNormPreservingResidualConnection(HIDDEN, TARGET.residual_gate_temperature)
    residual.gate = nn.Parameter(gate, requires_grad=False)
    residual.precompute_coefficients()
    kernel = FusedPostNormResidualPreNorm(
        norm(kind, post_weight, TARGET.post_norm_eps),
        residual,
        norm(modules.MuseSpark1xRMSNorm, pre_weight, TARGET.rms_norm_eps),
        post_norm_is_input_scale=after == "experts",
        use_residual_gate=True,
    )
    out, after_stream, router = kernel.forward_triton(stream, branch, router_dtype=torch.float32)

    if post_weight is None:
        n = attention.a9_post_attention_norm(branch.float(), TARGET.post_norm_eps, NUM)
    else:
        n = experts.f15_post_ffn_norm(branch.float(), post_weight, TARGET.post_norm_eps, NUM)
    alpha, beta = attention.residual_gate(gate, TARGET.residual_gate_temperature, NUM)
    ours = attention.a10_f16_residual(stream, n, alpha, beta)
    rounded_gamma = NUM.bf(rms(after_stream, TARGET.rms_norm_eps) * NUM.bf(1 + pre_weight.float()))
    found = {
        f"{after}: stream": difference(ours, after_stream),
        f"{after}: normed row": difference(
            experts.f1_pre_ffn_norm(after_stream, pre_weight, TARGET.rms_norm_eps, NUM), out
        ),
        f"{after}: normed row, gamma as there": difference(rounded_gamma, out),
    }
    note("SGLang Triton kernels: boundary", found)
    assert torch.equal(router, out.float())
    assert found[f"{after}: stream"].rms < (4e-3 if after == "experts" else 1e-6)  # F15's gamma is rounded too
    assert found[f"{after}: normed row"].rms < 5e-3
    assert found[f"{after}: normed row, gamma as there"].rms < SAME


@pytest.mark.parametrize("cache_dtype", [torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("theta", [500000.0, 0.0])
def test_qk_norm_rope_and_cache(cache_dtype: torch.dtype, theta: float, random: torch.Generator) -> None:
    """A3-A5 at far positions: float32 tables and one rounding (D-6); fp8 through bf16, clamped, unit scale (D-9)."""
    heads, kv_heads, d = TARGET.num_attention_heads, TARGET.num_key_value_heads, TARGET.head_dim
    widths = [heads * d, kv_heads * d, kv_heads * d, heads * d]
    qkv = bf16(random, ROWS, sum(widths))
    qkv[0, widths[0] + widths[1] :] *= 1000  # v beyond fp8's range
    positions = torch.tensor([0, 1, 63, 64, 2047, 2048, 3000, 4000, 4095])
    slots = torch.arange(1, ROWS + 1)
    caches = [torch.zeros(ROWS + 1, kv_heads * d, dtype=cache_dtype) for _ in range(2)]
    kernel = FusedQKNorm(head_dim=d, num_q_heads=heads, num_kv_heads=kv_heads, eps=TARGET.rms_norm_eps)
    rope = (
        get_rope(d, rotary_dim=d, max_position=4096, base=theta, is_neox_style=False, dtype=torch.float32)
        if theta
        else None
    )
    table = (positions, rope.cos_sin_cache) if rope else (None, None)
    q_there, _ = kernel._forward_triton(qkv, *table, kv_store=(*caches, slots))

    q, k, v, _ = qkv.float().split(widths, dim=-1)
    # The pairs that SGLang rotates lie side by side; ours are halves (section 2.3).
    q, k = (x.unflatten(-1, (-1, d // 2, 2)).transpose(-1, -2).flatten(1) for x in (q, k))
    q, k = (attention.a3_head_norm(x, d, TARGET.rms_norm_eps, NUM) for x in (q, k))
    q, k = (attention.a4_rotate(x, positions, theta, NUM) for x in (q, k))
    cache = KVCache(ROWS + 1, kv_heads, d, cache_dtype, torch.device("cpu"))
    cache.write(slots, k, v.unflatten(-1, (-1, d)))
    ours_k, ours_v = cache.read(slots, torch.float32)
    theirs_q, theirs_k = (
        x.float().unflatten(-1, (-1, d // 2, 2)).transpose(-1, -2).flatten(-2) for x in (q_there, caches[0][1:])
    )
    if cache_dtype == torch.float8_e4m3fn:
        q = q.clamp(-448, 448).to(cache_dtype).float()
    found = {"q": difference(q, theirs_q), "k": difference(ours_k, theirs_k)}
    note(f"SGLang Triton kernels: q and k norm, rotation, {str(cache_dtype)[6:]} cache", found)
    tolerance = SAME if cache_dtype == torch.bfloat16 else 3e-3  # one code of e4m3 is up to 2^-3
    assert all(x.rms < tolerance for x in found.values())
    assert torch.equal(ours_v.flatten(1), caches[1][1:].float())
    assert (caches[0][0].float() == 0).all()  # slot 0 belongs to padding


def test_output_norm_and_gate(random: torch.Generator) -> None:
    """A7 with one rounding at the end (D-12)."""
    heads, d = TARGET.num_attention_heads, TARGET.head_dim
    o, gate = bf16(random, ROWS, heads * d), bf16(random, ROWS, heads * d, scale=2)
    module = modules.MuseSpark1xRMSNorm(d, eps=TARGET.rms_norm_eps, has_weight=False)
    kernel = FusedRMSNormGate(module, True, d)
    # The wrapper asks the current CUDA device for tuned launch parameters, which the interpreter has no use for.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "current_device", lambda: 0)
        theirs = kernel.forward_triton(o, gate)
    ours = attention.a7_output_gate(o.float().unflatten(-1, (-1, d)), gate.float(), TARGET.rms_norm_eps, NUM)
    found = difference(ours, theirs)
    note("SGLang Triton kernels: output norm and gate", {"A7": found})
    assert found.rms < SAME


@pytest.mark.parametrize(("count", "top_k"), [(16, 4), (16, 8), (256, 8)])
def test_routing(count: int, top_k: int, random: torch.Generator) -> None:
    """F3-F5 in float32; equal scores go to the lower expert id, slots descend (D-23, D-24)."""
    logits, bias = 3 * torch.randn(ROWS, count, generator=random), 0.1 * torch.randn(count, generator=random)
    logits[1], bias[:8] = 0.5, 0.25  # ties
    weights, ids = _routing_kernel(logits, bias, top_k)
    scores = experts.f3_router_scores(logits, TARGET.output_multiplier)
    selected = experts.f4_select(scores, bias, top_k)
    assert torch.equal(selected, ids.long())
    found = difference(experts.f5_route_weights(scores, selected, TARGET.routed_scaling_factor), weights)
    note("SGLang Triton kernels: routing", {"F5": found})
    assert found.worst < 1e-6


def _routing_kernel(logits: Tensor, bias: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """The launch of SGLang's operator, which torch refuses to dispatch to a CPU."""
    rows, count = logits.shape
    weights, ids = torch.empty(rows, top_k), torch.empty(rows, top_k, dtype=torch.int32)
    unused = (None, None)  # expert map, number of valid rows
    strides = (count, 1, top_k, 1, top_k, 1)
    scalars = (TARGET.output_multiplier, TARGET.routed_scaling_factor, 1e-15)
    flags = {
        "NUM_EXPERTS_PADDED": count,
        "NORMALIZATION_MODE": 0,
        "HAS_MULTIPLIER": True,
        "HAS_EPS": True,
        "USE_GDC": False,
        "HAS_LOCAL_EXPERT_MAPPING": False,
        "HAS_NUM_VALID": False,
    }
    if top_k == 8:
        routing.fused_muse_spark_routing_kernel_topk8[(rows,)](
            logits, bias, weights, ids, None, *unused, rows, count, *strides, 0, *scalars, HAS_PACKED=False, **flags
        )
    else:
        routing.fused_muse_spark_routing_kernel[(rows,)](
            logits, bias, weights, ids, *unused, rows, count, *strides, *scalars, TOPK=top_k, **flags
        )
    return weights, ids


def test_expert_norm_and_combine(random: torch.Generator) -> None:
    """F11 and F12 in float32 up to one rounding (D-4, D-8, D-25); slots of other ranks count nothing."""
    latent, top_k = TARGET.moe_hidden_size, 8
    y, weight = bf16(random, ROWS, top_k, latent), bf16(random, latent, scale=0.1)
    omega = torch.rand(ROWS, top_k, generator=random)
    local = torch.randint(-1, 4, (ROWS, top_k), generator=random, dtype=torch.int32)
    gamma = (1 + weight.float()).to(torch.bfloat16)
    theirs = fused_post_expert_norm_weighted_sum(y, omega, gamma, TARGET.post_norm_eps, slot_expert_ids=local)
    kept = omega * (local >= 0)
    ours = experts.f12_combine(experts.f11_post_expert_norm(y.float(), weight, TARGET.post_norm_eps), kept, NUM)
    as_there = experts.f12_combine(norm_weight_first(y.float(), gamma.float() - 1, TARGET.post_norm_eps), kept, NUM)
    found = {"F11, F12": difference(ours, theirs), "F11, F12, gamma as there": difference(as_there, theirs)}
    note("SGLang Triton kernels: expert norm and sum", found)
    assert found["F11, F12"].rms < 4e-3
    assert found["F11, F12, gamma as there"].rms < SAME
