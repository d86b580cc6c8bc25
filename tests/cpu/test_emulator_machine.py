"""The emulated machine: what it lets pass, what it stops, and that a seed replays a run exactly."""

import ctypes
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sgl_muse_mega.emulator.compile import compile_kernels
from sgl_muse_mega.emulator.machine import (
    PLAIN,
    EmulatorFault,
    KernelLibrary,
    Launch,
    Order,
    Region,
    Schedule,
    machine,
    racing,
)  # fmt: skip
from sgl_muse_mega.errors import UserError

ORDERED = Schedule(ordered=True)
SEEDS = range(1, 9)


class Params(ctypes.Structure):
    _fields_ = (("data", ctypes.c_void_p), ("flag", ctypes.c_void_p), ("out", ctypes.c_void_p),
                ("value", ctypes.c_uint32), ("unused", ctypes.c_uint32))  # fmt: skip


@pytest.fixture(scope="session")
def library() -> KernelLibrary:
    return KernelLibrary(compile_kernels("", Path(__file__).parent / "emulated", "litmus.cu"))


class Bench:
    """Three buffers and a way to run the litmus kernels on them."""

    def __init__(self, library: KernelLibrary, *, constant_data: bool = False, words: int = 32) -> None:
        self.library = library
        self.data = torch.zeros(words, dtype=torch.int32)
        self.flag = torch.zeros(32, dtype=torch.int32)
        self.out = torch.full((words,), -1, dtype=torch.int32)
        machine().use(
            [
                Region("data", self.data, constant_data, written=True),
                Region("flag", self.flag, constant=False, written=True),
                Region("out", self.out, constant=False, written=False),
            ]
        )

    def launch(self, kernel: str, value: int = 0, ctas: int = 2) -> Launch:
        params = Params(self.data.data_ptr(), self.flag.data_ptr(), self.out.data_ptr(), value, 0)
        return Launch(self.library.kernel(kernel), bytes(params), ctas, 1024)

    def run(self, kernel: str, value: int = 0, schedule: Schedule = ORDERED) -> Tensor:
        machine().run([self.launch(kernel, value)], schedule)
        return self.out

    def fault(self, kernel: str, value: int = 0, schedule: Schedule = ORDERED) -> EmulatorFault:
        with pytest.raises(EmulatorFault) as caught:
            self.run(kernel, value, schedule)
        return caught.value


@pytest.mark.parametrize("kernel", ["pass_message", "pass_message_of_cta"])
def test_ordered_messages_pass_under_every_schedule(library: KernelLibrary, kernel: str) -> None:
    for schedule in (PLAIN, ORDERED, *(racing(seed) for seed in SEEDS)):
        assert Bench(library).run(kernel, 5, schedule)[0] == 5


def test_a_missing_barrier_is_reported_with_both_places(library: KernelLibrary) -> None:
    fault = Bench(library).fault("forget_barrier", 5)
    assert fault.kind == "race"
    assert "reads data+0" in fault.text
    assert "CTA 0 warp 1 lane 8 writes" in fault.text
    assert fault.text.count("litmus.cu:") == 2


def test_stale_values_show_both_values_of_a_race(library: KernelLibrary) -> None:
    seen = set()
    for seed in range(1, 40):
        bench = Bench(library)
        seen.add(int(bench.run("forget_barrier", 5, racing(seed, stale_values=True))[0]))
    assert seen == {0, 5}
    assert all(int(Bench(library).run("pass_message", 5, racing(s, stale_values=True))[0]) == 5 for s in SEEDS)


def test_an_acquire_of_one_lane_binds_the_others_through_warp_sync_only(library: KernelLibrary) -> None:
    assert Bench(library).run("acquire_for_warp", 1)[0] == 7
    assert Bench(library).fault("acquire_for_warp", 0).kind == "race"


