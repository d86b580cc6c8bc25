"""A small random pair that decodes over several emulated ranks, one thread each, and what may be asked of it."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import torch
from draft_case import draft_config
from torch import Tensor

from sgl_muse_mega.checkpoint.random_weights import random_draft, random_target
from sgl_muse_mega.checkpoint.target import share_target
from sgl_muse_mega.emulator.machine import PLAIN, Schedule
from sgl_muse_mega.emulator.rank_threads import RankEmulator, RankThreads
from sgl_muse_mega.emulator.stepper import EmulatedModule
from sgl_muse_mega.megakernel.accept_step import AcceptStep
from sgl_muse_mega.megakernel.build import Progress, quiet
from sgl_muse_mega.megakernel.compiled import Compiled
from sgl_muse_mega.megakernel.decode_backend import decode_backend
from sgl_muse_mega.megakernel.decode_loop import DecodeLoop
from sgl_muse_mega.megakernel.decode_request import Report, read_report
from sgl_muse_mega.megakernel.place import Place
from sgl_muse_mega.megakernel.random_step import tiny_config
from sgl_muse_mega.speculative.backend import DraftBlock
from sgl_muse_mega.speculative.rows import RowPlan
from sgl_muse_mega.speculative.sampling import SamplingParams

CONTEXT, WIDTH = 48, 5
ACCEPT_THREADS = 64  # of a CTA; the kernel's own number would take most of the emulator's time
GREEDY, ROWS = SamplingParams(), RowPlan()
PROMPT = tuple(range(3, 127, 18))


@dataclass(frozen=True, slots=True)
class Step:
    """One step as a rank saw it: its report, and what its rule had to go by."""

    report: Report
    greedy_ids: list[int]
    logits: Tensor  # f32 [rows, the rank's ids]
    whole_logits: Tensor  # f32 [rows, V], of a sampled step
    block: DraftBlock


class DecodeRankCase:
    """Every rank's loop over its share; layers of the draft: one is enough where hand-offs are counted."""

    def __init__(
        self, ranks: int, *, sms: int = 2, draft_layers: int = 2, sources: Path | None = None, changed: str = ""
    ) -> None:
        """sources: a changed copy of csrc, for the kernels of the file `changed` alone."""
        torch.set_num_threads(1)
        # The target of two ranks is that of `rank_case`, which saves compiling it; 48 ids of a rank of four are no
        # whole number of warps.
        vocabulary = 128 if ranks == 2 else 192
        config = tiny_config(
            3, vocab_size=vocabulary, hidden_size=128, moe_hidden_size=64, moe_intermediate_size=64,
            num_local_experts=8,
            num_experts_per_tok=2, num_attention_heads=8, num_key_value_heads=4, sliding_window=32,
        )  # fmt: skip
        draft = draft_config(
            vocab_size=vocabulary, num_hidden_layers=draft_layers, intermediate_size=256, sliding_window=40,
            target_layer_ids=(0, 1), num_target_layers=3, max_position_embeddings=config.max_position_embeddings,
        )  # fmt: skip
        weights, draft_weights = random_target(config, 1), random_draft(draft, 2)
        self.draft_config, self.weights, self.draft_weights = draft, weights, draft_weights
        self.embedding_eps = config.rms_norm_eps
        self.ranks = RankThreads(ranks, sms)

        def build(machine: RankEmulator, place: Place) -> DecodeLoop:
            def load(instance: Compiled, progress: Progress = quiet) -> EmulatedModule:
                machine._sources = sources if instance.source == changed else None
                return RankEmulator.load(machine, instance, progress)

            machine.load = load  # type: ignore[method-assign]
            return decode_backend(
                config, share_target(config, weights, rank=place.rank, ranks=ranks), draft, draft_weights,
                machine=machine, width=WIDTH, max_context=CONTEXT, place=place,
            )  # fmt: skip

        small = functools.partial(AcceptStep, threads=ACCEPT_THREADS)
        with mock.patch("sgl_muse_mega.megakernel.decode_backend.AcceptStep", small):
            self.loops = self.ranks.run(build)

    def run(
        self,
        schedule: Schedule = PLAIN,
        params: SamplingParams = GREEDY,
        *,
        batches: Sequence[int] = (1, 1),
        prompt: Sequence[int] = PROMPT,
        plan: RowPlan = ROWS,
    ) -> list[list[Step]]:
        """Of every rank, the last step of each batch behind the prompt; a batch is one or two steps that are enqueued
        without a wait between them. Raises EmulatorFault."""

        def decode(machine: RankEmulator, place: Place) -> list[Step]:
            loop, seen, done = self.loops[place.rank], [], 0
            assert loop.decode.draft is not None
            for part in (loop.decode.step.activations, loop.decode.draft.activations):
                part.poison()
            anchor = int(loop.prefill(prompt).argmax())
            loop.begin(anchor, params, width=WIDTH, max_new_tokens=100, stop_ids=(), plan=plan)
            for count in batches:
                for _ in range(count):
                    loop.decode.launch(WIDTH, nodes=plan.nodes or 0, auto=plan.cost is not None)
                machine.synchronize()
                done += count
                seen.append(self._seen(loop, done))
            return seen

        self.ranks.schedule = schedule
        return self.ranks.run(decode)

    @staticmethod
    def _seen(loop: DecodeLoop, number: int) -> Step:
        decode = loop.decode
        report = read_report(decode.state, number)
        assert report is not None
        assert decode.draft is not None
        draft, step = decode.draft.activations, decode.step.activations
        tokens = decode.step.inputs.token_ids[1:WIDTH].clone()
        block = DraftBlock(tokens, draft.candidates[: WIDTH - 1].clone(), draft.probabilities[: WIDTH - 1].clone())
        return Step(
            report, step.greedy_ids[:WIDTH].tolist(), step.logits[:WIDTH].clone(),
            decode.accept.whole_logits[:WIDTH].clone(), block,
        )  # fmt: skip
