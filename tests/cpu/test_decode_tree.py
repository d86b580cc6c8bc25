"""Whole decode steps over trees and chosen widths, on the emulated machine, against the step loop on the reference."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from test_decode_step_kernel import CONTEXT, Pair

from sgl_muse_mega.emulator.machine import PLAIN, racing
from sgl_muse_mega.emulator.stepper import Emulator
from sgl_muse_mega.megakernel.decode_request import request_words
from sgl_muse_mega.speculative.generate import Generation, generate
from sgl_muse_mega.speculative.rows import RowPlan
from sgl_muse_mega.speculative.sampling import SamplingParams, argmax
from sgl_muse_mega.speculative.width import CostTable

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmark"))

from tree_check import Steps, check_step


@pytest.fixture(scope="module")
def pair() -> Pair:
    return Pair()


def cost(each: float) -> CostTable:
    """ms of steps whose rows cost `each` on top of 1."""
    return (1 + each * np.arange(17)).astype(np.float32)


def run(
    pair: Pair, params: SamplingParams, plan: RowPlan, width: int, new_tokens: int, ids: list[int] | None = None
) -> Generation:
    """The kernels' generation, which has the reference's steps and ends with its calibration."""
    runs = [
        generate(backend, ids or pair.ids, params, width=width, max_new_tokens=new_tokens, plan=plan)
        for backend in (pair.kernels, pair.reference)
    ]
    ours, reference = ([*run] for run in runs)
    assert ours == reference
    assert runs[0].stats.rows_per_step == runs[1].stats.rows_per_step
    # the lattices differ by bf16 roundings of the draft, so the same trials are not always in the same bin
    learnt, expected = (run.calibration.sum(axis=1) for run in runs)
    assert np.array_equal(learnt[:, 0], expected[:, 0])
    assert np.allclose(learnt[:, 1], expected[:, 1], atol=0.1 * 2**16)
    return runs[0]


def test_greedy_tree(pair: Pair) -> None:
    plain = generate(pair.reference, pair.ids, SamplingParams(), width=1, max_new_tokens=8)
    list(plain)
    made = run(pair, SamplingParams(), RowPlan(nodes=8), 5, 8)
    assert made.tokens == plain.tokens
    assert pair.kernels.decode.state.path.tolist()[:1] == [0]


def test_sampled_tree_with_a_chosen_width(pair: Pair) -> None:
    made = run(pair, SamplingParams(temperature=1.3, seed=4), RowPlan(nodes=7, cost=cost(0.05)), 4, 4)
    assert len(made.stats.rows_per_step) > 1


@pytest.mark.parametrize("nodes", [None, 8])
def test_steps_are_those_of_the_rules(pair: Pair, nodes: int | None) -> None:
    """What benchmark/tree_check.py checks on a GPU: plan, path and calibration to the bit."""
    params, plan = SamplingParams(temperature=1.0, seed=5), RowPlan(nodes, cost(0.05))
    loop, found = pair.kernels, Steps()
    anchor = argmax(loop.prefill(pair.ids))
    words = request_words(params, max_new_tokens=50, max_context=CONTEXT)
    loop.decode.begin(anchor, len(pair.ids), words, plan)
    for number in (1, 2):
        check_step(loop, params, plan, number, found)
    assert found.plans == found.paths == found.calibrations == found.steps == 2


def test_a_tree_that_fills_the_context(pair: Pair) -> None:
    ids = (pair.ids * 4)[: CONTEXT - 7]
    made = run(pair, SamplingParams(temperature=0.9, seed=8), RowPlan(nodes=8), 6, 100, ids)
    assert made.stats.finish_reason == "context"
    assert len(ids) + len(made.tokens) == CONTEXT
    assert min(made.stats.rows_per_step) < 8


def test_trees_in_any_schedule_and_a_chain_behind_them(pair: Pair) -> None:
    machine = pair.kernels.decode.step.machine
    assert isinstance(machine, Emulator)
    machine.schedule = racing(3)
    pair.kernels.decode.step.activations.poison()
    try:
        run(pair, SamplingParams(temperature=1.4, seed=9), RowPlan(nodes=6, cost=cost(0.02)), 4, 2)
    finally:
        machine.schedule = PLAIN
    pair.both(SamplingParams(), 6, 2)
    inputs = pair.kernels.decode.step.inputs
    assert inputs.ancestors.tolist() == [(2 << row) - 1 for row in range(8)]
    assert torch.equal(inputs.live, torch.tensor([8], dtype=torch.int32))
