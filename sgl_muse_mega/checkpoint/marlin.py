"""The layout in which SGLang holds NVFP4 experts on sm_80..sm_90: Marlin tiles, bit-exactly convertible both ways.

N is the number of output rows (a multiple of 64), K the number of inputs (a multiple of 16) of one matrix; leading
dimensions (experts) are carried through. Everything here moves bits without arithmetic, except that the sign of a minus
zero block scale is lost and that the global scale is rounded to bf16.

Weight words, int32 [K / 16, 2 N]. A tile is 16 k by 64 n = 128 words = 512 contiguous bytes; row kt of the array holds
the N / 64 tiles of k = 16 kt .. 16 kt + 15, one after the other. Word `nt * 128 + lane * 4 + wp` of row kt belongs to
lane 4 g + q (g = 0..7, q = 0..3) of a warp and holds, for

    n = 64 nt + 16 wp + 8 m + g      k = 16 kt + 8 h + 2 q + d      (m, h, d = 0 or 1)

the code of (n, k) in bits 4 j .. 4 j + 3 with j = 4 d + 2 m + h: from the lowest nibble upwards (m, h, d) = (0,0,0),
(0,1,0), (1,0,0), (1,1,0), (0,0,1), (0,1,1), (1,0,1), (1,1,1). That is the lane's share of the B operand of
`mma.m16n8k16` for the two n8 tiles m = 0 and 1: register b_h has k = 8 h + 2 q in its lower half (d = 0) and the next k
in its upper half (d = 1). A lane's four words (wp = 0..3) are one 16-byte load and cover all 64 n of the tile.

Block scales, bytes [K / 16, N]. Row kt holds the scales of k group kt; byte 64 nt + 8 g + p (p = 0..7) is the scale of
n = 64 nt + g + 8 [0, 2, 1, 3, 4, 6, 5, 7][p]: eight consecutive bytes are one g for every (wp, m), in the order
(0,0), (1,0), (0,1), (1,1), (2,0), (3,0), (2,1), (3,1). A byte is bits 14..7 of the fp16 value scale * 2^7: five
exponent bits (bias 15), three mantissa bits, no sign. Every positive e4m3 value, subnormals too, is normal.
The tensor is typed float8_e4m3fn as in the server although its bytes are not e4m3.

Global scale, bf16 [experts]: bf16(scale_2) * 2^119. The factor undoes the 2^7 of the block scales and the 2^-126 that
arises when a code's three magnitude bits are placed at the low end of a bf16 exponent field.
"""

import sys

import torch
from torch import Tensor

from sgl_muse_mega.errors import UserError

_TILE_N = 64
_TILE_K = 16
_SCALE_FACTOR = 2.0**7
_GLOBAL_FACTOR = 2.0**119
_PAIR_ORDER = (0, 2, 1, 3, 4, 6, 5, 7)

if sys.byteorder != "little":
    raise ImportError("sgl_muse_mega.checkpoint.marlin composes 32-bit words from bytes and needs a little-endian host")