@pytest.mark.parametrize("seed", [0, 1, 2, 3])
def test_bulk_copies_need_their_fences_and_waits(library: KernelLibrary, seed: int) -> None:
    schedule = racing(seed) if seed else ORDERED
    out = Bench(library).run("copy_bulk", 1 | 2 | 4 | 8, schedule)
    assert out.tolist() == list(range(100, 132))
    assert Bench(library).run("copy_bulk", 1 | 8, schedule).tolist() == [0] * 32
    without_proxy_fence = Bench(library).fault("copy_bulk", 1 | 2 | 8, schedule)
    assert "reads data+0" in without_proxy_fence.text
    assert "without a fence after its initialisation" in Bench(library).fault("copy_bulk", 1 | 2 | 4, schedule).text
    reused = Bench(library).fault("copy_bulk", 1 | 8 | 16, schedule)
    assert reused.kind == "race"
    assert "shared memory at" in reused.text


@pytest.mark.parametrize("seed", [0, 1, 2, 3])
def test_a_threads_own_copies_need_its_wait_and_a_meeting(library: KernelLibrary, seed: int) -> None:
    schedule = racing(seed) if seed else ORDERED

    def bench() -> Bench:
        made = Bench(library)
        made.data.copy_(torch.arange(32))
        return made

    expected = [(lane + 1) % 8 * 4 for lane in range(32)]
    assert bench().run("copy_own", 1 | 4 | 16, schedule).tolist() == expected
    assert bench().run("copy_own", 2 | 4, schedule).tolist() == [2 * word for word in expected]
    for value in (4 | 16, 1 | 16, 2):  # no wait before the read; no meeting after it
        fault = bench().fault("copy_own", value, schedule)
        assert (fault.kind, "shared memory at" in fault.text) == ("race", True)
    reused = bench().fault("copy_own", 1 | 4 | 8, schedule)
    assert (reused.kind, "shared memory at" in reused.text) == ("race", True)


def test_a_cta_may_not_end_before_its_copies(library: KernelLibrary) -> None:
    kinds = {Bench(library).fault("copy_bulk", 8, racing(seed)).kind for seed in (3,)}
    assert kinds == {"copy"}


@pytest.mark.parametrize(
    ("value", "kind", "words"),
    [
        (0, "divergence", "ballot while lanes of its warp are at shuffle"),
        (1, "divergence", "lanes of its warp have ended"),
        (2, "deadlock", "waiting for flag+0 (now 0)"),
        (3, "barrier", "others expect"),
        (4, "deadlock", "barrier 3, where 63 of 64 threads are"),
        (5, "bounds", "past the end of data"),
        (6, "alignment", "8-byte access to data+4"),
        (8, "unwritten", "reads out+0, which nobody has written"),
        (9, "mbarrier", "again"),
    ],
)
def test_misbehaviour_is_named(library: KernelLibrary, value: int, kind: str, words: str) -> None:
    fault = Bench(library).fault("misbehave", value, PLAIN)
    assert fault.kind == kind
    assert words in fault.text


def test_inputs_cannot_be_written(library: KernelLibrary) -> None:
    fault = Bench(library, constant_data=True).fault("misbehave", 7, PLAIN)
    assert (fault.kind, "writes data+0" in fault.text) == ("constant", True)


def test_atomic_adds_are_never_lost(library: KernelLibrary) -> None:
    for seed in SEEDS:
        bench = Bench(library)
        bench.flag[0] = -100
        bench.run("count", 3, racing(seed, preempt_interval=8))
        assert int(bench.flag[0]) == -100 + 3 * 128


def test_a_counter_on_a_polled_line_is_refused(library: KernelLibrary) -> None:
    assert Bench(library).fault("crowd_line").kind == "line"


@pytest.mark.parametrize("overlap", [False, True])
def test_launches_are_ordered_by_waiting(library: KernelLibrary, overlap: bool) -> None:
    for seed in SEEDS:
        bench = Bench(library)
        launches = [bench.launch("lead_launch", 9), bench.launch("follow_launch", 1)]
        machine().run(launches, racing(seed, overlap=overlap))
        assert int(bench.out[0]) == 9


