"""Every fault of the corpus turns the race hunt red; without one it stays green (test_race_schedules.py)."""

from pathlib import Path

import pytest
import torch
from race_faults import CHANGED, FAULTS, INJECTED, Change, Fault, clean_logits, hunt

SEEDS = 40


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.mark.parametrize("fault", INJECTED, ids=lambda fault: fault.name)
def test_a_fault_of_the_machine_is_found(fault: Fault, tmp_path: Path) -> None:
    assert hunt(fault, tmp_path, SEEDS, clean_logits) is not None


@pytest.mark.parametrize("fault", CHANGED, ids=lambda fault: fault.name)
def test_a_fault_in_the_sources_is_found(fault: Fault, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clean_logits(fault.sms, fault.rows, fault.length, fault.tuning)
    monkeypatch.setenv("SGL_MUSE_MEGA_CACHE", str(tmp_path / "cache"))  # broken kernels stay out of the real one
    assert hunt(fault, tmp_path / "csrc", SEEDS, clean_logits) is not None


def test_names_are_unique() -> None:
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)


def test_a_change_whose_place_has_moved_is_no_test(tmp_path: Path) -> None:
    (tmp_path / "file.cuh").write_text("one two three\n")
    with pytest.raises(AssertionError, match="no longer contains"):
        Change("file.cuh", "four").apply(tmp_path)
    with pytest.raises(AssertionError, match="no longer contains"):
        Change("file.cuh", "one", after="two").apply(tmp_path)
    Change("file.cuh", "two", "2", after="one").apply(tmp_path)
    assert (tmp_path / "file.cuh").read_text() == "one 2 three\n"
