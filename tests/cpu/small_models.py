"""Small random configurations with every feature on, shared by the tests."""

from typing import Any

from sgl_muse_mega.config import DraftConfig, QuantizationConfig, TargetConfig


def small_target(**changes: Any) -> TargetConfig:
    """4 layers (the last one full), window 6, GQA, NVFP4 experts on the layers between the first and the last."""
    layers = changes.get("num_hidden_layers", 4)
    fields: dict[str, Any] = {
        "vocab_size": 96,
        "hidden_size": 64,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "post_norm_eps": 1e-8,
        "sliding_window": 6,
        "moe_hidden_size": 32,
        "moe_intermediate_size": 48,
        "num_local_experts": 8,
        "num_experts_per_tok": 3,
        "routed_scaling_factor": 1.0,
        "qk_scale_factor": 5.4730064863875,
        "output_multiplier": 0.5,
        "final_logit_softcapping": 20.0,
        "residual_gate_temperature": 0.3,
        "eos_token_ids": (1,),
        "quantization": QuantizationConfig(
            quant_algo="NVFP4",
            group_size=16,
            exclude=("*.layers.0.mlp.experts", f"*.layers.{layers - 1}.mlp.experts", "lm_head"),
        ),
    }
    return TargetConfig.model_validate({**fields, **changes})


def small_draft(target: TargetConfig, **changes: Any) -> DraftConfig:
    """2 layers, window 5, block 8, selector over 4 candidates."""
    fields: dict[str, Any] = {
        "vocab_size": target.vocab_size,
        "hidden_size": target.hidden_size,
        "intermediate_size": 80,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "sliding_window": 5,
        "layer_types": ("sliding_attention",) * changes.get("num_hidden_layers", 2),
        "is_causal": False,
        "block_size": 8,
        "conv_kernel_size": 2,
        "conv_group_size": 16,
        "selector_rank": 12,
        "selector_top_k": 4,
        "target_layer_ids": (0, 2),
        "mask_token_id": target.vocab_size - 1,
        "output_multiplier": 0.5,
        "final_logit_softcapping": 20.0,
        "num_target_layers": target.num_hidden_layers,
    }
    return DraftConfig.model_validate({**fields, **changes})
