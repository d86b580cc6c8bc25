"""The small random models that every implementation is given, and how they are put on disk."""

import json
import os
from dataclasses import replace
from pathlib import Path

import torch

from sgl_muse_mega.checkpoint.random_weights import random_draft, random_target
from sgl_muse_mega.checkpoint.target import save_target
from sgl_muse_mega.checkpoint.weights import DraftWeights, TargetWeights
from sgl_muse_mega.config import DraftConfig, TargetConfig

SEED = int(os.environ.get("ORACLE_SEED") or int.from_bytes(os.urandom(3), "little"))
"""Of everything random in a run; the pytest header names it and ORACLE_SEED repeats it."""

LAYERS = 6
FULL = [(LAYERS - 1 - i) % 4 == 0 for i in range(LAYERS)]
PROMPT = 80
"""Rows of the prompts: several windows long."""

TARGET = TargetConfig(
    vocab_size=320,
    hidden_size=192,
    num_hidden_layers=LAYERS,
    num_attention_heads=6,
    num_key_value_heads=2,
    head_dim=64,
    max_position_embeddings=4096,
    rms_norm_eps=1e-5,
    post_norm_eps=1e-8,
    sliding_window=24,
    layer_types=tuple("full_attention" if full else "sliding_attention" for full in FULL),
    layer_rope_theta=tuple(0.0 if full else 500000.0 for full in FULL),
    mlp_layer_types=("sparse",) * LAYERS,
    moe_hidden_size=96,
    moe_intermediate_size=128,
    num_local_experts=16,
    num_experts_per_tok=4,
    routed_scaling_factor=1.25,
    qk_scale_factor=5.4730064863875,
    output_multiplier=0.6,
    final_logit_softcapping=20.0,
    residual_gate_temperature=0.3,
    eos_token_ids=(2,),
)

DRAFT = DraftConfig(
    vocab_size=TARGET.vocab_size,
    hidden_size=TARGET.hidden_size,
    intermediate_size=256,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    max_position_embeddings=4096,
    rms_norm_eps=1e-5,
    rope_theta=500000.0,
    sliding_window=20,
    layer_types=("sliding_attention",) * 3,
    is_causal=False,
    block_size=8,
    conv_kernel_size=2,
    conv_group_size=16,
    selector_rank=24,
    selector_top_k=16,
    target_layer_ids=(0, 2, 4),
    mask_token_id=319,
    output_multiplier=0.6,
    final_logit_softcapping=20.0,
    num_target_layers=LAYERS,
)

# A vision and an audio part that are as small as both implementations accept; text never reaches them.
_OTHER_PARTS = {
    "out_hidden_size": 256,
    "projector_hidden_size": 64,
    "vision_config": {
        "model_type": "muse_spark_vision",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "layer_types": ["full_attention"],
        "merge_size": 2,
    },
    "audio_config": {
        "model_type": "muse_spark_audio",
        "hidden_sizes": [16, 16, 16, 16],
        "depths": [1, 1, 1, 1],
    },
}


def target_weights(seed: int = SEED) -> TargetWeights:
    """Random weights whose residual gates let little of every branch through, apart from a few wide open channels.

    With the gates of `random_target` a flipped near tie in the routing changes a row beyond recognition within a few
    layers, and comparisons of whole models would measure nothing but flips. The open channels reach alpha's clamp.
    """

    def calm(gate: torch.Tensor) -> torch.Tensor:
        gate = 0.3 * gate - 0.8
        gate[::48] = 3.0
        return gate

    weights = random_target(TARGET, seed)
    return replace(
        weights,
        layers=tuple(
            replace(
                layer,
                post_attention_residual_gate=calm(layer.post_attention_residual_gate),
                post_feedforward_residual_gate=calm(layer.post_feedforward_residual_gate),
            )
            for layer in weights.layers
        ),
    )


def draft_weights(seed: int = SEED) -> DraftWeights:
    return random_draft(DRAFT, seed)


def token_ids(count: int, seed: int) -> torch.Tensor:
    """int64 [count], away from the special ids at the end of the vocabulary."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 316, (count,), generator=generator)


def write_target(directory: Path, weights: TargetWeights, target: TargetConfig = TARGET) -> None:
    """The target as a checkpoint folder that Hugging Face transformers and SGLang both load."""
    save_target(directory, target, weights)
    path = directory / "config.json"
    config = json.loads(path.read_text(encoding="utf-8")) | _OTHER_PARTS
    config["audio_config"] = config["audio_config"] | {"out_hidden_size": target.hidden_size}
    config |= {f"{part}_token_id": target.vocab_size - 2 - i for i, part in enumerate(("image", "video", "audio"))}
    config["text_config"]["eos_token_id"] = target.eos_token_ids[0]
    path.write_text(json.dumps(config), encoding="utf-8")
