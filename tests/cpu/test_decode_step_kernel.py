"""Whole decode steps on the emulated machine against the step loop on the reference backend."""

from collections.abc import Collection

import pytest
import torch

from sgl_muse_mega.checkpoint import tiny
from sgl_muse_mega.checkpoint.draft import load_draft
from sgl_muse_mega.checkpoint.target import load_target
from sgl_muse_mega.commands.text import Text
from sgl_muse_mega.config import load_draft_config, load_target_config
from sgl_muse_mega.emulator.machine import PLAIN, racing
from sgl_muse_mega.emulator.stepper import Emulator
from sgl_muse_mega.errors import UserError
from sgl_muse_mega.megakernel.decode_backend import decode_backend
from sgl_muse_mega.reference.backend import ReferenceBackend
from sgl_muse_mega.speculative.generate import Generation, generate
from sgl_muse_mega.speculative.sampling import SamplingParams

CONTEXT = 52
PROMPT = "Sam has 3 pens and buys 4 more. How many pens?"


class Pair:
    """The bundled pair on both backends."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        config = load_target_config(tiny.target_directory())
        draft_config = load_draft_config(tiny.draft_directory())
        weights = load_target(tiny.target_directory(), config)
        draft_weights = load_draft(tiny.draft_directory(), draft_config)
        self.ids = Text(tiny.target_directory()).encode(PROMPT, raw=True)
        self.reference = ReferenceBackend(config, weights, draft_config, draft_weights, max_context=CONTEXT)
        self.kernels = decode_backend(
            config, weights, draft_config, draft_weights, machine=Emulator(sms=3), width=8, max_context=CONTEXT
        )

    def both(self, params: SamplingParams, width: int, max_new_tokens: int, stop_ids: Collection[int] = ()) -> None:
        runs = [
            generate(b, self.ids, params, width=width, max_new_tokens=max_new_tokens, stop_ids=stop_ids)
            for b in (self.kernels, self.reference)
        ]
        ours, reference = ([*run] for run in runs)
        assert ours == reference
        self.last: Generation = runs[0]


@pytest.fixture(scope="module")
def pair() -> Pair:
    return Pair()


def test_greedy_text(pair: Pair) -> None:
    pair.both(SamplingParams(), 8, 12)
    pair.both(SamplingParams(), 5, 3)


def test_plain_decoding(pair: Pair) -> None:
    pair.both(SamplingParams(temperature=1.0, seed=2), 1, 3)


def test_sampled_text(pair: Pair) -> None:
    pair.both(SamplingParams(temperature=1.2, top_k=50, min_p=0.001, seed=2**64 - 1), 6, 9)


def test_both_heads_give_the_same_bits(pair: Pair) -> None:
    loop = pair.kernels
    loop.prefill(pair.ids)
    step = loop.decode.step
    rows = len(pair.ids) % 8 or 8
    ours, chosen = step.activations.logits[:rows].clone(), step.activations.greedy_ids[:rows].clone()
    step.launch_head(rows)
    step.machine.synchronize()
    assert torch.equal(step.activations.logits[:rows], ours)
    assert torch.equal(step.activations.greedy_ids[:rows], chosen)


@pytest.mark.parametrize("seed", [1])
def test_steps_in_any_schedule(pair: Pair, seed: int) -> None:
    machine = pair.kernels.decode.step.machine
    assert isinstance(machine, Emulator)
    machine.schedule = racing(seed)
    try:
        pair.both(SamplingParams(temperature=0.8, top_p=0.9, seed=seed), 4, 4)
    finally:
        machine.schedule = PLAIN


def test_text_that_fills_the_context(pair: Pair) -> None:
    pair.both(SamplingParams(temperature=0.9, seed=8), 8, 100)
    assert pair.last.stats.finish_reason == "context"
    assert len(pair.ids) + len(pair.last.tokens) == CONTEXT


def test_text_that_stops(pair: Pair) -> None:
    pair.both(SamplingParams(), 8, 12)
    pair.both(SamplingParams(), 8, 12, stop_ids={pair.last.tokens[4]})
    assert pair.last.stats.finish_reason == "stop"


def test_prompt_is_checked(pair: Pair) -> None:
    with pytest.raises(UserError, match="empty"):
        pair.kernels.prefill([])
    with pytest.raises(UserError, match="holds 52"):
        pair.kernels.prefill([5] * (CONTEXT + 1))
