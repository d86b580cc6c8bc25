"""SGLang's DFlash2 draft as the kernels' weights."""

from typing import Any

from torch import Tensor

from sgl_muse_mega.checkpoint.weights import ConvWeights, DraftLayerWeights, DraftWeights


def draft_weights(model: Any, rank: int = 0, ranks: int = 1) -> DraftWeights:
    """A rank's share of the draft that SGLang has loaded: views of its tensors. Raises AttributeError on another draft.

    SGLang has split attention and MLP among the ranks as the kernels do, and has all else whole on each of them.
    """
    selector = model.candidate_selector
    return DraftWeights(
        layers=tuple(_layer(layer) for layer in model.layers),
        fc=model.fc.weight.detach().chunk(ranks)[rank],
        hidden_norm=model.hidden_norm.weight.detach(),
        norm=model.norm.weight.detach(),
        predecessor_codebook=selector.predecessor_codebook.detach(),
        successor_codebook=selector.successor_codebook.detach(),
        hidden_projection=selector.hidden_projection.weight.detach(),
    )


def _layer(layer: Any) -> DraftLayerWeights:
    attention = layer.self_attn
    q, k, v = attention.qkv_proj.weight.detach().split([attention.q_size, attention.kv_size, attention.kv_size])
    gate, up = layer.mlp.gate_up_proj.weight.detach().chunk(2)
    return DraftLayerWeights(
        input_layernorm=layer.input_layernorm.weight.detach(),
        q_proj=q,
        k_proj=k,
        v_proj=v,
        o_proj=attention.o_proj.weight.detach(),
        q_norm=attention.q_norm.weight.detach(),
        k_norm=attention.k_norm.weight.detach(),
        post_attention_layernorm=layer.post_attention_layernorm.weight.detach(),
        gate_proj=gate,
        up_proj=up,
        down_proj=layer.mlp.down_proj.weight.detach(),
        attention_conv=_convolution(layer.attention_conv),
        mlp_conv=_convolution(layer.mlp_conv),
    )


def _convolution(module: Any) -> ConvWeights:
    base: Tensor = module.base_kernel.detach()
    return ConvWeights(base, module.kernel_projection.weight.detach())
