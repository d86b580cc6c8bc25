"""SGLang's own loader reads the bundled target on a CPU as it does on a Hopper GPU, NVFP4 experts included.

    sglang_checkpoint.py

A program of its own, because a process of SGLang loads one model. What is replaced: the GPU's name, the order that
SGLang's CUDA kernel gives to weight words (test_sglang_marlin.py compares ours with its reference), and the kernel's
workspace. Prints a JSON object: the layers whose experts SGLang takes for BF16, those by our reader, tensors that the
kernels could not read, and layers whose experts are not the checkpoint's.
"""

import json
from typing import Any

import sglang_target
import torch
from sglang.srt.layers.muse_spark import muse_spark_fp4_moe, muse_spark_nvfp4_moe
from sglang.srt.layers.quantization import marlin_utils_fp4, modelopt_quant
from torch import Tensor

from sgl_muse_mega.checkpoint import marlin, tiny
from sgl_muse_mega.checkpoint.target import load_target
from sgl_muse_mega.checkpoint.weights import Nvfp4Experts
from sgl_muse_mega.config import load_target_config
from sgl_muse_mega.serving import scales
from sgl_muse_mega.serving.model_config import target_config
from sgl_muse_mega.serving.weights import kernel_weights, weight_problems


def as_on_hopper() -> None:
    """Makes SGLang choose Marlin, and repack on the CPU."""
    for module in (muse_spark_fp4_moe, modelopt_quant):
        module.is_cuda = lambda: True
        module.get_device_capability = lambda *_: (9, 0)

    def repack(*, b_q_weight: Tensor, size_k: int, size_n: int, **_options: Any) -> Tensor:
        assert size_k % 16 == size_n % 64 == 0, "the kernel's tiles"
        return marlin.pack_weight(b_q_weight.T.contiguous().view(torch.uint8))

    marlin_utils_fp4.gptq_marlin_repack = repack
    marlin_utils_fp4.marlin_make_workspace = lambda *_: torch.zeros(1, dtype=torch.int32)
    method = muse_spark_nvfp4_moe.MuseSparkNvFp4FusedMoEMethod
    original = method.process_weights_after_loading

    def keeping(self: Any, layer: Any) -> Any:
        scales.keep(self, layer)
        return original(self, layer)

    method.process_weights_after_loading = keeping


def same_experts(ours: Any, gate_up: Any, down: Any) -> bool:
    """Whether the kernels' tensors hold the checkpoint's."""
    if not isinstance(gate_up, Nvfp4Experts):
        return torch.equal(ours.gate_up, gate_up) and torch.equal(ours.down, down)
    gate, up = gate_up.scale_2.unbind(1)
    return (
        torch.equal(marlin.unpack_weight(ours.gate_up), gate_up.codes)
        and torch.equal(marlin.unpack_weight(ours.down), down.codes)
        and torch.equal(marlin.unpack_scales(ours.gate_up_block_scale).float(), gate_up.block_scale.float())
        and torch.equal(marlin.unpack_scales(ours.down_block_scale).float(), down.block_scale.float())
        and torch.equal(ours.gate_scale, gate)
        and torch.equal(ours.up_scale, up)
        and torch.equal(ours.down_scale, down.scale_2.flatten())
    )


def main() -> None:
    torch.set_num_threads(1)
    as_on_hopper()
    runner = sglang_target.load(tiny.target_directory())
    theirs = runner.model.model.language_model.layers
    config = load_target_config(tiny.target_directory())
    expected = load_target(tiny.target_directory(), config)
    served = target_config(runner.model_config.hf_config)
    weights = kernel_weights(runner.model, served)
    pairs = enumerate(zip(weights.layers, expected.layers, strict=True))
    found = {
        "sglang_bf16": [index for index, layer in enumerate(theirs) if not layer.mlp.nvfp4_checkpoint],
        "our_bf16": [index for index in range(config.num_hidden_layers) if not config.nvfp4_experts(index)],
        "problems": weight_problems(served, weights),
        "other_experts": [i for i, (ours, e) in pairs if not same_experts(ours, e.gate_up_proj, e.down_proj)],
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
