"""A small model split over several emulated ranks, and the same model on one rank or in the reference."""

from dataclasses import fields
from pathlib import Path

import torch
from torch import Tensor

from sgl_muse_mega.emulator.machine import PLAIN, EmulatorFault, Schedule
from sgl_muse_mega.emulator.stepper import EmulatedRanks
from sgl_muse_mega.megakernel.random_step import RandomStep, random_weights, tiny_config
from sgl_muse_mega.megakernel.scratch import Control
from sgl_muse_mega.megakernel.step import Step


class RankCase:
    """One step per rank over the shares of one model; run them under any schedule."""

    def __init__(
        self,
        ranks: int,
        sources: Path | None = None,
        *,
        nvfp4: bool = True,
        row_cap: int = 8,
        sms: int = 2,
        layers: int = 2,
        session: int = 1,
        defines: tuple[str, ...] = (),
    ) -> None:
        config = tiny_config(
            layers, nvfp4=nvfp4, vocab_size=128, hidden_size=128, moe_hidden_size=64, moe_intermediate_size=64,
            num_local_experts=8, num_experts_per_tok=2, num_attention_heads=8, num_key_value_heads=4,
            sliding_window=32,
        )  # fmt: skip
        self.config = config
        self.ranks = EmulatedRanks(ranks, sms, sources=sources, session=session, defines=defines)
        self.cases = [
            RandomStep.create(
                config,
                random_weights(config, 1, machine.device, rank=rank, ranks=ranks),
                machine,
                row_cap=row_cap,
                max_context=160,
                kv_dtype="bf16",
                mail=self.ranks.mail(rank) if ranks > 1 else None,
            )
            for rank, machine in enumerate(self.ranks.machines)
        ]
        self.steps = [case.step for case in self.cases]

    def fill(self, length: int, content: int) -> None:
        """One context for all ranks: every rank has its heads of the same keys and values."""
        for case in self.cases:
            case.fill(length, content)
        whole = torch.Generator().manual_seed(content)
        heads, ranks = self.config.num_key_value_heads, len(self.cases)
        for index in range(len(self.cases[0].caches)):
            for part in range(2):
                values = torch.randn(length, heads, 64, generator=whole).bfloat16()
                for rank, case in enumerate(self.cases):
                    full = self.config.is_full(index)
                    inputs = case.step.inputs
                    where = (inputs.full_pages if full else inputs.sliding_pages)[:length].long()
                    first = rank * heads // ranks
                    case.caches[index][part][where] = values[:, first : first + max(1, heads // ranks)]

    def prepare(self, length: int, content: int) -> None:
        self.fill(length, content)
        for step in self.steps:
            step.activations.poison()
            step.machine.fault_record.zero_()
        self.ranks.attach(self.steps, [case.caches for case in self.cases])

    def run(
        self, schedule: Schedule = PLAIN, rows: int = 3, length: int = 60, content: int = 1, steps: int = 1
    ) -> Tensor:
        """Logits [rows, V] of a step of all ranks together, launched `steps` times; every rank must end with the same
        stream, taps, routing and greedy tokens.

        Raises EmulatorFault, and starts anew after it.
        """
        self.prepare(length, content)
        self.ranks.schedule = schedule
        for step in self.steps:
            for _ in range(steps):
                step.launch(rows)
        try:
            self.ranks.synchronize()
        except EmulatorFault:
            self.reset()
            raise
        return self.logits(rows)

    def logits(self, rows: int) -> Tensor:
        first = self.steps[0]
        for step in self.steps[1:]:
            for name in ("stream", "router_input", "expert_input", "combined", "route_ids", "greedy_ids"):
                ours, theirs = getattr(step.activations, name)[:rows], getattr(first.activations, name)[:rows]
                assert torch.equal(ours, theirs), f"ranks differ in {name}"
            assert torch.equal(step.taps[:rows], first.taps[:rows]), "ranks differ in the taps"
        return torch.cat([step.activations.logits[:rows] for step in self.steps], dim=1)

    def reset(self) -> None:
        """Counters, epochs, flags and mailboxes as before the first step."""
        self.begin_session(self.ranks.session)
        for arena in self.ranks.arenas:
            arena.zero_()

    def begin_session(self, session: int) -> None:
        """Counters, epochs and flags as before the first step, but the mailboxes as they are."""
        for rank, step in enumerate(self.steps):
            step.mail = self.ranks.mail(rank, session)
            for control in self._controls(step):
                for field in fields(control):
                    getattr(control, field.name).zero_()

    def ahead(self, rank: int) -> None:
        """Rank `rank` has done a step that the others have not."""
        for variant in self.steps[rank].variants.values():
            for control in variant.control.values():
                begun = Control.allocate(variant.instance, self.steps[rank].machine.device, 1)
                for field in fields(control):
                    getattr(control, field.name).copy_(getattr(begun, field.name))

    @staticmethod
    def _controls(step: Step) -> list[Control]:
        return [control for variant in step.variants.values() for control in variant.control.values()]
