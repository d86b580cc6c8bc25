"""The protocol as data: expected counts, the schedule of the dense products, fault records."""

import ctypes

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sgl_muse_mega.megakernel import protocol
from sgl_muse_mega.megakernel.tiling import Dense

COUNTER = protocol.COUNTERS[0]
ROWS = next(c for c in protocol.COUNTERS if c.arrivals is protocol.Arrivals.EVERY_ROW)


@given(st.integers(0, 2**32 + 5), st.integers(1, 132), st.sampled_from((8, 16)))
def test_expected_counts_grow_by_the_arrivals_of_one_launch(epoch: int, sms: int, row_cap: int) -> None:
    for counter, arrivals in ((COUNTER, sms), (ROWS, row_cap)):
        now = protocol.expected(counter, epoch, sms=sms, row_cap=row_cap)
        following = protocol.expected(counter, epoch + 1, sms=sms, row_cap=row_cap)
        assert (following - now) % 2**32 == arrivals
        assert 0 <= now < 2**32


def test_first_launch_expects_one_round_of_arrivals() -> None:
    assert protocol.expected(COUNTER, 0, sms=132, row_cap=8) == 132
    assert protocol.expected(ROWS, 0, sms=132, row_cap=8) == 8


def test_header_names_every_counter_site_point_and_parameter() -> None:
    text = protocol.header()
    names = [c.name for c in protocol.COUNTERS] + [name for name, _ in protocol.SITES] + list(protocol.POINTS)
    names += [f" {name}" + ("[8];" if name == "mailboxes" else ";") for name, _ in protocol.PARAMETERS]
    assert not [name for name in names if name not in text]


def test_kernels_use_known_counters_and_every_counter_is_used() -> None:
    known = {c.name for c in protocol.COUNTERS}
    used = {name for names in protocol.KERNELS.values() for name in names}
    assert used == known


def test_parameter_block_has_no_holes() -> None:
    """The kernels declare the same fields in the same order; without padding the two layouts cannot differ."""
    sizes = sum(ctypes.sizeof(c_type) for _, c_type in protocol.Params._fields_)
    assert ctypes.sizeof(protocol.Params) == sizes
    assert sizes < 4096  # what a kernel takes by value


def test_fault_record_is_read_only_when_complete() -> None:
    words = [1, 3, 77, 0, 264, 131, 12, 0]
    assert protocol.FaultRecord.read(words) is None
    words[7] = protocol.RECORD_COMPLETE
    record = protocol.FaultRecord.read(words)
    assert record is not None
    sentence = record.sentence()
    for part in ("rank 3", "CTA 77", "launch 12", "expected 264", "saw 131", protocol.COUNTERS[0].sentence):
        assert part in sentence


@pytest.mark.parametrize("index", range(len(protocol.SITES)))
def test_sites_follow_the_counters(index: int) -> None:
    words = [1, 0, 0, len(protocol.COUNTERS) + index, 1, 0, 0, protocol.RECORD_COMPLETE]
    record = protocol.FaultRecord.read(words)
    assert record is not None
    assert protocol.SITES[index][1] in record.sentence()


@given(st.integers(1, 5000), st.integers(1, 64), st.integers(1, 132))
def test_dense_schedule_covers_every_unit_once(n: int, chunks: int, sms: int) -> None:
    dense = Dense(n, chunks * 64, 64, sms)
    units = dense.blocks * chunks
    assert dense.first_unit(0) == 0
    assert dense.first_unit(dense.workers) == units
    sizes = [dense.first_unit(w + 1) - dense.first_unit(w) for w in range(dense.workers)]
    assert max(sizes) - min(sizes) <= 1
    assert min(sizes) >= 1  # nobody is idle between two workers of a block: parts have no gaps


@given(st.integers(1, 5000), st.integers(1, 64), st.integers(1, 132), st.data())
def test_worker_of_inverts_first_unit(n: int, chunks: int, sms: int, data: st.DataObject) -> None:
    dense = Dense(n, chunks * 64, 64, sms)
    unit = data.draw(st.integers(0, dense.blocks * chunks - 1))
    worker = dense.worker_of(unit)
    assert dense.first_unit(worker) <= unit < dense.first_unit(worker + 1)


@given(st.integers(1, 2000), st.integers(1, 64), st.integers(1, 132))
def test_parts_is_the_most_workers_of_any_block(n: int, chunks: int, sms: int) -> None:
    dense = Dense(n, chunks * 64, 64, sms)
    workers = [len({dense.worker_of(u) for u in range(b * chunks, (b + 1) * chunks)}) for b in range(dense.blocks)]
    assert dense.parts == max(workers)
