"""The Marlin layout against a slow loop written from the formula, and bit-exact round trips."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sgl_muse_mega.checkpoint import marlin, nvfp4
from sgl_muse_mega.errors import UserError

shapes = st.tuples(st.integers(1, 2), st.integers(1, 3).map(lambda i: 64 * i), st.integers(1, 4).map(lambda i: 16 * i))
seeds = st.integers(0, 2**31)


def random_codes(experts: int, n: int, k: int, seed: int) -> torch.Tensor:
    return torch.randint(0, 256, (experts, n, k // 2), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def random_scales(experts: int, n: int, groups: int, seed: int) -> torch.Tensor:
    byte = torch.randint(0, 127, (experts, n, groups), generator=torch.Generator().manual_seed(seed))
    return byte.to(torch.uint8).view(torch.float8_e4m3fn)


def words_by_loop(codes: list[list[int]]) -> list[list[int]]:
    """Words of one matrix from the per-thread formula; codes[n][k] is one nibble."""
    n_size, k_size = len(codes), len(codes[0])
    out = [[0] * (2 * n_size) for _ in range(k_size // 16)]
    for kt in range(k_size // 16):
        for nt in range(n_size // 64):
            for th in range(32):
                for wp in range(4):
                    n0 = nt * 64 + wp * 16 + th // 4
                    ks = [kt * 16 + (th % 4) * 2 + o for o in (0, 1, 8, 9)]
                    vals = [codes[n0][k] for k in ks] + [codes[n0 + 8][k] for k in ks]
                    word = sum(vals[src] << (4 * j) for j, src in enumerate((0, 2, 4, 6, 1, 3, 5, 7)))
                    out[kt][nt * 128 + th * 4 + wp] = word - (1 << 32) if word >> 31 else word
    return out


def scale_row_of_column(c: int) -> int:
    a, r = divmod(c % 64, 4)
    i, j = divmod(4 * a + (0, 2, 1, 3)[r], 8)
    return 64 * (c // 64) + i + 8 * j


@settings(max_examples=10, deadline=None)
@given(shapes, seeds)
def test_weight_words_equal_the_slow_loop(shape, seed):
    codes = random_codes(*shape, seed)
    nibbles = torch.stack((codes & 15, codes >> 4), dim=-1).flatten(-2)
    expected = torch.tensor([words_by_loop(expert.tolist()) for expert in nibbles], dtype=torch.int32)
    assert torch.equal(marlin.pack_weight(codes), expected)


@settings(max_examples=30, deadline=None)
@given(shapes, seeds)
def test_weight_words_round_trip_both_ways(shape, seed):
    experts, n, k = shape
    codes = random_codes(*shape, seed)
    assert torch.equal(marlin.unpack_weight(marlin.pack_weight(codes)), codes)
    generator = torch.Generator().manual_seed(seed + 1)
    words = torch.randint(-(2**31), 2**31, (experts, k // 16, 2 * n), dtype=torch.int32, generator=generator)
    assert torch.equal(marlin.pack_weight(marlin.unpack_weight(words)), words)


def test_packing_accepts_non_contiguous_codes():
    codes = random_codes(3, 64, 64, 1)
    assert torch.equal(marlin.pack_weight(codes[1:, :, :16]), marlin.pack_weight(codes[1:, :, :16].clone()))


def test_a_lane_finds_its_mma_operand():
    """What a kernel does with a word: two 16-bit registers per n8 tile, lower half even k."""
    codes = random_codes(1, 64, 16, 7)[0]
    values = nvfp4.decode_e2m1(codes, torch.float32)
    words = marlin.pack_weight(codes)[0]
    for thread in range(32):
        g, q = divmod(thread, 4)
        for wp in range(4):
            word = int(words[thread * 4 + wp]) & 0xFFFFFFFF
            for m in (0, 1):
                for h in (0, 1):
                    for d in (0, 1):
                        nibble = (word >> 4 * (4 * d + 2 * m + h)) & 15
                        value = nvfp4.MAGNITUDES[nibble & 7] * (-1 if nibble & 8 else 1)
                        assert value == values[16 * wp + 8 * m + g, 8 * h + 2 * q + d]


def test_every_non_negative_scale_survives_as_e5m3():
    e4m3 = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn)
    column = torch.cat((e4m3, e4m3[:1]))[:, None]  # N = 128, one group
    stored = marlin.pack_scales(column)
    assert stored.dtype == torch.float8_e4m3fn
    assert stored.shape == (1, 128)
    for c, byte in enumerate(stored.view(torch.uint8)[0].tolist()):
        exponent, mantissa = byte >> 3, byte & 7
        value = 2.0 ** (exponent - 15) * (1 + mantissa / 8) if exponent else mantissa / 8 * 2.0**-14
        assert value == float(column[scale_row_of_column(c), 0].float()) * 128
        assert exponent or not mantissa, "never subnormal, so a kernel needs no special case"
    assert torch.equal(marlin.unpack_scales(stored).view(torch.uint8), column.view(torch.uint8))


@settings(max_examples=25, deadline=None)
@given(shapes, seeds)
def test_scale_columns_follow_the_formula_and_round_trip(shape, seed):
    experts, n, k = shape
    scales = random_scales(experts, n, k // 16, seed)
    stored = marlin.pack_scales(scales)
    assert stored.shape == (experts, k // 16, n)
    decoded = (stored.view(torch.uint8).to(torch.int16) << 7).view(torch.float16).float() / 128
    rows = [scale_row_of_column(c) for c in range(n)]
    assert torch.equal(decoded, scales.float().mT[..., rows])
    back = marlin.unpack_scales(stored)
    assert torch.equal(back.view(torch.uint8), scales.view(torch.uint8))
    assert torch.equal(marlin.pack_scales(back).view(torch.uint8), stored.view(torch.uint8))


def test_marlin_arithmetic_reproduces_the_weight():
    """Codes in the bf16 exponent field times E5M3 times the global scale equals e2m1 * e4m3 * bf16(scale_2)."""
    w = torch.randn(64, 32, generator=torch.Generator().manual_seed(3))
    experts = nvfp4.quantize(w)
    nibbles = torch.stack((experts.codes & 15, experts.codes >> 4), dim=-1).flatten(-2).to(torch.int32)
    field = (((nibbles & 8) << 12) | ((nibbles & 7) << 6)).to(torch.int16).view(torch.bfloat16).double()
    block = marlin.unpack_scales(marlin.pack_scales(experts.block_scale)).double() * 2.0**7
    stored = marlin.pack_global_scale(experts.scale_2)
    marlin_w = field * block.repeat_interleave(16, dim=-1) * stored.double()
    plain = nvfp4.dequantize_codes(experts.codes, experts.block_scale).double()
    assert torch.equal(marlin_w, plain * experts.scale_2.bfloat16().double())
    assert torch.equal(marlin.unpack_global_scale(stored), experts.scale_2.bfloat16().float())


def test_global_scale_round_trip_covers_bf16_and_refuses_overflow():
    scale_2 = torch.tensor([0.0, 1e-38, 1.1754943e-38 / 4, 3e-4, 1.0, 510.0])
    assert torch.equal(marlin.unpack_global_scale(marlin.pack_global_scale(scale_2)), scale_2.bfloat16().float())
    with pytest.raises(UserError, match="512"):
        marlin.pack_global_scale(torch.tensor([1.0, 512.0]))


@pytest.mark.parametrize("shape", [(32, 8), (96, 8), (64, 4)])
def test_shapes_off_the_tile_grid_are_refused(shape):
    with pytest.raises(ValueError, match="Marlin tiles"):
        marlin.pack_weight(torch.zeros(shape, dtype=torch.uint8))
