"""The Marlin layout against SGLang's reference packing and the scale functions of its loader."""

import pytest
import torch
from models import SEED
from sglang.srt.layers.quantization import marlin_utils, marlin_utils_fp4
from sglang.test import test_marlin_utils

from sgl_muse_mega.checkpoint import marlin, nvfp4

SHAPES = [(64, 32), (128, 64), (192, 144), (256, 128)]  # rows N, inputs K; one k group alone is stored in another order


@pytest.mark.parametrize(("rows", "inputs"), SHAPES)
def test_weight_words(rows: int, inputs: int) -> None:
    generator = torch.Generator().manual_seed(SEED + rows)
    codes = torch.randint(256, (rows, inputs // 2), dtype=torch.uint8, generator=generator)
    nibbles = torch.stack((codes & 15, codes >> 4), dim=-1).flatten(-2)  # [N, K]
    permutation = test_marlin_utils.get_weight_perm(4)
    theirs = test_marlin_utils.marlin_weights(nibbles.T.int(), inputs, rows, 4, permutation)
    ours = marlin.pack_weight(codes)
    assert ours.shape == theirs.shape
    assert torch.equal(ours, theirs.to(torch.int32))
    assert torch.equal(marlin.unpack_weight(theirs.to(torch.int32)), codes)


@pytest.mark.parametrize(("rows", "inputs"), SHAPES)
def test_block_scales(rows: int, inputs: int) -> None:
    """Every finite non-negative e4m3 value, in SGLang's order and 8-bit form."""
    generator = torch.Generator().manual_seed(SEED + inputs)
    byte = torch.randint(0x7F, (rows, inputs // 16), dtype=torch.uint8, generator=generator)
    byte.flatten()[:0x7F] = torch.arange(min(byte.numel(), 0x7F), dtype=torch.uint8)
    scale = byte.view(torch.float8_e4m3fn)
    transposed = scale.to(torch.bfloat16).T.contiguous()
    theirs = marlin_utils_fp4.nvfp4_marlin_process_scales(
        marlin_utils.marlin_permute_scales(transposed, size_k=inputs, size_n=rows, group_size=16)
    )
    ours = marlin.pack_scales(scale)
    assert ours.shape == theirs.shape
    assert torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8))
    assert torch.equal(marlin.unpack_scales(theirs).view(torch.uint8), byte)


def test_global_scale() -> None:
    generator = torch.Generator().manual_seed(SEED + 1)
    scale_2 = torch.rand(64, generator=generator) * 2.0 ** torch.randint(-30, 3, (64,), generator=generator)
    theirs = marlin_utils_fp4.nvfp4_marlin_process_global_scale(scale_2.to(torch.bfloat16))
    assert torch.equal(marlin.pack_global_scale(scale_2), theirs)
    assert torch.equal(marlin.unpack_global_scale(theirs), scale_2.to(torch.bfloat16).float())


def test_the_whole_weight_from_the_words() -> None:
    """Words, bytes and global scale together give back the NVFP4 matrix; up takes the gate's scale there (D-11)."""
    generator = torch.Generator().manual_seed(SEED + 2)
    matrix = torch.randn(3, 128, 64, generator=generator)
    stored = nvfp4.quantize(matrix)
    codes = marlin.unpack_weight(marlin.pack_weight(stored.codes))
    scale = marlin.unpack_scales(marlin.pack_scales(stored.block_scale))
    exact = nvfp4.dequantize_codes(codes, scale).float()
    assert torch.equal(exact * stored.scale_2[..., None], nvfp4.dequantize(stored))
