"""A plugin for SGLang that makes `--load-format dummy` a fair stand-in for a real model: random weights of a trained
model's scale, different in every tensor, where SGLang's own are all alike, nearly zero, and uninitialised where packed.

`serve_check.py` puts it on the path of every server it starts; the environment variable SERVE_CHECK_WEIGHTS=1 turns it
on.
"""

import os
import zlib
from typing import Any

TARGET = "sglang.srt.model_loader.loader.initialize_dummy_weights"
E4M3_HALF, E4M3_TWO = 0x30, 0x40
CODE_AND_SCALE_RMS = 2.93 * 1.2  # of random e2m1 codes, and of block scales between 1/2 and 2


def register() -> None:
    """The entry point."""
    if os.environ.get("SERVE_CHECK_WEIGHTS") == "1":
        from sglang.srt.plugins.hook_registry import HookRegistry, HookType

        HookRegistry.register(TARGET, fill, HookType.REPLACE)


def fill(model: Any, *_arguments: Any, **_options: Any) -> None:
    """Fills every parameter and persistent buffer of a target or a DFlash2 draft."""
    import torch

    draft = type(model).__name__.startswith("DFlash")
    for name, tensor in model.state_dict().items():
        generator = torch.Generator(device=tensor.device).manual_seed(zlib.crc32(name.encode()))
        _fill(name, tensor, generator, draft)


def _fill(name: str, tensor: Any, generator: Any, draft: bool) -> None:
    import torch

    if tensor.dtype == torch.uint8:
        tensor.random_(0, 256, generator=generator)
    elif tensor.dtype == torch.float8_e4m3fn:
        tensor.view(torch.uint8).random_(E4M3_HALF, E4M3_TWO, generator=generator)
    elif not tensor.is_floating_point():
        return
    elif name.endswith("_weight_scale_2"):
        inputs = 4096  # of both products of a full-size expert
        tensor.fill_(inputs**-0.5 / CODE_AND_SCALE_RMS)
    elif name.endswith("input_scale"):
        tensor.fill_(1.0)
    elif name.endswith("e_score_correction_bias"):
        tensor.zero_()
    elif "norm" in name and tensor.dim() == 1:
        absolute = draft or name.endswith("language_model.norm.weight")
        tensor.fill_(1.0) if absolute else tensor.normal_(0, 0.05, generator=generator)
    elif name.endswith("_gate.gate"):
        tensor.normal_(0, 0.1, generator=generator)
    elif name.endswith("base_kernel"):
        tensor.normal_(0, 0.5, generator=generator)
    elif name.endswith("embed_tokens.weight"):
        tensor.normal_(0, 1.0, generator=generator)
    elif tensor.dim() >= 2:
        tensor.normal_(0, tensor.shape[-1] ** -0.5, generator=generator)
