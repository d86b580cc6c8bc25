"""Every fault of the exchange turns the race hunt red; without one it stays green (test_exchange_ranks.py)."""

from pathlib import Path

import pytest
import torch
from rank_faults import RANK_FAULTS, RankFault, clean_logits, hunt

SEEDS = 20


@pytest.mark.parametrize("fault", RANK_FAULTS, ids=lambda fault: fault.name)
def test_a_fault_is_found(fault: RankFault, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(1)
    clean_logits(fault.ranks)
    monkeypatch.setenv("SGL_MUSE_MEGA_CACHE", str(tmp_path / "cache"))  # broken kernels stay out of the real one
    assert hunt(fault, tmp_path / "csrc", SEEDS) is not None


def test_names_are_unique() -> None:
    assert len({fault.name for fault in RANK_FAULTS}) == len(RANK_FAULTS)
