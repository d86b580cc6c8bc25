"""The statistics and the parsing behind benchmark/step_check.py, stock_step.py and draft_timeline.py."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from sgl_muse_mega.commands.build import instances
from sgl_muse_mega.commands.layer import arm
from sgl_muse_mega.emulator.stepper import Emulator
from sgl_muse_mega.megakernel.compiled import Compiled
from sgl_muse_mega.megakernel.draft_protocol import POINTS
from sgl_muse_mega.megakernel.instance import HOPPER_SMS
from sgl_muse_mega.speculative.philox import Purpose, uniform

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmark"))

import draft_timeline
import step_sampling
import stock_step
from step_pair import Pair

STOCK = """
rep 0 decode 0.623 s for 256 tokens -> 9.741 ms per step (steps=64, spec_verify_ct=66), 410.6 tok/s
rep 1 decode 0.630 s for 256 tokens -> 9.850 ms per step (steps=64, spec_verify_ct=66), 406.1 tok/s
PROF  12000.0 us    240 x   50.00 us  _fwd_kernel
PROF   2400.0 us     60 x   40.00 us  _fwd_kernel_stage2
PROF  99000.0 us    336 x  294.64 us  void marlin_moe_wna16::Marlin<...>(int4 const*)
"""


def test_what_the_pair_loads_is_built_beforehand(monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[Compiled] = []
    monkeypatch.setattr(arm, "build", built.append)
    planner = arm.Planner(Emulator(HOPPER_SMS))
    pair = Pair(planner, 1)  # type: ignore[arg-type]
    planner.build()
    every = instances(pair.config, pair.draft_config, sms=HOPPER_SMS, ranks=1, kv_dtypes=("bf16",))
    wanted = [instance.header() for name, instance in every.items() if not name.startswith("server")]
    assert sorted(instance.header() for instance in built) == sorted(wanted)


def test_uniforms_of_many_seeds() -> None:
    seeds = np.array([0, 1, 2**32 + 5, 2**64 - 1], dtype=np.uint64)
    for purpose in Purpose:
        found = step_sampling.uniforms(seeds, 77, purpose)
        assert found.tolist() == [uniform(int(seed), 77, purpose) for seed in seeds]


def test_chi_square_tells_distributions_apart() -> None:
    p = torch.tensor([0.5, 0.3, 0.15, 0.05, 0.0], dtype=torch.float64)
    drawn = torch.multinomial(p, 5000, replacement=True, generator=torch.Generator().manual_seed(2))
    assert step_sampling.p_value(drawn, p) > 1e-4
    assert step_sampling.p_value(drawn, p.roll(1)) == 0  # an id that cannot occur did
    assert step_sampling.p_value(drawn, torch.tensor([0.4, 0.4, 0.15, 0.04, 0.01]).double()) < 1e-9


def test_chi_square_pools_rare_ids() -> None:
    p = torch.softmax(torch.randn(5000, generator=torch.Generator().manual_seed(4)).double(), dim=0)
    drawn = torch.multinomial(p, 3000, replacement=True, generator=torch.Generator().manual_seed(5))
    assert step_sampling.p_value(drawn, p) > 1e-4
    flat = torch.randint(len(p), (3000,), generator=torch.Generator().manual_seed(6))
    assert step_sampling.p_value(flat, p) < 1e-9


def test_trials_are_those_of_the_rule() -> None:
    case = step_sampling.cases(5)[8][4]
    trials = step_sampling.Trials(Emulator(sms=8), 8, 4, 15, threads=64)
    trials.set(case)
    seeds = np.arange(15, dtype=np.uint64) + np.uint64(2**63)
    drafts = step_sampling.draw_drafts(case, seeds, 10)
    tokens = trials.run(seeds, drafts, 9)
    for seed, drafted, found in zip(seeds, drafts, tokens.tolist(), strict=True):
        assert [t for t in found if t >= 0] == step_sampling._by_rule(case, drafted, int(seed), 9)
    assert len({tuple(t) for t in tokens.tolist()}) > 3


def test_what_the_rival_printed() -> None:
    found = stock_step.parse_stock(STOCK, 4.0)
    assert found["ms"] == [9.741, 9.85]
    assert found["attention_ms"] == pytest.approx(14.4 / 12)
    ratios = stock_step.summary([{"ours": {"ms": 5.0}, "stock": found}], found["attention_ms"])
    assert ratios["ratio"] == pytest.approx([1.9482, 1.97])
    assert ratios["ratio_without_attention"] == pytest.approx([1.7082, 1.73])
    with pytest.raises(RuntimeError, match="no step time"):
        stock_step.parse_stock("Traceback ...", 4.0)


def test_phases_of_the_logs() -> None:
    def word(ns: int, point: str, layer: int) -> int:
        return ns << 24 | (POINTS.index(point) + 1) << 16 | layer

    logs = [
        [word(1000 + late, "INPUTS_READY", layer), word(3000 + late, "ATTENTION_TAPS", layer), 0]
        for layer in (0, 1)
        for late in (0, 500)
    ]
    merged = [logs[0] + logs[2], logs[1] + logs[3]]
    assert draft_timeline.phases(merged) == {"ATTENTION_TAPS": 2.0}
