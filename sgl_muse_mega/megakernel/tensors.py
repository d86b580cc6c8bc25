"""Declarative check of everything a launch points at, before anything is launched."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from sgl_muse_mega.errors import UserError
from sgl_muse_mega.megakernel.instance import Instance
from sgl_muse_mega.megakernel.weights import KernelLayer, KernelWeights

ALIGNMENT = 16  # bytes: the granularity of bulk copies and vector loads


@dataclass(frozen=True, slots=True)
class Spec:
    """What a tensor must be: contiguous, 16-byte aligned, of this shape and type."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    def problem(self, tensor: Tensor | None, device: torch.device) -> str | None:
        """Why `tensor` will not do, or None."""
        if tensor is None:
            return f"{self.name} is missing"
        if tuple(tensor.shape) != self.shape:
            return f"{self.name} has shape {list(tensor.shape)} instead of {list(self.shape)}"
        if tensor.dtype != self.dtype:
            return f"{self.name} is {tensor.dtype} instead of {self.dtype}"
        if tensor.device != device:
            return f"{self.name} is on {tensor.device} instead of {device}"
        if not tensor.is_contiguous():
            return f"{self.name} is not contiguous (strides {list(tensor.stride())})"
        if tensor.data_ptr() % ALIGNMENT:
            return f"{self.name} does not start at a multiple of {ALIGNMENT} bytes"
        return None


def check(pairs: Iterable[tuple[Spec, Tensor | None]], device: torch.device, what: str) -> None:
    """Raises UserError with all problems in one sentence."""
    problems = [text for spec, tensor in pairs if (text := spec.problem(tensor, device))]
    if problems:
        raise UserError(f"The layer kernel cannot use {what}: " + "; ".join(problems) + ".")


def layer_specs(instance: Instance, layer: int) -> list[Spec]:
    """Every tensor of a KernelLayer, under its field's name."""
    i, bf16, f32 = instance, torch.bfloat16, torch.float32
    heads = i.heads * i.head_dim

    def spec(name: str, *shape: int, dtype: torch.dtype = bf16) -> Spec:
        return Spec(f"layers.{layer}.{name}", shape, dtype)

    specs = [
        spec("input_norm", i.hidden),
        spec("qkv", i.qkv_proj.n, i.hidden),
        spec("o_proj", i.hidden, heads),
        spec("attention_alpha", i.hidden, dtype=f32),
        spec("attention_beta", i.hidden, dtype=f32),
        spec("pre_feedforward_norm", i.hidden),
        spec("router", i.experts, i.hidden, dtype=f32),
        spec("router_bias", i.experts, dtype=f32),
        spec("pre_expert_proj", i.pre_proj.n, i.hidden),
        spec("pre_expert_norm", i.moe_hidden),
        spec("post_expert_norm", i.moe_hidden),
        spec("post_expert_proj", i.post_proj.n, i.moe_hidden),
        spec("post_feedforward_norm", i.hidden),
        spec("feedforward_alpha", i.hidden, dtype=f32),
        spec("feedforward_beta", i.hidden, dtype=f32),
    ]
    experts, m, inner = i.local_experts, i.moe_hidden, i.moe_inter
    if not i.nvfp4:
        return [*specs, spec("gate_up", experts, 2 * inner, m), spec("down", experts, m, inner)]
    return [
        *specs,
        spec("gate_up", experts, m // 16, 4 * inner, dtype=torch.int32),
        spec("down", experts, inner // 16, 2 * m, dtype=torch.int32),
        spec("gate_up_block_scale", experts, m // 16, 2 * inner, dtype=torch.float8_e4m3fn),
        spec("down_block_scale", experts, inner // 16, m, dtype=torch.float8_e4m3fn),
        spec("gate_scale", experts, dtype=f32),
        spec("up_scale", experts, dtype=f32),
        spec("down_scale", experts, dtype=f32),
    ]


def check_layer(instance: Instance, index: int, layer: KernelLayer, device: torch.device) -> None:
    """Raises UserError unless the layer's tensors are what this instance reads."""
    specs = layer_specs(instance, index)
    check(((s, getattr(layer, s.name.rsplit(".", 1)[1])) for s in specs), device, f"the weights of layer {index}")


def end_pairs(instance: Instance, weights: KernelWeights) -> list[tuple[Spec, Tensor]]:
    """Embedding, final norm and head with what they must be."""
    vocabulary = (instance.vocab, instance.hidden)
    return [
        (Spec("embedding", vocabulary, torch.bfloat16), weights.embedding),
        (Spec("final_norm", (instance.hidden,), torch.bfloat16), weights.final_norm),
        (Spec("lm_head", vocabulary, torch.bfloat16), weights.lm_head),
    ]


def check_ends(instance: Instance, weights: KernelWeights, device: torch.device) -> None:
    """Raises UserError unless embedding, final norm and head are what this instance reads."""
    check(end_pairs(instance, weights), device, "embedding and head")
