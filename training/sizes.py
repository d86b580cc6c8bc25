"""The tiny pair's configuration: every feature of the real pair at toy size."""

from typing import Any

from sgl_muse_mega.config import DraftConfig, QuantizationConfig, TargetConfig
from training import tokenizer

LAYERS = 6
WINDOW = 64  # shorter than most problems (60 to 152 tokens), so that windows matter
MAX_POSITIONS = 8192

TARGET = TargetConfig(
    vocab_size=tokenizer.VOCAB_SIZE,
    hidden_size=256,
    num_hidden_layers=LAYERS,
    num_attention_heads=8,
    num_key_value_heads=2,
    head_dim=64,
    max_position_embeddings=MAX_POSITIONS,
    rms_norm_eps=1e-5,
    post_norm_eps=1e-8,
    sliding_window=WINDOW,
    moe_hidden_size=128,
    moe_intermediate_size=128,
    num_local_experts=16,
    num_experts_per_tok=4,
    routed_scaling_factor=1.0,
    qk_scale_factor=5.4730064863875,
    output_multiplier=0.5,
    final_logit_softcapping=20.0,
    residual_gate_temperature=0.3,
    bos_token_id=tokenizer.BOS,
    eos_token_ids=(tokenizer.EOS, tokenizer.END_OF_TURN),
    pad_token_id=tokenizer.PAD,
    quantization=QuantizationConfig(
        quant_algo="NVFP4",
        group_size=16,
        exclude=(
            "lm_head",
            "*embed_tokens*",
            "*self_attn*",
            "*mlp.gate",
            "*mlp.pre_expert_proj",
            "*mlp.post_expert_proj",
            # Whole names: SGLang 0.5.23 knows no wildcards in the question whether a layer's experts are NVFP4.
            "model.language_model.layers.0.mlp.experts",
            f"model.language_model.layers.{LAYERS - 1}.mlp.experts",
            "*vision_*",
            "*audio_tower*",
        ),
    ),
)

DRAFT = DraftConfig(
    vocab_size=tokenizer.VOCAB_SIZE,
    hidden_size=TARGET.hidden_size,
    intermediate_size=1024,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=128,
    max_position_embeddings=MAX_POSITIONS,
    rms_norm_eps=1e-5,
    rope_theta=500000.0,
    sliding_window=WINDOW,
    layer_types=("sliding_attention",) * 3,
    is_causal=False,
    block_size=8,
    conv_kernel_size=2,
    conv_group_size=16,
    selector_rank=64,
    selector_top_k=16,
    target_layer_ids=(0, 1, 2, 3, 4),
    mask_token_id=tokenizer.MASK,
    output_multiplier=TARGET.output_multiplier,
    final_logit_softcapping=TARGET.final_logit_softcapping,
    num_target_layers=LAYERS,
)

# What servers of the multimodal architecture expect beside `text_config`; no text is affected by it.
WRAPPER_STUBS: dict[str, Any] = {
    "image_token_id": tokenizer.IMAGE,
    "video_token_id": tokenizer.VIDEO,
    "audio_token_id": tokenizer.AUDIO,
    "out_hidden_size": 256,  # the vision projector's input: vision width 64 times 2 x 2 merged patches
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
        "out_hidden_size": TARGET.hidden_size,
    },
}
