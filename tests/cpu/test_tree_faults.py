"""Faults of trees that any few schedules must show, as in race_faults.py."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from race_faults import Change
from test_accept_kernel import ROW_CAP
from test_tree_accept_kernel import LENGTH, PlanCase, some_caches, whole_path
from test_tree_kernel import ANCHOR, few_candidates, random_state, run_head

from sgl_muse_mega.emulator.machine import EmulatorFault, Schedule, racing
from sgl_muse_mega.megakernel.build import source_directory
from sgl_muse_mega.speculative.sampling import SamplingParams

SEEDS = 10
Run = Callable[[Schedule], object]
"""What a launch leaves, which is the same in every schedule."""


def planning(sources: Path | None) -> Run:
    case = few_candidates(sources)
    case.fill(LENGTH, ANCHOR)
    case.declare()
    case.step.launch_block(8)
    case.run()
    case.request()

    def run(schedule: Schedule) -> object:
        run_head(case, 8, 8, random_state(3), None, schedule)
        return case.inputs.token_ids.tolist(), case.state.parents.tolist()

    return run


def keeping(sources: Path | None) -> Run:
    case = PlanCase(sources=sources)

    def run(schedule: Schedule) -> object:
        whole_path(case)
        case.state.path.fill_(0)
        case.start(SamplingParams(temperature=0.001, top_k=9), LENGTH)
        caches = some_caches(case, torch.bfloat16)
        report = case.launch(ROW_CAP, ROW_CAP, nodes=ROW_CAP, schedule=schedule, caches=caches)
        return report, [cache.tolist() for pair in caches for cache in pair]

    return run


FAULTS = {
    "tree grown before its conditionals are there": (planning, Change("step/tree.cuh", "math_barrier();")),
    "rows moved before the verdict": (keeping, Change("step/compact.cuh", "wait_for_previous_launch();")),
    "path followed before all rows are judged": (
        keeping,
        Change("step/accept.cuh", "if (!alone) wait_counter_warp(p, protocol::Counter::VERDICTS, epoch);"),
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_found(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(1)
    make, change = FAULTS[name]
    clean = make(None)
    results = [clean(racing(seed)) for seed in range(1, 4)]
    assert all(result == results[0] for result in results)
    monkeypatch.setenv("SGL_MUSE_MEGA_CACHE", str(tmp_path / "cache"))  # broken kernels stay out of the real one
    shutil.copytree(source_directory(), tmp_path / "csrc")
    change.apply(tmp_path / "csrc")
    broken = make(tmp_path / "csrc")
    for seed in range(1, SEEDS + 1):
        try:
            if broken(racing(seed)) != results[0]:
                return
        except EmulatorFault:
            return
    pytest.fail("no schedule shows it")
