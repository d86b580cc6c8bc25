"""Rounding, matrix products and the norm flavours (model specification, sections 2 and 2.1)."""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

Container = TypeVar("Container")

Record = Callable[[str, Tensor], None]
"""Receives the name of an equation and its result; how tests look at the inside of a forward pass."""


@dataclass(frozen=True, slots=True)
class Numerics:
    """Which rounding points apply.

    w4a16: "normative" scales the float32 accumulators (section 4.2, last item); "marlin" rounds as SGLang's Marlin path
    does: accumulator to bf16, times the bf16 global scale, to bf16, with the gate's scale also on the up half.
    exact: float64 throughout and no rounding at all; the yardstick that rounded runs are measured against.
    """

    w4a16: Literal["normative", "marlin"] = "normative"
    exact: bool = False

    @property
    def dtype(self) -> torch.dtype:
        """Type in which values are held: float32, or float64 when exact."""
        return torch.float64 if self.exact else torch.float32

    def value(self, x: Tensor) -> Tensor:
        """x in the working type, values unchanged."""
        return x.to(self.dtype)

    def bf(self, x: Tensor) -> Tensor:
        """Round to nearest even to bfloat16, held in the working type."""
        return x if self.exact else x.to(torch.bfloat16).to(self.dtype)


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """y = x W^T with W stored [out, in]; summed in float64, returned in x's type without further rounding."""
    return (x.double() @ weight.double().T).to(x.dtype)


def sigmoid(x: Tensor) -> Tensor:
    """Computed in float64 and rounded once, like the sums: PyTorch's float32 code gives other last bits at the end of a
    tensor than inside it, so that a row would depend on the number of rows."""
    return torch.sigmoid(x.double()).to(x.dtype)


def silu(x: Tensor) -> Tensor:
    """x sigmoid(x), computed like `sigmoid`."""
    return torch.nn.functional.silu(x.double()).to(x.dtype)


def rms(x: Tensor, eps: float) -> Tensor:
    """x * rsqrt(mean(x^2) + eps) over the last dimension."""
    mean_square = x.double().square().mean(dim=-1, keepdim=True)
    return (x.double() * torch.rsqrt(mean_square + eps)).to(x.dtype)


def norm_weightless(x: Tensor, eps: float) -> Tensor:
    """N0: embedding, Q, K, attention output, post-attention."""
    return rms(x, eps)


def norm_zero_centred(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """N1: norm first, then (1 + w); the addition stays in the working type (D-3)."""
    return rms(x, eps) * (1 + weight.to(x.dtype))


def norm_weight_first(
    x: Tensor, weight: Tensor, eps: float, round_scaled: Callable[[Tensor], Tensor] | None = None
) -> Tensor:
    """N2: (1 + w) x first, then the norm, so the output has unit RMS whatever the gamma.

    round_scaled rounds (1 + w) x before the mean square: bf16 for the post-FFN norm, nothing for the post-expert norm
    (D-4).
    """
    scaled = (1 + weight.to(x.dtype)) * x
    return rms(round_scaled(scaled) if round_scaled else scaled, eps)


def norm_absolute(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """NF (final norm) and the draft's norms: plain gamma."""
    return rms(x, eps) * weight.to(x.dtype)


def widened(weights: Container) -> Container:
    """A weight container with its matrices in float64, the type `linear` sums in, so that they are converted once."""
    container: Any = weights
    matrices = {f.name: getattr(container, f.name) for f in fields(container)}
    wide = {name: w.double() for name, w in matrices.items() if isinstance(w, Tensor) and w.dim() == 2}
    result: Container = replace(container, **wide)
    return result
