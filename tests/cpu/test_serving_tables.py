"""A request's slots out of a server's tables, against the plain meaning of each table."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sgl_muse_mega.megakernel.scratch import StepInputs
from sgl_muse_mega.serving.tables import AttentionTables, LiveTables

POSITIONS, WINDOW, GARBAGE = 96, 10, 2**30
CPU = torch.device("cpu")


def inputs() -> StepInputs:
    return StepInputs.allocate(8, POSITIONS, CPU)


@given(length=st.integers(0, POSITIONS), page=st.sampled_from([1, 4, 16, 64, 256]), seed=st.integers(0, 99))
@settings(max_examples=40, deadline=None)
def test_page_tables(length: int, page: int, seed: int) -> None:
    """Pages in any order; entries past the length are another request's."""
    generator = torch.Generator().manual_seed(seed)
    used = -(-length // page)
    tables = []
    for _ in range(2):
        table = torch.full((1, used + 3), GARBAGE // page, dtype=torch.int32)
        table[0, :used] = torch.randperm(500, generator=generator)[:used]
        tables.append(table)
    made = inputs()
    metadata = SimpleNamespace(page_table=tables[0], swa_page_table=tables[1])
    AttentionTables(made, window=WINDOW, page_size=page).copy(metadata)
    for pages, table in ((made.full_pages, tables[0]), (made.sliding_pages, tables[1])):
        assert pages[:length].tolist() == [int(table[0, p // page]) * page + p % page for p in range(length)]


@given(length=st.integers(0, POSITIONS), seed=st.integers(0, 99), decoding=st.booleans())
@settings(max_examples=40, deadline=None)
def test_packed_slots(length: int, seed: int, decoding: bool) -> None:
    """Triton's lists: all slots, and those of the last window - 1 positions; with the row itself when decoding."""
    window = WINDOW - 1
    total = min(length + decoding, POSITIONS)
    full, sliding = (torch.randperm(1000, generator=torch.Generator().manual_seed(seed + i)) for i in (0, 1))
    packed = min(total, window)
    read, near = (torch.full((200,), GARBAGE) for _ in range(2))
    read[:total], near[:packed] = full[:total], sliding[total - packed : total]
    metadata = SimpleNamespace(
        kv_indices=read, kv_indptr=torch.tensor([0, total], dtype=torch.int32),
        window_kv_indices=near, window_kv_indptr=torch.tensor([0, packed], dtype=torch.int32),
    )  # fmt: skip
    made = inputs()
    AttentionTables(made, window=WINDOW - decoding, page_size=1).copy(metadata)
    assert torch.equal(made.full_pages[:total].long(), full[:total])
    first = max(0, total - packed)
    assert torch.equal(
        made.sliding_pages[first : min(total, POSITIONS - 1)].long(), sliding[first : min(total, POSITIONS - 1)]
    )


@pytest.mark.parametrize("length", [0, 1, 9, 10, 11, 60, POSITIONS - 24])
def test_live_tables(length: int) -> None:
    """The window, the rows of this step and where the next one may begin; what is evicted maps to slot 0."""
    generator = torch.Generator().manual_seed(length)
    requests = torch.zeros(3, POSITIONS, dtype=torch.int32)
    requests[1] = (torch.randperm(200, generator=generator)[:POSITIONS] + 1).int()
    mapping = torch.cat((torch.zeros(1, dtype=torch.int64), torch.randperm(200, generator=generator) + 1))
    mapping[requests[1, : max(0, length - WINDOW + 1)].long()] = 0
    made = inputs()
    made.length.fill_(length)
    LiveTables(made, window=WINDOW).copy(requests, torch.tensor([1]), mapping)
    assert torch.equal(made.full_pages, requests[1])
    seen = slice(max(0, length - WINDOW + 1), length + 16)
    assert torch.equal(made.sliding_pages[seen].long(), mapping[requests[1, seen].long()])


def test_rows_beyond_the_table_go_to_the_slot_of_nobody() -> None:
    """A step that starts at the end of the context has rows for which the server keeps no slots."""
    made, short = inputs(), POSITIONS - 4
    made.full_pages.fill_(77)  # of another request's step
    made.sliding_pages.fill_(77)
    made.length.fill_(short - 3)
    table = torch.arange(1, short + 1, dtype=torch.int32)[None]
    LiveTables(made, window=WINDOW).copy(table, torch.tensor([0]), torch.arange(POSITIONS + 1))
    assert made.full_pages.tolist() == [*range(1, short + 1), 0, 0, 0, 0]
    assert made.sliding_pages[short - 3 :].tolist() == [short - 2, short - 1, short, 0, 0, 0, 0]


def test_a_model_without_sliding_layers() -> None:
    made = inputs()
    LiveTables(made, window=WINDOW).copy(torch.ones(1, POSITIONS, dtype=torch.int32), torch.tensor([0]), None)
    metadata = SimpleNamespace(page_table=torch.ones(1, POSITIONS, dtype=torch.int32), swa_page_table=None)
    AttentionTables(made, window=WINDOW, page_size=1).copy(metadata)
    assert made.full_pages.eq(1).all()
    assert not made.sliding_pages.any()