def test_reading_ahead_of_the_previous_launch_is_a_race(library: KernelLibrary) -> None:
    kinds, values = set(), set()
    for seed in SEEDS:
        bench = Bench(library)
        launches = [bench.launch("lead_launch", 9), bench.launch("follow_launch", 0)]
        try:
            machine().run(launches, racing(seed))
            values.add(int(bench.out[0]))
        except EmulatorFault as fault:
            kinds.add(fault.kind)
    # Whichever of the two accesses comes second reports the race.
    assert kinds == {"race"}
    assert not values


def test_a_seed_replays_exactly_and_seeds_differ(library: KernelLibrary) -> None:
    def trace(schedule: Schedule) -> tuple[object, ...]:
        bench = Bench(library)
        statistics = machine().run([bench.launch("pass_message_of_cta", 5), bench.launch("count", 1)], schedule)
        return (statistics, *bench.flag.tolist())

    schedules = [racing(seed, order=order) for seed in SEEDS for order in (Order.RANDOM, Order.PRIORITY)]
    first = [trace(s) for s in schedules]
    assert [trace(s) for s in schedules] == first
    assert len({t[0] for t in first}) > 4


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_mma_is_the_matrix_product_of_its_fragments(library: KernelLibrary, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    a = torch.randn(16, 16, generator=generator).bfloat16()
    b = torch.randn(16, 8, generator=generator).bfloat16()
    bench = Bench(library, words=256)
    words = torch.zeros(32, 8, 2, dtype=torch.bfloat16)
    for lane in range(32):
        g, t = lane // 4, lane % 4
        for word in range(4):
            row, column = g + word % 2 * 8, 2 * t + word // 2 * 8
            words[lane, word] = a[row, column : column + 2]
        for word in range(2):
            words[lane, 4 + word] = b[2 * t + word * 8 : 2 * t + word * 8 + 2, g]
    bench.data.copy_(words.view(torch.int32).flatten())
    out = bench.run("multiply", schedule=PLAIN)[:128].view(torch.float32).view(32, 4)
    product = a.double() @ b.double()
    for lane in range(32):
        g, t = lane // 4, lane % 4
        expected = torch.stack(
            [product[g, 2 * t], product[g, 2 * t + 1], product[g + 8, 2 * t], product[g + 8, 2 * t + 1]]
        )
        torch.testing.assert_close(out[lane].double(), expected, rtol=1e-5, atol=1e-5)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.one_of(st.floats(width=32), st.floats(-500, 500, width=32)), min_size=32, max_size=32))
def test_conversions_agree_with_torch(library: KernelLibrary, values: list[float]) -> None:
    bench = Bench(library, words=128)
    given_values = torch.tensor(values, dtype=torch.float32)
    bench.data[:32] = given_values.view(torch.int32)
    out = bench.run("convert", schedule=PLAIN).view(32, 4)
    bf16 = given_values.bfloat16()
    ours = out[:, 0].to(torch.int16).view(torch.bfloat16)
    assert torch.equal(ours.isnan(), bf16.isnan())
    assert torch.equal(ours[~bf16.isnan()].view(torch.int16), bf16[~bf16.isnan()].view(torch.int16))
    fp8 = given_values.clamp(-448, 448).to(torch.float8_e4m3fn)
    ours8 = out[:, 1].to(torch.uint8).view(torch.float8_e4m3fn)
    known = ~given_values.isnan()
    assert torch.equal(ours8.view(torch.uint8)[known], fp8.view(torch.uint8)[known])
    widened = out[:, 2].clone().view(torch.bfloat16).view(32, 2)
    assert torch.equal(widened[known].float(), fp8.float()[known][:, None].expand(-1, 2))
    matrix = bench.data[:32].clone().view(torch.int16).view(8, 8)
    assert torch.equal(out[:, 3].contiguous().view(torch.int16).view(8, 8), matrix.T)


def test_a_compiler_that_does_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tmp_path / "g++"
    broken.write_text("#!/bin/sh\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("CXX", str(broken))
    with pytest.raises(UserError, match="does not run; install g"):
        compile_kernels("")
