"""Stand-in for SGLang's compiled kernel package, which has no CPU build.

SGLang imports names of it at import time and calls two of its CPU operators on the BF16 path of Muse Spark: those two
are defined here from their meaning, everything else raises when called.
"""

import torch
from standin import answer_submodules, names_of

answer_submodules(__name__)
__getattr__ = names_of(__name__)


def _rms(x: torch.Tensor, eps: float) -> torch.Tensor:
    wide = x.float()
    return wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)


_library = torch.library.Library("sgl_kernel", "DEF")
_library.define("l2norm_cpu(Tensor x, float eps) -> Tensor")
_library.define("rmsnorm_cpu(Tensor x, Tensor weight, float eps) -> Tensor")
_library.impl("l2norm_cpu", lambda x, eps: _rms(x, eps).to(x.dtype), "CPU")
_library.impl("rmsnorm_cpu", lambda x, weight, eps: (_rms(x, eps) * weight.float()).to(x.dtype), "CPU")

# The logits of Muse Spark are `torch.mm(bf16, bf16, out_dtype=float32)`, which torch implements for CUDA only.
_aten = torch.library.Library("aten", "IMPL")
_aten.impl("mm.dtype", lambda a, b, out_dtype: a.to(out_dtype) @ b.to(out_dtype), "CPU")
