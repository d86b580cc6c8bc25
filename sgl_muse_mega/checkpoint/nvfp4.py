"""NVFP4 as ModelOpt writes it: 4-bit e2m1 codes, one e4m3 scale per 16 inputs, one float32 scale per matrix part.

w = e2m1(code) * e4m3(block scale) * scale_2 (specification section 3.2). A code's bit 3 is the sign and bits 2..0 index
`MAGNITUDES`; input element 2i of a row is the low nibble of byte i, element 2i + 1 the high nibble. All functions are
vectorised over leading dimensions and run on the device of their input.
"""

import torch
from torch import Tensor

from sgl_muse_mega.checkpoint.weights import Nvfp4Experts
from sgl_muse_mega.errors import UserError

GROUP = 16
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_E2M1_MAX = 6.0
_E4M3_MAX = 448.0

# Midpoint i separates codes i and i + 1. A tie goes to the even code: upwards where the upper code is even, which a
# comparison with the next float below the midpoint expresses.
_MIDPOINTS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
_THRESHOLDS = tuple(m if code % 2 == 0 else m * (1 - 2.0**-24) for code, m in enumerate(_MIDPOINTS))


def decode_e2m1(codes: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Values of packed codes: uint8 [..., n / 2] -> `dtype` [..., n], exact in every float type of 16 bits or more."""
    values = torch.tensor((*MAGNITUDES, *(-m for m in MAGNITUDES)), dtype=dtype, device=codes.device)
    byte = torch.arange(256, device=codes.device)
    pairs = torch.stack((values[byte & 15], values[byte >> 4]), dim=-1)
    return pairs[codes.int()].flatten(-2)


def encode_e2m1(values: Tensor) -> Tensor:
    """Nearest codes, ties to the even code, saturating at 6: float [..., n] (n even) -> packed uint8 [..., n / 2].

    The sign of a value that rounds to zero is kept, as in the hardware's conversion.
    """
    values = values.float()
    thresholds = torch.tensor(_THRESHOLDS, dtype=torch.float32, device=values.device)
    code = torch.bucketize(values.abs(), thresholds, out_int32=True).to(torch.uint8)
    code |= torch.signbit(values).to(torch.uint8) << 3
    return code[..., 0::2] | (code[..., 1::2] << 4)


def quantize(w: Tensor, parts: int = 1) -> Nvfp4Experts:
    """Encodes a matrix or a stack of matrices, float [..., rows, columns], columns a multiple of 16.

    The rows are split evenly into `parts` with a scale_2 each (2 for gate and up), so that scale_2 is float32
    [..., parts]. `input_scale` is all ones, which means "no calibration". Raises UserError when w is not finite and
    ValueError when the shape cannot be split.
    """
    if not bool(torch.isfinite(w).all()):
        raise UserError("A weight to be quantised to NVFP4 holds NaN or infinite values; check the BF16 checkpoint.")
    scaled, block_scale, scale_2 = _scale(w, parts)
    return Nvfp4Experts(
        codes=encode_e2m1(scaled).reshape(*w.shape[:-1], w.shape[-1] // 2),
        block_scale=block_scale.reshape(*w.shape[:-1], w.shape[-1] // GROUP),
        scale_2=scale_2,
        input_scale=torch.ones_like(scale_2),
    )


def fake_quantize(w: Tensor, parts: int = 1) -> Tensor:
    """`dequantize(quantize(w, parts))` in float32 without packing or checks, for straight-through training."""
    scaled, block_scale, scale_2 = _scale(w, parts)
    magnitude = scaled.abs()
    spacing = torch.where(magnitude < 2, 0.5, torch.where(magnitude < 4, 1.0, 2.0))
    magnitude = (magnitude / spacing).round_().mul_(spacing).clamp_(max=_E2M1_MAX)  # even multiples have even codes
    unscaled = torch.copysign(magnitude, scaled).mul_(block_scale.float()[..., None])
    return unscaled.mul_(scale_2[..., None, None, None]).reshape(w.shape)


def dequantize_codes(codes: Tensor, block_scale: Tensor) -> Tensor:
    """e2m1 * e4m3 without scale_2: uint8 [..., n / 2] and e4m3 [..., n / 16] -> bf16 [..., n].

    Exact: a 2-bit times a 4-bit significand has at most 6 bits (self-check 8).
    """
    blocks = torch.unflatten(decode_e2m1(codes), -1, (-1, GROUP))
    return (blocks * block_scale.to(torch.bfloat16)[..., None]).flatten(-2)


def dequantize(experts: Nvfp4Experts, dtype: torch.dtype = torch.float32) -> Tensor:
    """The weights [..., rows, columns]: one float32 product with scale_2, then one rounding to `dtype`."""
    w = dequantize_codes(experts.codes, experts.block_scale).float()
    parts = experts.scale_2.shape[-1]
    scaled = torch.unflatten(w, -2, (parts, -1)) * experts.scale_2[..., None, None]
    return scaled.flatten(-3, -2).to(dtype)


def check_block_scale(block_scale: Tensor, name: str) -> None:
    """Refuses NaN or negative e4m3 block scales [E, rows, columns / 16]; raises UserError with the tensor's name."""
    byte = block_scale.view(torch.uint8)
    _refuse((byte & 0x7F) == 0x7F, name, "NaN")
    _refuse(byte > 0x80, name, "negative")


def check_scale_2(scale_2: Tensor, name: str) -> None:
    """Refuses NaN, infinite or negative global scales [E, ...]; raises UserError with the tensor's name."""
    _refuse(scale_2.isnan(), name, "NaN")
    _refuse(scale_2.isinf(), name, "infinite")
    _refuse(scale_2 < 0, name, "negative")


def _refuse(wrong: Tensor, name: str, kind: str) -> None:
    count = int(wrong.sum())
    if count:
        first = [int(i) for i in wrong.nonzero()[0]]
        raise UserError(
            f"{name} holds {count} {kind} scale{'s' if count > 1 else ''}, the first at index {first}; scales of NVFP4 "
            "weights are finite and not negative, so the checkpoint is damaged: fetch or export it again."
        )


def _scale(w: Tensor, parts: int) -> tuple[Tensor, Tensor, Tensor]:
    """w as blocks in units of their scale, and the scales: f32 [..., parts, rows / parts, columns / 16, 16],
    e4m3 [..., parts, rows / parts, columns / 16], f32 [..., parts]."""
    rows, columns = w.shape[-2:]
    if rows % parts or columns % GROUP:
        raise ValueError(f"a matrix [{rows}, {columns}] does not split into {parts} parts of blocks of {GROUP} columns")
    blocks = w.detach().float().reshape(*w.shape[:-2], parts, rows // parts, columns // GROUP, GROUP)
    block_amax = blocks.abs().amax(dim=-1)
    scale_2 = block_amax.amax(dim=(-2, -1)) / (_E2M1_MAX * _E4M3_MAX)
    ratio = block_amax / (_E2M1_MAX * scale_2[..., None, None])
    # 0 / 0 where a whole part is zero; above 448 where scale_2 is subnormal, which not every PyTorch saturates.
    ratio = torch.where(block_amax == 0, 0.0, ratio).clamp(max=_E4M3_MAX)
    block_scale = ratio.to(torch.float8_e4m3fn)
    unit = block_scale.float() * scale_2[..., None, None]
    scaled = torch.where((unit == 0)[..., None], 0.0, blocks / unit[..., None])
    return scaled, block_scale, scale_2
