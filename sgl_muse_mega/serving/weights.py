"""SGLang's loaded tensors as the kernels' weights: the same memory, no copies but the global scales."""

from typing import Any

from torch import Tensor

from sgl_muse_mega.config import TargetConfig
from sgl_muse_mega.errors import UserError
from sgl_muse_mega.megakernel import tensors
from sgl_muse_mega.megakernel.instance import MAX_ROWS, Instance
from sgl_muse_mega.megakernel.weights import KernelLayer, KernelWeights
from sgl_muse_mega.serving import scales

SHOWN_PROBLEMS = 8  # of a model with dozens of layers


def kernel_weights(model: Any, config: TargetConfig, rank: int = 0, ranks: int = 1) -> KernelWeights:
    """The share of a rank in the target that SGLang has loaded and repacked.

    q and k rows are in adjacent-pair order in both, and so are q, k, v and gate in one matrix; NVFP4 experts are read
    in Marlin's layout. SGLang has split attention, experts and vocabulary among the ranks as the kernels do, and has
    the projections round the experts whole on all of them. Raises UserError when a tensor is not there, or not in the
    form the kernels read.
    """
    text = model.model.language_model
    vocabulary = slice(config.vocab_size) if ranks == 1 else slice(None)  # padded rows lie at the end, of a whole one
    return KernelWeights(
        embedding=text.embed_tokens.weight.detach()[vocabulary],
        layers=tuple(kernel_layer(layer, index, rank, ranks) for index, layer in enumerate(text.layers)),
        final_norm=text.norm.weight.detach(),
        lm_head=model.lm_head.weight.detach()[vocabulary],
    )


def kernel_layer(layer: Any, index: int, rank: int = 0, ranks: int = 1) -> KernelLayer:
    """One decoder layer."""
    attention, moe = layer.self_attn, layer.mlp
    experts = _experts(moe, index)
    return KernelLayer(
        input_norm=layer.input_layernorm.weight.detach(),
        qkv=attention.qkv_proj.weight.detach(),
        o_proj=attention.o_proj.weight.detach(),
        **_gate("attention", layer.post_attention_residual_gate),
        pre_feedforward_norm=layer.pre_feedforward_layernorm.weight.detach(),
        router=moe.gate.weight.detach(),
        router_bias=moe.gate.e_score_correction_bias.detach(),
        pre_expert_proj=_rows(moe.pre_expert_proj.weight.detach(), rank, ranks),
        pre_expert_norm=moe.pre_expert_norm.weight.detach(),
        **experts,
        post_expert_norm=moe.experts.post_expert_norm.weight.detach(),
        post_expert_proj=_rows(moe.post_expert_proj.weight.detach(), rank, ranks),
        post_feedforward_norm=layer.post_feedforward_layernorm.weight.detach(),
        **_gate("feedforward", layer.post_feedforward_residual_gate),
        first_expert=rank * int(experts["down"].shape[0]),
    )


def _rows(weight: Tensor, rank: int, ranks: int) -> Tensor:
    """A rank's block of output rows."""
    rows = weight.shape[0]
    return weight[rank * rows // ranks : (rank + 1) * rows // ranks]


def _gate(name: str, gate: Any) -> dict[str, Any]:
    """alpha and beta f32 [H] as SGLang computed them from its bf16 gate."""
    return {f"{name}_alpha": gate._alpha.detach().reshape(-1), f"{name}_beta": gate._beta.detach().reshape(-1)}


def _experts(moe: Any, index: int) -> dict[str, Any]:
    experts = moe.experts
    if not moe.nvfp4_checkpoint:
        names = ("gate_up_block_scale", "down_block_scale", "gate_scale", "up_scale", "down_scale")
        held = {"gate_up": experts.gate_up_proj.detach(), "down": experts.down_proj.detach()}
        return held | dict.fromkeys(names)
    global_scales = scales.kept(experts)
    if global_scales is None:
        raise UserError(
            f"The global scales of layer {index}'s experts were not kept when its weights were repacked: the rank did "
            "not inherit the environment of the process that accepted the flag, or weights did not come from "
            "--model-path."
        )
    gate_up, down = global_scales
    return {
        "gate_up": experts.w13_weight.detach(),
        "down": experts.w2_weight.detach(),
        "gate_up_block_scale": experts.w13_weight_scale.detach(),
        "down_block_scale": experts.w2_weight_scale.detach(),
        "gate_scale": gate_up[:, 0].contiguous(),
        "up_scale": gate_up[:, 1].contiguous(),
        "down_scale": down.contiguous(),
    }


def weight_problems(config: TargetConfig, weights: KernelWeights, ranks: int = 1) -> list[str]:
    """Why the kernels cannot read these tensors: a clause for each of the first, one for the rest; [] when they can."""
    device = weights.embedding.device
    instances = {
        nvfp4: Instance.for_config(
            config,
            nvfp4=nvfp4,
            fp8_cache=True,
            row_cap=MAX_ROWS,
            sms=1,
            ranks=ranks,
            local_experts=weights.layers[0].down.shape[0],
        )
        for nvfp4 in (False, True)
    }
    pairs = [
        (spec, getattr(layer, spec.name.rsplit(".", 1)[1]))
        for index, layer in enumerate(weights.layers)
        for spec in tensors.layer_specs(instances[layer.nvfp4], index)
    ]
    pairs += tensors.end_pairs(instances[False], weights)
    problems = [problem for spec, tensor in pairs if (problem := spec.problem(tensor, device))]
    if len(problems) > SHOWN_PROBLEMS:
        problems[SHOWN_PROBLEMS:] = [f"and {len(problems) - SHOWN_PROBLEMS} more tensors are not what the kernels read"]
    return problems
