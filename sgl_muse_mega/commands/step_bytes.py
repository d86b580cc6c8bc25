"""Bytes of weights that the parts of a decode step read."""

from torch import Tensor

from sgl_muse_mega.megakernel.draft_step import DraftStep
from sgl_muse_mega.megakernel.step import Step


def bytes_of(*tensors: Tensor) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


def layer_loads(step: Step, rows: int) -> tuple[list[int], list[int]]:
    """Of every layer, this rank's experts that the first `rows` rows of the inputs use, and the bytes of weights that
    are read for them: dense ones, and those experts. Launches the layers and waits for each."""
    step.launch_embed(rows)
    step.machine.synchronize()
    experts, sizes = [], []
    for index, layer in enumerate(step.weights.layers):
        step.launch_layer(index, rows)
        step.machine.synchronize()
        ids = step.activations.route_ids[:rows] - layer.first_expert
        local = layer.down.shape[0]
        experts.append(int(ids[(ids >= 0) & (ids < local)].unique().numel()))
        scales = [t for t in (layer.gate_up_block_scale, layer.down_block_scale) if t is not None]
        dense = bytes_of(layer.qkv, layer.o_proj, layer.router, layer.pre_expert_proj, layer.post_expert_proj)
        sizes.append(dense + experts[-1] * bytes_of(layer.gate_up, layer.down, *scales) // local)
    return experts, sizes


def draft_loads(draft: DraftStep) -> tuple[int, int, int]:
    """Bytes of the draft's layers, of its head with the selector, and of what writes its context."""
    weights, instance = draft.weights, draft.instance
    layers = sum(bytes_of(*(getattr(layer, name) for name in layer.__slots__)) for layer in weights.layers)
    kv_rows = len(weights.layers) * 2 * instance.kv_heads * instance.head_dim
    context = bytes_of(weights.fusion) + kv_rows * instance.hidden * 2
    return layers, bytes_of(weights.lm_head, weights.hidden_projection), context
