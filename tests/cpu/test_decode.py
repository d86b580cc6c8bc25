"""csrc/decode on the host: both word orders decode every code with every scale to the specification's weights."""

import ctypes
import shutil
from pathlib import Path

import pytest
import torch
from torch import Tensor

from sgl_muse_mega.checkpoint import marlin, nvfp4
from sgl_muse_mega.emulator.compile import compile_kernels
from sgl_muse_mega.emulator.machine import PLAIN, KernelLibrary, Launch, Region, machine
from sgl_muse_mega.megakernel.build import source_directory

PLACED = 2.0**-104  # csrc/decode/tile.cuh: a fragment's weights are this much too small


class Params(ctypes.Structure):
    _fields_ = (("words", ctypes.c_void_p), ("scales", ctypes.c_void_p), ("fragments", ctypes.c_void_p),
                ("returned", ctypes.c_void_p), ("tiles", ctypes.c_uint32), ("unused", ctypes.c_uint32))  # fmt: skip


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> KernelLibrary:
    folder = tmp_path_factory.mktemp("decode")
    shutil.copytree(source_directory() / "decode", folder / "decode")
    shutil.copy(Path(__file__).parent / "emulated" / "decode_tiles.cu", folder)
    return KernelLibrary(compile_kernels("", folder, "decode_tiles.cu"))


def fragments(weights: Tensor) -> Tensor:
    """Weights bf16 [N, K] as fragments int32 [K / 16, N / 64, 32 lanes, 4, 4]: the A operand of mma.m16n8k16."""
    n, k = weights.shape
    # (tile, fragment, upper eight rows, lane / 4) x (step, upper eight inputs, lane % 4, two)
    split = weights.reshape(n // 64, 4, 2, 8, k // 16, 2, 4, 2)
    pairs = split.permute(4, 0, 3, 6, 1, 5, 2, 7).contiguous().view(torch.int32)
    return pairs.reshape(k // 16, n // 64, 32, 4, 4)


def test_every_code_with_every_scale(library: KernelLibrary) -> None:
    n, k = 128, 512
    codes = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8)
    scales = torch.randint(0, 127, (n, k // 16), dtype=torch.uint8)
    scale_of_byte = torch.repeat_interleave(scales.int(), 8, dim=1)
    seen = torch.cat([(codes & 15).int() * 128 + scale_of_byte, (codes >> 4).int() * 128 + scale_of_byte])
    assert len(seen.unique()) == 16 * 127
    words, stored = marlin.pack_weight(codes), marlin.pack_scales(scales.view(torch.float8_e4m3fn))
    tiles = n // 64 * (k // 16)
    out = torch.full((2, tiles, 32, 4, 4), -1, dtype=torch.int32)
    returned = torch.full((tiles, 32, 4), -1, dtype=torch.int32)
    stored_words = stored.view(torch.int32)
    machine().use(
        [
            Region("words", words, constant=True, written=True),
            Region("scales", stored_words, constant=True, written=True),
            Region("fragments", out, constant=False, written=False),
            Region("returned", returned, constant=False, written=False),
        ]
    )
    pointers = (t.data_ptr() for t in (words, stored_words, out, returned))
    launch = Launch(library.kernel("decode_tiles"), bytes(Params(*pointers, tiles, 0)), 1, 1024)
    machine().run([launch], PLAIN)
    weights = nvfp4.dequantize_codes(codes, scales.view(torch.float8_e4m3fn))
    expected = fragments((weights.float() * PLACED).to(torch.bfloat16)).reshape(tiles, 32, 4, 4)
    assert torch.equal(out[0], expected)
    assert torch.equal(out[1], expected)
    assert torch.equal(returned.flatten(), words.flatten())
