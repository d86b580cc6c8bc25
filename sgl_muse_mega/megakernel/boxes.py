"""Descriptions of the expert weights for box copies, which fetch a block's share of many k16 steps at once.

Without them a stage of NVFP4 weights takes one copy for each run of tiles that is contiguous in Marlin's order, 512
bytes to 2 KB, and the copy engine (about 15 ns a copy) becomes the limit.
"""

import torch
from torch import Tensor

from sgl_muse_mega.megakernel.instance import Instance
from sgl_muse_mega.megakernel.machine import Boxes, Machine
from sgl_muse_mega.megakernel.tiling import Tiles
from sgl_muse_mega.megakernel.weights import KernelLayer

DESCRIPTION_BYTES = 128
ELEMENT_BYTES = 8


def _experts(tensor: Tensor, tiles: Tiles, segments: int, tile_bytes: int) -> Boxes:
    """Codes or scales, [experts, K / 16, a row of N / 64 tiles]: x within a segment, y the segment, z the k16 step."""
    experts, steps, _ = tensor.shape
    row = tensor.stride(1) * tensor.element_size()
    segment = row // segments
    run = tiles.tiles // segments * tile_bytes
    return Boxes(
        tensor.data_ptr(),
        (segment // ELEMENT_BYTES, segments, experts * steps),
        (segment, row),
        (run // ELEMENT_BYTES, segments, tiles.steps),
    )


def expert_boxes(instance: Instance, layer: KernelLayer, machine: Machine) -> Tensor | None:
    """uint8 [4, 128] on the machine's device: gate_up's codes and scales, down's codes and scales; None for BF16."""
    if layer.gate_up_block_scale is None or layer.down_block_scale is None:
        return None
    gate_up, down = instance.gate_up_tiles, instance.down_tiles
    boxes = (
        _experts(layer.gate_up, gate_up, 2, 512),
        _experts(layer.gate_up_block_scale, gate_up, 2, 64),
        _experts(layer.down, down, 1, 512),
        _experts(layer.down_block_scale, down, 1, 64),
    )
    words = b"".join(machine.describe_boxes(b).ljust(DESCRIPTION_BYTES, b"\0") for b in boxes)
    return torch.frombuffer(bytearray(words), dtype=torch.uint8).view(len(boxes), DESCRIPTION_BYTES).to(machine.device)
