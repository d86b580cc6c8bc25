import random

import numpy as np
import pytest
from scipy import stats

from sgl_muse_mega.speculative.philox import Purpose, philox, uniform


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [  # known-answer vectors of the authors' Random123 distribution, philox4x32 with 10 rounds
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        (
            (0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF),
            (0xFFFFFFFF, 0xFFFFFFFF),
            (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
        ),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_known_answers(counter: tuple[int, int, int, int], key: tuple[int, int], words: tuple[int, ...]) -> None:
    assert philox(counter, key) == words


def test_documented_layout() -> None:
    """The counter and key words as the module describes them for kernels."""
    seed, position = random.getrandbits(64), random.getrandbits(40)
    for purpose in Purpose:
        counter = (position & 0xFFFFFFFF, position >> 32, purpose.value, 0)
        word = philox(counter, (seed & 0xFFFFFFFF, seed >> 32))[0]
        assert uniform(seed, position, purpose) == (word >> 8) / 2**24


def test_exact_in_float32_and_below_one() -> None:
    for position in range(2000):
        u = uniform(7, position, Purpose.ACCEPT)
        assert 0 <= u < 1
        assert float(np.float32(u)) == u


def test_streams_are_uniform_and_unrelated() -> None:
    seed = random.getrandbits(64)
    draws = np.array([[uniform(seed, position, purpose) for purpose in Purpose] for position in range(5000)])
    for column in draws.T:
        assert stats.kstest(column, "uniform").pvalue > 1e-6, seed
    correlation = np.corrcoef(np.concatenate([draws.T, draws.T[:, ::-1]]))
    off_diagonal = correlation[~np.eye(6, dtype=bool)]
    assert np.abs(off_diagonal).max() < 6 / np.sqrt(5000), seed


def test_every_argument_matters() -> None:
    seed = random.getrandbits(63)
    values = {
        uniform(s, p, purpose)
        for s in (seed, seed + 1, seed ^ (1 << 63))
        for p in (5, 6, 5 + (1 << 32))
        for purpose in Purpose
    }
    assert len(values) == 27
