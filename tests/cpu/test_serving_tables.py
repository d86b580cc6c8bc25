"""A request's slots out of a server's tables: the kernels in the emulator against the formulas of `table_formulas` and
against the plain meaning of each table."""

import copy
import shutil
from dataclasses import dataclass, fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import table_formulas
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_count import KernelCount
from race_faults import Change
from torch import Tensor

from sgl_muse_mega.emulator.machine import PLAIN, EmulatorFault, Schedule, racing
from sgl_muse_mega.emulator.stepper import Emulator
from sgl_muse_mega.megakernel.build import source_directory
from sgl_muse_mega.megakernel.draft_protocol import STATE
from sgl_muse_mega.megakernel.draft_scratch import DecodeState
from sgl_muse_mega.megakernel.scratch import StepInputs
from sgl_muse_mega.megakernel.server_instance import Indices
from sgl_muse_mega.serving.tables import AttentionTables, LiveTables

POSITIONS, WINDOW, CAP, GARBAGE = 96, 10, 8, 2**30
CPU = torch.device("cpu")


@dataclass
class Memory:
    """A step's inputs and state, all of it of an earlier request, and a machine that may touch them."""

    inputs: StepInputs
    state: DecodeState
    machine: Emulator

    @classmethod
    def used(
        cls, seed: int = 0, cap: int = CAP, schedule: Schedule = PLAIN, sources: Path | None = None
    ) -> "Memory":  # fmt: skip
        made = cls(
            StepInputs.allocate(cap, POSITIONS, CPU), DecodeState.allocate(cap, CPU), Emulator(2, schedule, sources)
        )
        generator = torch.Generator().manual_seed(seed)
        for name in (f.name for f in fields(made.inputs)):
            tensor = getattr(made.inputs, name)
            tensor.copy_(torch.randint(0, 300, tensor.shape, generator=generator))
        made.state.state.copy_(torch.randint(1, 9, made.state.state.shape, generator=generator))
        made.declare()
        return made

    def declare(self) -> None:
        held = [(f"inputs.{f.name}", getattr(self.inputs, f.name), False, True) for f in fields(self.inputs)]
        held += [(f"state.{name}", getattr(self.state, name), False, True) for name in ("state", "path")]
        self.machine.declare(held)

    def copies(self) -> tuple[StepInputs, DecodeState]:
        return copy.deepcopy(self.inputs), copy.deepcopy(self.state)

    def live(self, req_to_token: Tensor, full_to_sliding: Tensor | None, window: int = WINDOW) -> LiveTables:
        return LiveTables(
            self.machine, self.inputs, self.state, window=window, req_to_token=req_to_token,
            full_to_sliding=full_to_sliding,
        )  # fmt: skip

    def same(self, expected: StepInputs, but: tuple[str, ...] = ()) -> None:
        for name in (f.name for f in fields(expected)):
            if name not in but:
                assert torch.equal(getattr(self.inputs, name), getattr(expected, name)), name


def scattered(count: int, seed: int) -> Tensor:
    """Slots 1 .. count in any order."""
    return torch.randperm(count, generator=torch.Generator().manual_seed(seed)) + 1


def begin(made: Memory, tables: LiveTables, row: int, length: int, anchor: int = 7) -> Tensor:
    result = torch.full((CAP + 3,), -1)
    tables.launch_begin(torch.tensor([row]), torch.tensor([length]), torch.tensor([anchor]), result)
    made.machine.synchronize()
    return result


