"""Keeps the NVFP4 global scales of the routed experts, which SGLang's Marlin repack rounds to bf16 or drops.

A few kilobytes per layer: gate, up and down have one float32 each per expert.
"""

from typing import Any

from torch import Tensor

TARGET = "sglang.srt.layers.muse_spark.muse_spark_nvfp4_moe.MuseSparkNvFp4FusedMoEMethod.process_weights_after_loading"
GATE_UP = "muse_mega_gate_up_scale"  # f32 [local experts, 2]
DOWN = "muse_mega_down_scale"  # f32 [local experts]


def register_hook() -> None:
    """Asks SGLang's registry to call `keep` before the repack; imports the quantisation method's module."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(TARGET, keep, HookType.BEFORE)


def keep(method: Any, layer: Any) -> None:
    """Copies the scales beside the weights they belong to. `layer` is the experts' module."""
    del method
    setattr(layer, GATE_UP, layer.gate_up_proj_weight_scale_2.detach().clone())
    setattr(layer, DOWN, layer.down_proj_weight_scale_2.detach().clone())


def kept(layer: Any) -> tuple[Tensor, Tensor] | None:
    """(gate and up, down) scales of an experts' module; None when the hook did not see it."""
    gate_up, down = getattr(layer, GATE_UP, None), getattr(layer, DOWN, None)
    return None if gate_up is None or down is None else (gate_up, down)
