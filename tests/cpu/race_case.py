"""The model that the race hunt runs: two layers of each kind of attention, small enough for hundreds of schedules."""

from dataclasses import fields
from pathlib import Path

from torch import Tensor

from sgl_muse_mega.emulator.machine import PLAIN, EmulatorFault, Schedule
from sgl_muse_mega.emulator.stepper import Emulator
from sgl_muse_mega.megakernel import protocol
from sgl_muse_mega.megakernel.random_step import RandomStep, random_weights, tiny_config
from sgl_muse_mega.megakernel.scratch import Control

Tuning = tuple[tuple[str, int], ...]  # fields of the kernels' Instance that differ from the default
STAGED: Tuning = (("staged_split", 32), ("splits_cap", 1))  # attention's keys through shared memory, in one split


class RaceCase:
    """A step on a few SMs; run it under any schedule."""

    def __init__(
        self,
        sources: Path | None = None,
        *,
        nvfp4: bool = True,
        kv_dtype: str = "bf16",
        sms: int = 3,
        tuning: Tuning = (),
    ) -> None:
        config = tiny_config(
            2, nvfp4=nvfp4, vocab_size=128, hidden_size=128, moe_hidden_size=64, moe_intermediate_size=64,
            num_local_experts=8, num_experts_per_tok=2, num_attention_heads=4, num_key_value_heads=2, sliding_window=32,
        )  # fmt: skip
        self.emulator = Emulator(sms=sms, sources=sources)
        weights = random_weights(config, 1, self.emulator.device)
        self.case = RandomStep.create(
            config, weights, self.emulator, row_cap=8, max_context=160, kv_dtype=kv_dtype, tuning=dict(tuning)
        )

    def run(
        self, schedule: Schedule = PLAIN, rows: int = 3, length: int = 100, content: int = 1, steps: int = 1
    ) -> Tensor:
        """Logits [rows, V] of a step over poisoned buffers, launched `steps` times without a wait of the host between.

        Raises EmulatorFault, and starts anew after it.
        """
        step = self.case.step
        self.case.fill(length, content)
        step.activations.poison()
        self.emulator.fault_record.zero_()
        self.emulator.attach(step, self.case.caches)
        self.emulator.schedule = schedule
        for _ in range(steps):
            step.launch(rows)
        try:
            self.emulator.synchronize()
        except EmulatorFault:
            self.reset()
            raise
        return step.activations.logits[:rows].clone()

    def reset(self) -> None:
        """Counters, epochs and flags as before the first step."""
        (variant,) = self.case.step.variants.values()
        for control in variant.control.values():
            for field in fields(control):
                getattr(control, field.name).zero_()

    def control(self, kernel: str) -> Control:
        """Counters, epoch and flags of one of the kernels."""
        (variant,) = self.case.step.variants.values()
        return variant.control[kernel]

    def counter_address(self, name: str) -> int:
        """Address of one of the layer kernel's counters."""
        index = [c.name for c in protocol.COUNTERS].index(name)
        return self.control("layer").counters.data_ptr() + index * protocol.COUNTER_STRIDE * 4

    def flag_address(self) -> int:
        """Address of the first activation flag."""
        return self.control("layer").flags.data_ptr()