@given(
    length=st.one_of(
        st.sampled_from([0, 1, WINDOW - 1, WINDOW, WINDOW + 1, POSITIONS - 16]), st.integers(0, POSITIONS - 16)
    ),
    held=st.sampled_from([POSITIONS - 30, POSITIONS - 5, POSITIONS, POSITIONS + 40]),
    cap=st.sampled_from([8, 16]),
    window=st.sampled_from([1, WINDOW, 50, 500]),
    hybrid=st.booleans(),
    wide=st.booleans(),
    seed=st.integers(0, 99),
)
@settings(max_examples=60, deadline=None)
def test_the_beginning_of_a_step(
    length: int, held: int, cap: int, window: int, hybrid: bool, wide: bool, seed: int
) -> None:
    """Also at the end of the context, where the server's table is shorter than the step's, and with a table of another
    integer. What no row of this step or the next can see is left as it was."""
    made = Memory.used(seed, cap)
    inputs, state = made.copies()
    kind = torch.int64 if wide else torch.int32
    requests = torch.stack([scattered(held, seed + row) for row in range(3)]).to(kind)
    mapping = torch.cat((torch.zeros(1, dtype=torch.int64), scattered(held, seed + 3))) if hybrid else None
    before = copy.deepcopy(inputs)
    row, committed, anchor = torch.tensor([seed % 3]), torch.tensor([length]), torch.tensor([seed])
    table_formulas.begin_step(
        inputs, state, row, committed, anchor, window=window, req_to_token=requests, full_to_sliding=mapping
    )
    tables = made.live(requests, mapping, window)
    tables.launch_begin(row.to(kind), committed, anchor.to(kind), torch.zeros(cap + 3, dtype=torch.int64))
    made.machine.synchronize()
    made.same(inputs, but=("full_pages", "sliding_pages"))
    assert torch.equal(made.state.state, state.state)
    end = length + 2 * cap
    seen = slice(max(0, length - window), end)
    assert torch.equal(made.inputs.full_pages[:end], inputs.full_pages[:end])
    assert torch.equal(made.inputs.full_pages[end:], before.full_pages[end:])
    assert torch.equal(made.inputs.sliding_pages[seen], inputs.sliding_pages[seen])
    for rest in (slice(0, seen.start), slice(end, None)):
        assert torch.equal(made.inputs.sliding_pages[rest], before.sliding_pages[rest])


@given(
    width=st.integers(2, CAP),
    committed=st.integers(0, CAP),
    tree=st.booleans(),
    restore=st.booleans(),
    seed=st.integers(0, 99),
)
@settings(max_examples=40, deadline=None)
def test_the_end_of_a_step(width: int, committed: int, tree: bool, restore: bool, seed: int) -> None:
    """Where the beginning was told to leave it: every word that counts is the formula's, the others are tokens."""
    committed = min(committed, width)
    made = Memory.used(seed)
    tables = made.live(torch.ones(1, POSITIONS, dtype=torch.int32), None)
    result = torch.full((width + 3,), -1)
    zero = torch.zeros(1, dtype=torch.int64)
    tables.launch_begin(zero, zero, zero, result)
    made.machine.synchronize()
    made.inputs.token_ids.copy_(scattered(CAP, seed))
    made.inputs.length.fill_(seed)
    made.state.path.copy_(scattered(CAP, seed + 1) - 1)
    made.state.state[STATE.index("COMMITTED")] = committed
    inputs, state = made.copies()
    expected = torch.full((width + 3,), -1)
    table_formulas.end_step(inputs, state, expected, tree=tree, restore=restore)
    tables.launch_end(width, tree=tree, restore=restore)
    made.machine.synchronize()
    counts = [*range(width - 1), *range(width, width + 3)] + [width - 1] * (committed == width)
    assert torch.equal(result[counts], expected[counts])
    assert result[width - 1] in made.inputs.token_ids
    made.same(inputs)


