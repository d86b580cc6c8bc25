"""NVFP4 encoding against the specification's words, applied one number at a time in double precision."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sgl_muse_mega.checkpoint import nvfp4
from sgl_muse_mega.checkpoint.weights import Nvfp4Experts
from sgl_muse_mega.errors import UserError

MAGNITUDES = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
E4M3 = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).double().tolist()


def nearest_even_code(x: float) -> int:
    """Code of |x| by distance, ties to the even code."""
    return min(range(8), key=lambda c: (abs(MAGNITUDES[c] - min(abs(x), 6.0)), c % 2))


def nearest_e4m3(x: float) -> int:
    return min(range(127), key=lambda b: (abs(E4M3[b] - min(x, 448.0)), b % 2))


def nibbles(codes: torch.Tensor) -> torch.Tensor:
    return torch.stack((codes & 15, codes >> 4), dim=-1).flatten(-2)


def matrix(seed: int, *shape: int, spread: float = 1.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    w = torch.randn(shape, generator=generator)
    return w * torch.exp(spread * torch.randn((*shape[:-1], shape[-1] // 16), generator=generator)).repeat_interleave(
        16, -1
    )


def test_low_nibble_is_the_even_element():
    codes = torch.tensor([[0xA1, 0x7F]], dtype=torch.uint8)
    assert nvfp4.decode_e2m1(codes).tolist() == [[0.5, -1.0, -6.0, 6.0]]


def test_all_bytes_decode_and_encode_back():
    codes = torch.arange(256, dtype=torch.uint8)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        values = nvfp4.decode_e2m1(codes, dtype)
        assert values.dtype == dtype
        expected = [MAGNITUDES[c & 7] * (-1 if c & 8 else 1) for byte in range(256) for c in (byte & 15, byte >> 4)]
        assert values.tolist() == expected
        assert torch.equal(nvfp4.encode_e2m1(values), codes)


def test_ties_go_to_the_even_code_and_large_values_saturate():
    cases = {0.25: 0, 0.75: 2, 1.25: 2, 1.75: 4, 2.5: 4, 3.5: 6, 5.0: 6, 5.5: 7, 7.0: 7, 1e30: 7}
    for value, code in cases.items():
        for sign in (1.0, -1.0):
            encoded = int(nvfp4.encode_e2m1(torch.tensor([sign * value, 0.0]))[0])
            assert encoded == code + (8 if sign < 0 else 0)
    for tie in (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0):
        below, above = np.nextafter(np.float32(tie), np.float32(0)), np.nextafter(np.float32(tie), np.float32(9))
        packed = nvfp4.encode_e2m1(torch.tensor([float(below), float(above)]))
        assert nibbles(packed).tolist() == [nearest_even_code(float(below)), nearest_even_code(float(above))]


@settings(max_examples=200, deadline=None)
@given(st.lists(st.floats(-8, 8, width=32), min_size=2, max_size=32).filter(lambda v: len(v) % 2 == 0))
def test_encoding_is_to_nearest(values):
    found = nibbles(nvfp4.encode_e2m1(torch.tensor(values))).tolist()
    assert found == [nearest_even_code(v) + (8 if math.copysign(1, v) < 0 else 0) for v in values]


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**31), st.sampled_from([1, 2]), st.sampled_from([0.1, 1.0, 4.0]))
def test_quantize_follows_the_specification(seed, parts, spread):
    w = matrix(seed, 4, 32, spread=spread)
    w[1, :16] = 0
    found = nvfp4.quantize(w, parts)
    assert found.scale_2.shape == (parts,)
    assert torch.equal(found.input_scale, torch.ones(parts))
    codes = nibbles(found.codes)
    for row in range(4):
        part = row // (4 // parts)
        block_of_part = w[part * 4 // parts : (part + 1) * 4 // parts]
        scale_2 = np.float32(block_of_part.abs().max().item()) / np.float32(6 * 448)
        assert found.scale_2[part].item() == scale_2
        for group in range(2):
            block = w[row, 16 * group : 16 * group + 16]
            ratio = np.float32(block.abs().max().item()) / (np.float32(6) * scale_2)
            byte = nearest_e4m3(float(ratio))
            assert int(found.block_scale.view(torch.uint8)[row, group]) == byte
            unit = np.float32(E4M3[byte]) * scale_2
            for i, value in enumerate(block.numpy()):
                code = int(codes[row, 16 * group + i])
                expected = nearest_even_code(float(value / unit)) + (8 if value < 0 else 0) if unit else 0
                assert code == expected
    assert int(found.block_scale.view(torch.uint8)[1, 0]) == 0


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**31), st.sampled_from([1, 2]), st.sampled_from([0.1, 1.0, 6.0]))
def test_fake_quantize_is_the_round_trip_and_idempotent_codes(seed, parts, spread):
    w = matrix(seed, 3, 8, 64, spread=spread)
    experts = nvfp4.quantize(w, parts)
    dequantized = nvfp4.dequantize(experts)
    assert dequantized.dtype == torch.float32
    assert torch.equal(nvfp4.fake_quantize(w, parts), dequantized)
    one_by_one = [nvfp4.dequantize(nvfp4.quantize(expert, parts)) for expert in w]
    assert torch.equal(torch.stack(one_by_one), dequantized)
    error = (w - dequantized).abs().unflatten(-1, (-1, 16))
    # Neighbouring magnitudes are up to 2 apart and a block scale rounds by at most 2^-4, so no error passes 1/6 + 2^-4
    # of the block's largest value; blocks whose scale is subnormal lose more.
    normal = experts.block_scale.float() >= 2.0**-6
    bound = w.abs().unflatten(-1, (-1, 16)).amax(-1) * (1 / 6 + 2.0**-4)
    assert bool((error.amax(-1) <= bound)[normal].all())


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 2**31))
def test_product_of_code_and_block_scale_is_exact_in_bf16(seed):
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 256, (2, 127, 8), dtype=torch.uint8, generator=generator)
    scales = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).reshape(1, 127, 1).expand(2, -1, -1)
    found = nvfp4.dequantize_codes(codes, scales)
    assert found.dtype == torch.bfloat16
    exact = nvfp4.decode_e2m1(codes, torch.float64) * scales.double()
    assert torch.equal(found.double(), exact)


def test_fake_quantize_rounds_ties_like_the_codes():
    block = [0.0, 0.2, 0.25, 0.3, 0.75, 1.25, 1.75, 2.0, 2.5, 3.5, 3.6, 4.0, 5.0, 5.1, 5.5, 6.0]
    w = torch.tensor([*block, *(-v for v in block), *[6 * 448.0] * 16])[None]  # the last block makes scale_2 one
    experts = nvfp4.quantize(w)
    assert experts.scale_2.item() == 1.0
    assert experts.block_scale.float()[0, :2].tolist() == [1.0, 1.0]
    assert torch.equal(nvfp4.fake_quantize(w), nvfp4.dequantize(experts))
    assert torch.equal(torch.signbit(nvfp4.fake_quantize(w)), torch.signbit(nvfp4.dequantize(experts)))


def test_dequantize_applies_each_part_its_own_scale():
    codes = torch.full((2, 4, 8), 0x22, dtype=torch.uint8)
    scales = torch.ones(2, 4, 1).to(torch.float8_e4m3fn)
    scale_2 = torch.tensor([[1.0, 10.0], [100.0, 1000.0]])
    found = nvfp4.dequantize(Nvfp4Experts(codes, scales, scale_2, torch.ones(2, 2)), torch.bfloat16)
    assert found.dtype == torch.bfloat16
    assert found[:, :, 0].tolist() == [[1, 1, 10, 10], [100, 100, 1000, 1000]]


@pytest.mark.parametrize("magnitude", [0.0, 1e-45, 1e-42, 1e-38, 1e30])
def test_extreme_magnitudes_stay_finite_and_non_negative(magnitude):
    w = torch.linspace(-1, 1, 64).reshape(2, 32) * magnitude
    experts = nvfp4.quantize(w)
    nvfp4.check_block_scale(experts.block_scale, "w")
    nvfp4.check_scale_2(experts.scale_2, "w")
    assert bool(torch.isfinite(nvfp4.dequantize(experts)).all())
    if magnitude >= 1e-38:
        assert torch.allclose(nvfp4.dequantize(experts), w, rtol=0, atol=0.25 * magnitude)


def test_a_straight_through_gradient_passes():
    w = matrix(1, 4, 32).requires_grad_()
    out = w + (nvfp4.fake_quantize(w) - w).detach()
    (out * torch.arange(32.0)).sum().backward()
    assert torch.equal(w.grad, torch.arange(32.0).expand(4, 32))
    assert torch.allclose(out, nvfp4.fake_quantize(w))


def test_bf16_input_quantises_like_its_float32_value():
    w = matrix(5, 4, 32).bfloat16()
    assert torch.equal(nvfp4.quantize(w).codes, nvfp4.quantize(w.float()).codes)


def test_not_finite_weights_are_refused_and_shapes_checked():
    w = torch.ones(4, 32)
    w[2, 3] = math.nan
    with pytest.raises(UserError, match="NaN or infinite"):
        nvfp4.quantize(w)
    for shape, parts in (((3, 32), 2), ((4, 24), 1)):
        with pytest.raises(ValueError, match="does not split"):
            nvfp4.quantize(torch.ones(shape), parts)


@pytest.mark.parametrize(("byte", "kind"), [(0x7F, "NaN"), (0xFF, "NaN"), (0x81, "negative"), (0xFE, "negative")])
def test_bad_block_scales_are_refused_by_name(byte, kind):
    good = torch.arange(24, dtype=torch.uint8).reshape(2, 3, 4)
    good[0, 0, 0] = 0x80  # minus zero has the value 0
    nvfp4.check_block_scale(good.view(torch.float8_e4m3fn), "layers.3.scale")
    good[1, 2, 0] = byte
    with pytest.raises(UserError, match=rf"layers\.3\.scale holds 1 {kind} scale, the first at index \[1, 2, 0\]"):
        nvfp4.check_block_scale(good.view(torch.float8_e4m3fn), "layers.3.scale")


@pytest.mark.parametrize(
    ("value", "kind"), [(math.nan, "NaN"), (math.inf, "infinite"), (-math.inf, "inf"), (-1.0, "neg")]
)
def test_bad_global_scales_are_refused_by_name(value, kind):
    scale_2 = torch.tensor([[1.0, 0.0], [value, 2.0]])
    with pytest.raises(UserError, match=rf"gate_up\.scale_2 holds 1 {kind}.* \[1, 0\]"):
        nvfp4.check_scale_2(scale_2, "gate_up.scale_2")
