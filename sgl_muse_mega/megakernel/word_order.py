"""The order of the bits inside the words of NVFP4 experts: Marlin's, or field order (csrc/decode/field_order.cuh).

Both hold the same codes; going from one to the other permutes the 16 bits of each half of a word, so it is exact both
ways and needs no second copy. Field order takes fewer instructions to decode; Marlin's is what the server's own kernels
read.
"""

from torch import Tensor

# (bits to move left, which bits of a half arrive there): Marlin's order to field order, and back.
_TO_FIELD = ((12, 0x8000), (6, 0x01C0), (5, 0x1000), (-1, 0x0038), (-2, 0x0200), (-8, 0x0007), (-2, 0x2000),
             (-3, 0x0C00), (2, 0x4000))  # fmt: skip
_TO_MARLIN = tuple((-left, mask >> left if left > 0 else mask << -left) for left, mask in _TO_FIELD)


def to_field_order(words: Tensor) -> None:
    """Permutes Marlin's words, int32 [experts, ...], in place."""
    _permute(words, _TO_FIELD)


def to_marlin_order(words: Tensor) -> None:
    """Inverse of `to_field_order`."""
    _permute(words, _TO_MARLIN)


def _permute(words: Tensor, moves: tuple[tuple[int, int], ...]) -> None:
    for expert in words.unbind():  # one at a time: the copies stay small
        permuted = expert.new_zeros(expert.shape)
        for left, half_mask in moves:
            moved = expert << left if left > 0 else expert >> -left
            # As an int32, a mask with bit 31 is negative.
            mask = half_mask * 0x10001
            permuted |= moved & (mask - 2**32 if mask >= 2**31 else mask)
        expert.copy_(permuted)