def pack_weight(codes: Tensor) -> Tensor:
    """Packed codes uint8 [..., N, K / 2] (low nibble = even k) -> Marlin words int32 [..., K / 16, 2 N].

    Raises ValueError when N is no multiple of 64 or K no multiple of 16.
    """
    *lead, n, half_k = codes.shape
    _check_tiles(n, 2 * half_k)
    # Bytes by (nt, wp, m, g, kt, h, q) with d inside the byte -> (kt, nt, g, q, wp, m, h).
    tiles = codes.reshape(*lead, n // 64, 4, 2, 8, half_k // 8, 2, 4)
    tiles = _permute_tail(tiles, (4, 0, 3, 6, 1, 2, 5)).contiguous()
    by_d = _transpose_nibbles(tiles[..., 0], tiles[..., 1])  # two bytes (.., m), one per d, with h inside the byte
    return torch.stack(by_d, dim=-2).flatten(-2).view(torch.int32).reshape(*lead, half_k // 8, 2 * n)


def unpack_weight(words: Tensor) -> Tensor:
    """Inverse of `pack_weight`: int32 [..., K / 16, 2 N] -> uint8 [..., N, K / 2]."""
    *lead, k_tiles, two_n = words.shape
    n, half_k = two_n // 2, k_tiles * 8
    _check_tiles(n, 2 * half_k)
    by_d = words.contiguous().view(torch.uint8).reshape(*lead, k_tiles, n // 64, 8, 4, 4, 2, 2)
    tiles = torch.stack(_transpose_nibbles(by_d[..., 0, :], by_d[..., 1, :]), dim=-1)
    return _permute_tail(tiles, (1, 4, 5, 2, 0, 6, 3)).reshape(*lead, n, half_k)


def pack_scales(block_scale: Tensor) -> Tensor:
    """Non-negative e4m3 scales [..., N, K / 16] -> Marlin bytes [..., K / 16, N], typed float8_e4m3fn.

    The sign is dropped and NaN is not preserved; `nvfp4.check_block_scale` refuses both at load.
    Raises ValueError when N is no multiple of 64.
    """
    _check_tiles(block_scale.shape[-2], _TILE_K)
    half = block_scale.to(torch.float16) * _SCALE_FACTOR
    byte = (half.view(torch.int16) >> 7).to(torch.uint8).mT
    tiles = torch.unflatten(byte, -1, (-1, _TILE_N))[..., _scale_rows(byte.device)]
    return tiles.flatten(-2).contiguous().view(torch.float8_e4m3fn)


def unpack_scales(scales: Tensor) -> Tensor:
    """Inverse of `pack_scales`: [..., K / 16, N] -> e4m3 [..., N, K / 16]."""
    _check_tiles(scales.shape[-1], _TILE_K)
    stored_at = torch.argsort(_scale_rows(scales.device))
    tiles = torch.unflatten(scales.view(torch.uint8), -1, (-1, _TILE_N))[..., stored_at]
    half = (tiles.flatten(-2).to(torch.int16) << 7).view(torch.float16) / _SCALE_FACTOR
    return half.mT.contiguous().to(torch.float8_e4m3fn)


def pack_global_scale(scale_2: Tensor) -> Tensor:
    """Global scale of one part, float32 [...] -> bf16(scale_2) * 2^119 in bf16 [...].

    Raises UserError when a value is too large for that form (512 or more).
    """
    stored = scale_2.to(torch.bfloat16) * _GLOBAL_FACTOR
    if not bool(torch.isfinite(stored).all()):
        raise UserError(
            f"An NVFP4 global scale of {float(scale_2.max()):g} does not fit Marlin's bf16 form (below 512); "
            "serve this checkpoint without the Marlin layout."
        )
    return stored


def unpack_global_scale(stored: Tensor) -> Tensor:
    """bf16(scale_2) as float32 from `pack_global_scale`'s value; the bits below bf16 are not recoverable."""
    return stored.float() / _GLOBAL_FACTOR


def _transpose_nibbles(first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """The low nibbles of both bytes in one byte and the high ones in another; its own inverse."""
    return (first & 0x0F) | (second << 4), (first >> 4) | (second & 0xF0)


def _permute_tail(tensor: Tensor, order: tuple[int, ...]) -> Tensor:
    """Permutes the last `len(order)` dimensions."""
    lead = tensor.dim() - len(order)
    return tensor.permute(*range(lead), *(lead + axis for axis in order))


def _scale_rows(device: torch.device) -> Tensor:
    """For each of the 64 stored columns of a scale tile, the row n (within 64) whose scale it holds."""
    pair = torch.tensor(_PAIR_ORDER, device=device)
    return (torch.arange(8, device=device)[:, None] + 8 * pair).flatten()


def _check_tiles(n: int, k: int) -> None:
    if n % _TILE_N or k % _TILE_K:
        raise ValueError(
            f"a matrix of {n} rows and {k} columns does not split into Marlin tiles of 64 rows x 16 columns"
        )
