"""The control that the layer kernel is measured against: its phases as separate kernels (csrc/layer/separate.cuh)."""

from dataclasses import dataclass
from typing import ClassVar

from sgl_muse_mega.megakernel.build import Progress
from sgl_muse_mega.megakernel.instance import Instance
from sgl_muse_mega.megakernel.machine import Machine
from sgl_muse_mega.megakernel.protocol import Params

PHASES: tuple[tuple[str, bool], ...] = (
    ("attention_kernel", False), ("gate_kernel", False), ("o_proj_kernel", True), ("after_attention_kernel", False),
    ("router_kernel", True), ("routed_kernel", False), ("gate_up_kernel", True), ("down_kernel", True),
    ("combine_kernel", False), ("post_proj_kernel", True), ("after_experts_kernel", False), ("qkv_proj_kernel", True),
    ("heads_kernel", False),
)  # fmt: skip
"""Kernels of a layer in order, and whether each loads weights through the ring."""
NEXT_QKV = ("qkv_proj_kernel", "heads_kernel")  # not launched for the last layer


@dataclass(frozen=True, slots=True)
class PhaseKernels:
    """The phases with weights, or those without, which need no ring: one compiled file, two sizes of shared memory."""

    source: ClassVar[str] = "separate.cu"

    instance: Instance
    with_weights: bool

    @property
    def kernels(self) -> tuple[str, ...]:
        return tuple(name for name, weights in PHASES if weights == self.with_weights)

    @property
    def sms(self) -> int:
        return self.instance.sms

    @property
    def threads(self) -> int:
        return self.instance.threads

    @property
    def shared_offsets(self) -> dict[str, int]:
        offsets = self.instance.shared_offsets
        return offsets if self.with_weights else offsets | {"SHARED_BYTES": offsets["RING_AT"]}

    def header(self) -> str:
        return self.instance.header()

    def describe(self) -> str:
        return self.instance.describe()


class SeparatePhases:
    """Launches a layer as one kernel per phase."""

    def __init__(self, machine: Machine, instance: Instance, progress: Progress) -> None:
        """instance: with `separate_phases`. Raises UserError when the kernels cannot be built."""
        self._modules = {kind: machine.load(PhaseKernels(instance, kind), progress) for kind in (False, True)}

    def launch(self, params: Params) -> None:
        for name, weights in PHASES:
            if params.has_next or name not in NEXT_QKV:
                self._modules[weights].launch(name, params)
