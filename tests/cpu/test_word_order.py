"""Field order on the host: the same permutation as the device header's, exact both ways."""

import torch

from sgl_muse_mega.checkpoint import marlin
from sgl_muse_mega.megakernel import word_order

# Bits 15 .. 0 of a half: field and pair (csrc/decode/field_order.cuh).
FIELDS = ("s0", "m3", "s3", "s1", "e3", "e3", "s2", "e0", "e0", "m0", "e1", "e1", "m1", "e2", "e2", "m2")


def from_the_table(words: torch.Tensor) -> torch.Tensor:
    """Bit by bit. A code is sign, two exponent bits and mantissa from its bit 3 down; the higher exponent bit comes
    first."""
    out = torch.zeros_like(words)
    for place, field in enumerate(FIELDS):
        offset = {"s": 3, "m": 0}.get(field[0], 2 if FIELDS.index(field) == place else 1)
        for half in (0, 16):
            bit = words >> (half + 4 * int(field[1]) + offset) & 1
            out |= bit << (half + 15 - place)
    return out


def test_every_half_word_goes_where_the_table_says_and_comes_back() -> None:
    halves = torch.arange(2**16)
    words = (halves << 16 | halves.flip(0)).to(torch.int32).view(4, -1)
    kept = words.clone()
    word_order.to_field_order(words)
    assert torch.equal(words, from_the_table(kept))
    assert not torch.equal(words, kept)
    word_order.to_marlin_order(words)
    assert torch.equal(words, kept)


def test_it_works_in_place_on_part_of_a_layer() -> None:
    codes = torch.randint(0, 256, (3, 128, 32), dtype=torch.uint8)
    words = marlin.pack_weight(codes)
    address, others = words.data_ptr(), words[[0, 2]].clone()
    word_order.to_field_order(words[1:2])
    assert words.data_ptr() == address
    assert torch.equal(words[[0, 2]], others)
    word_order.to_marlin_order(words[1:2])
    assert torch.equal(marlin.unpack_weight(words), codes)
