"""Whole steps of two emulated ranks over a server's tables: on every rank what the kernels' own loop commits."""

import pytest
import torch
from decode_rank_case import PROMPT, WIDTH, DecodeRankCase

from sgl_muse_mega.emulator.machine import PLAIN
from sgl_muse_mega.emulator.rank_threads import RankEmulator
from sgl_muse_mega.megakernel.place import Place
from sgl_muse_mega.serving.full_step import FullStep, StepResult
from sgl_muse_mega.speculative.sampling import SamplingParams

RANKS, STEPS = 2, 2
SAMPLED = SamplingParams(temperature=3.0, top_p=0.95, top_k=150, seed=7)


@pytest.mark.parametrize("params", [SamplingParams(), SAMPLED], ids=["greedy", "sampled"])
def test_two_ranks(params: SamplingParams) -> None:
    case = DecodeRankCase(RANKS)
    expected = [step.report for step in case.run(PLAIN, params, batches=(1,) * STEPS)[0]]

    def serve(machine: RankEmulator, place: Place) -> list[StepResult]:
        loop = case.loops[place.rank]
        anchor = torch.tensor([int(loop.prefill(PROMPT).argmax())])
        loop.begin(int(anchor), params, width=WIDTH, max_new_tokens=100, stop_ids=())
        positions = len(loop.decode.step.inputs.full_pages)
        table = torch.zeros(3, positions, dtype=torch.int32)
        table[2] = torch.arange(1, positions + 1)  # where the loop has them, too
        full = FullStep(
            loop.decode,
            width=WIDTH,
            req_to_token=table,
            full_to_sliding=torch.arange(positions + 1),
        )
        full.capture()
        machine.synchronize()
        full.use(params)
        length, results = torch.tensor([len(PROMPT)]), []
        for _ in range(STEPS):
            results.append(full(torch.tensor([2]), length, anchor, lambda: None))
            machine.synchronize()
            length, anchor = results[-1].length, results[-1].anchor
        return results

    for results in case.ranks.run(serve):
        for result, report in zip(results, expected, strict=True):
            assert result.tokens[: int(result.committed)].tolist() == list(report.tokens)
            assert int(result.length) == report.length
