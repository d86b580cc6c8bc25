"""Hugging Face transformers' Muse Spark on the oracle's weights, and the intermediate results of its layers."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from models import TARGET
from torch import Tensor, nn
from transformers.models.muse_spark import modeling_muse_spark as spark
from transformers.utils import logging

Q_FACTOR = TARGET.qk_scale_factor
"""transformers multiplies the scale onto q (D-5)."""


def load(directory: Path, dtype: torch.dtype, experts: str = "eager") -> Any:
    """experts: "eager" (a loop that adds experts in the model's type), "batched_mm" or "grouped_mm" (f32 sum)."""
    logging.set_verbosity_error()  # the vision and audio parts are not in the checkpoint
    model = spark.MuseSparkForConditionalGeneration.from_pretrained(
        directory,
        dtype=torch.float32 if dtype == torch.float64 else dtype,
        attn_implementation="eager",
        experts_implementation=experts,
    )
    return model.to(dtype).eval() if dtype == torch.float64 else model.eval()


@dataclass
class Run:
    logits: Tensor  # [T, V]
    streams: list[Tensor]  # the stream entering layer 0 and leaving every layer, [T, H] each
    stages: list[dict[str, Tensor]]  # per layer


def run(model: Any, ids: Tensor) -> Run:
    """One prompt int64 [T] through the model, every stage of every layer recorded."""
    layers = model.model.language_model.layers
    stages: list[dict[str, Tensor]] = [{} for _ in layers]
    handles = [handle for layer, record in zip(layers, stages, strict=True) for handle in _watch(layer, record)]
    attend = spark.eager_attention_forward

    def attend_and_record(module: Any, q: Tensor, k: Tensor, v: Tensor, *args: Any, **kwargs: Any) -> Any:
        output, weights = attend(module, q, k, v, *args, **kwargs)
        for name, value in (("A4.q", q), ("A4.k", k)):
            stages[module.layer_idx][name] = value[0].transpose(0, 1)
        stages[module.layer_idx]["A6"] = output[0]
        return output, weights

    spark.eager_attention_forward = attend_and_record
    try:
        with torch.inference_mode():
            logits = model(input_ids=ids[None]).logits[0]
    finally:
        spark.eager_attention_forward = attend
        for handle in handles:
            handle.remove()
    for record in stages:
        record["F2"] = record["F2"] / TARGET.output_multiplier
        for name in ("F10", "F11"):
            if name + ".parts" in record:
                record[name] = torch.cat(record.pop(name + ".parts"))
        chosen = record["F4"]  # the loop goes through the experts and within each by slot, then token
        by_slot = chosen.T
        slots = torch.cat([(by_slot == e).nonzero() for e in range(TARGET.num_local_experts)])
        record["F10.token"], record["F10.expert"] = slots[:, 1], chosen[slots[:, 1], slots[:, 0]]
    return Run(logits, [stages[0]["stream"], *(record["F16"] for record in stages)], stages)


def _watch(layer: Any, record: dict[str, Tensor]) -> list[Any]:
    attention, moe = layer.self_attn, layer.mlp

    def keep(name: str, module: nn.Module) -> Any:
        return module.register_forward_hook(
            lambda _m, _args, out: record.update({name: out.reshape(-1, out.shape[-1])})
        )

    def keep_input(name: str, module: nn.Module) -> Any:
        def hook(_module: nn.Module, args: tuple[Tensor, ...]) -> None:
            record[name] = args[0].reshape(-1, args[0].shape[-1])

        return module.register_forward_pre_hook(hook)

    def head_norm(_module: nn.Module, _args: Any, out: Tensor) -> None:
        record["A3.k" if "A3.q" in record else "A3.q"] = out[0].transpose(0, 1)  # q comes first

    def router(_module: nn.Module, _args: Any, out: tuple[Tensor, Tensor, Tensor]) -> None:
        record["F2"], record["F5"], record["F4"] = out

    def expert(_module: nn.Module, args: tuple[Tensor], out: Tensor) -> None:
        for name, value in (("F10.parts", args[0]), ("F11.parts", out)):
            record.setdefault(name, []).append(value)  # type: ignore[arg-type, attr-defined]

    handles = [
        layer.register_forward_pre_hook(lambda _m, args: record.update(stream=args[0][0])),
        keep("A1", layer.input_layernorm),
        *(keep(f"A2.{n}", getattr(attention, f"{n}_proj")) for n in ("q", "k", "v", "gate")),
        attention.qk_norm.register_forward_hook(head_norm),
        keep_input("A7", attention.o_proj),
        keep("A8", attention.o_proj),
        keep("A9", layer.post_attention_layernorm),
        keep("A10", layer.post_attention_residual_gate),
        keep("F1", layer.pre_feedforward_layernorm),
        moe.gate.register_forward_hook(router),
        keep("F6", moe.pre_expert_proj),
        keep("F7", moe.pre_expert_norm),
        keep("F12", moe.experts),
        keep("F14", moe.post_expert_proj),
        keep("F15", layer.post_feedforward_layernorm),
        keep("F16", layer.post_feedforward_residual_gate),
    ]
    if moe.experts.config._experts_implementation == "eager":
        handles.append(moe.experts.post_expert_norm.register_forward_hook(expert))
    return handles
