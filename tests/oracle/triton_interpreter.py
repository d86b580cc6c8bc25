"""Gives Triton's interpreter the rounding of a GPU.

The interpreter (3.9) cuts float32 off where a GPU rounds to nearest even, so kernels that store bf16 or fp8 would be
compared with the wrong thing.
"""

from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

_NARROW = {
    tl.bfloat16: (torch.bfloat16, torch.int16, np.uint16),
    tl.float8e4nv: (torch.float8_e4m3fn, torch.uint8, np.uint8),
}
_convert = interpreter._convert_float


def _round_to_nearest(data: Any, source: Any, target: Any, mode: Any) -> Any:
    if source != tl.float32 or target not in _NARROW:
        return _convert(data, source, target, mode)
    dtype, bits, numpy_bits = _NARROW[target]
    rounded = torch.from_numpy(np.ascontiguousarray(data)).to(dtype).view(bits)
    return rounded.numpy().view(numpy_bits).reshape(data.shape)


def install() -> None:
    interpreter._convert_float = _round_to_nearest