@given(
    length=st.integers(0, POSITIONS - CAP),
    page=st.sampled_from([1, 4, 16, 64, 256]),
    rows=st.sampled_from([1, 3, CAP]),
    hybrid=st.booleans(),
    seed=st.integers(0, 99),
)
@settings(max_examples=40, deadline=None)
def test_page_tables(length: int, page: int, rows: int, hybrid: bool, seed: int) -> None:
    """Pages in any order; entries past the length are another request's."""
    used = -(-length // page)
    tables = []
    for index in range(2):
        table = torch.full((1, used + 3), GARBAGE // page, dtype=torch.int32)
        table[0, :used] = scattered(500, seed + index)[:used]
        tables.append(table)
    metadata = SimpleNamespace(
        page_table=tables[0], swa_page_table=tables[1] if hybrid else None,
        swa_out_cache_loc=scattered(40, seed + 2) if hybrid else None,
    )  # fmt: skip
    made, expected = forward(length, rows, metadata, page_size=page, seed=seed)
    pairs = [(made.full_pages, tables[0], expected.full_pages)]
    pairs += [(made.sliding_pages, tables[1], expected.sliding_pages)] * hybrid
    for pages, table, formula in pairs:
        assert pages[:length].tolist() == [int(table[0, p // page]) * page + p % page for p in range(length)]
        assert torch.equal(pages[:length], formula[:length])


@given(length=st.integers(0, POSITIONS - CAP), seed=st.integers(0, 99), decoding=st.booleans(), narrow=st.booleans())
@settings(max_examples=40, deadline=None)
def test_packed_slots(length: int, seed: int, decoding: bool, narrow: bool) -> None:
    """Triton's lists: all slots, and those of the last window - 1 positions; with the row itself when decoding."""
    window, rows = WINDOW - 1, 1 if decoding else CAP
    total = length + decoding
    full, sliding = (scattered(1000, seed + i) for i in (0, 1))
    packed = min(total, window)
    read, near = (torch.full((200,), GARBAGE, dtype=torch.int32 if narrow else torch.int64) for _ in range(2))
    read[:total], near[:packed] = full[:total], sliding[total - packed : total]
    metadata = SimpleNamespace(
        kv_indices=read, kv_indptr=torch.tensor([0, total], dtype=torch.int32), window_kv_indices=near,
        window_kv_indptr=torch.tensor([0, packed], dtype=torch.int32), swa_out_cache_loc=scattered(40, seed + 2),
    )  # fmt: skip
    made, expected = forward(length, rows, metadata, window=WINDOW - decoding, seed=seed)
    assert torch.equal(made.full_pages[:length].long(), full[:length])
    assert torch.equal(made.full_pages[:length], expected.full_pages[:length])
    seen = slice(max(0, total - packed), total)
    assert torch.equal(made.sliding_pages[seen].long(), sliding[seen])
    assert torch.equal(made.sliding_pages[:total], expected.sliding_pages[:total])


def forward(
    length: int, rows: int, metadata: Any, *, window: int = WINDOW, page_size: int = 1, seed: int = 0
) -> tuple[StepInputs, StepInputs]:
    """The inputs that the kernel and the formulas leave, of which the rows' are compared here."""
    made = Memory.used(seed)
    inputs, _ = made.copies()
    ids, slots = scattered(90, seed + 5)[:rows], scattered(90, seed + 6)[:rows]
    positions = torch.arange(length, length + rows)
    table_formulas.begin_forward(inputs, ids, positions, slots, metadata, window=window, page_size=page_size)
    AttentionTables(made.machine, made.inputs, window=window, page_size=page_size).launch(
        ids, positions, slots, metadata
    )
    made.machine.synchronize()
    made.same(inputs, but=("full_pages", "sliding_pages"))
    return made.inputs, inputs


@pytest.mark.parametrize("length", [0, 1, 9, 10, 11, 60, POSITIONS - 24])
def test_live_tables(length: int) -> None:
    """The window, the rows of this step and where the next one may begin; what is evicted maps to slot 0."""
    requests = torch.zeros(3, POSITIONS, dtype=torch.int32)
    requests[1] = scattered(200, length)[:POSITIONS]
    mapping = torch.cat((torch.zeros(1, dtype=torch.int64), scattered(200, length + 1)))
    mapping[requests[1, : max(0, length - WINDOW + 1)].long()] = 0
    made = Memory.used()
    begin(made, made.live(requests, mapping), 1, length)
    assert torch.equal(made.inputs.full_pages[: length + 16], requests[1, : length + 16])
    seen = slice(max(0, length - WINDOW + 1), length + 16)
    assert torch.equal(made.inputs.sliding_pages[seen].long(), mapping[requests[1, seen].long()])


def test_rows_beyond_the_table_go_to_the_slot_of_nobody() -> None:
    """A step that starts at the end of the context has rows for which the server keeps no slots."""
    made, short = Memory.used(), POSITIONS - 4
    table = torch.arange(1, short + 1, dtype=torch.int32)[None]
    begin(made, made.live(table, torch.arange(POSITIONS + 1)), 0, short - 3)
    assert made.inputs.full_pages.tolist() == [*range(1, short + 1), 0, 0, 0, 0]
    assert made.inputs.sliding_pages[short - 3 :].tolist() == [short - 2, short - 1, short, 0, 0, 0, 0]


def test_a_model_without_sliding_layers() -> None:
    made = Memory.used()
    before = made.inputs.sliding_pages.clone()
    begin(made, made.live(torch.ones(1, POSITIONS, dtype=torch.int32), None), 0, 20)
    assert made.inputs.full_pages[:36].eq(1).all()
    assert torch.equal(made.inputs.sliding_pages, before)


def test_lists_of_many_requests() -> None:
    """Longer ones than 32 bits can count."""
    few = torch.zeros(3, dtype=torch.int64)
    assert (Indices.of(few).count, Indices.of(few, 2**31).count) == (3, 2**31 - 1)
    with pytest.raises(AssertionError):
        Indices.of(few.float())
    with pytest.raises(AssertionError):
        Indices.of(torch.zeros(2, 3, dtype=torch.int32).T)


def test_pytorch_adds_nothing() -> None:
    """Each is one launch of ours."""
    made = Memory.used()
    tables = made.live(torch.ones(1, POSITIONS, dtype=torch.int32), torch.arange(POSITIONS + 1))
    attention = AttentionTables(made.machine, made.inputs, window=WINDOW, page_size=1)
    row, ids, result = torch.zeros(1, dtype=torch.int64), torch.arange(CAP), torch.zeros(CAP + 3, dtype=torch.int64)
    table = torch.ones(1, POSITIONS, dtype=torch.int32)
    packed, ends = torch.arange(POSITIONS), torch.tensor([0, 5], dtype=torch.int32)
    paged = SimpleNamespace(page_table=table, swa_page_table=table, swa_out_cache_loc=ids)
    lists = SimpleNamespace(
        kv_indices=packed, kv_indptr=ends, window_kv_indices=packed, window_kv_indptr=ends, swa_out_cache_loc=ids
    )
    with KernelCount() as count:
        tables.launch_begin(row, row, row, result)
        tables.launch_end(CAP, tree=True, restore=True)
        for metadata in (paged, lists):
            attention.launch(ids, ids, ids, metadata)
    assert len(made.machine.take()) == 4
    assert not count.found


def steps(schedule: Schedule, sources: Path | None = None) -> list[list[int]]:
    """What two steps leave whose beginnings and ends follow each other without a wait of the host."""
    made = Memory.used(schedule=schedule, sources=sources)
    tables = made.live(torch.arange(1, 2 * POSITIONS + 1, dtype=torch.int32).reshape(2, -1), torch.arange(400))
    row, length, anchor, result = torch.tensor([0]), torch.tensor([30]), torch.tensor([5]), torch.full((CAP + 3,), -1)
    for _ in range(2):
        tables.launch_begin(row, length, anchor, result)
        tables.launch_end(CAP, tree=False, restore=True)
    made.machine.synchronize()
    return [result.tolist(), made.inputs.full_slots.tolist()]


def test_launches_that_overlap() -> None:
    expected = steps(PLAIN)
    assert all(steps(racing(seed)) == expected for seed in range(1, 9))


def test_a_missing_wait_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGL_MUSE_MEGA_CACHE", str(tmp_path / "cache"))  # broken kernels stay out of the real one
    shutil.copytree(source_directory(), tmp_path / "csrc")
    Change("server/indices.cuh", "wait_for_previous_launch();").apply(tmp_path / "csrc")
    found = []
    for seed in range(1, 11):
        try:
            steps(racing(seed), tmp_path / "csrc")
        except EmulatorFault as fault:
            found.append(fault.kind)
    assert "race" in found
