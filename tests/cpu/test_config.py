"""Configuration: round trips, derived lists, and one sentence per wrong field."""

import json
from pathlib import Path
from typing import Any

import pytest

from sgl_muse_mega.config import DraftConfig, TargetConfig, check_pair, load_draft_config, load_target_config
from sgl_muse_mega.errors import UserError

TEXT: dict[str, Any] = {
    "model_type": "muse_spark_text",
    "vocab_size": 202048,
    "hidden_size": 8192,
    "num_hidden_layers": 62,
    "num_attention_heads": 128,
    "num_key_value_heads": 16,
    "head_dim": 64,
    "max_position_embeddings": 1048576,
    "rms_norm_eps": 1e-5,
    "post_norm_eps": 1e-8,
    "sliding_window": 2048,
    "moe_hidden_size": 4096,
    "moe_intermediate_size": 4096,
    "num_local_experts": 256,
    "num_experts_per_tok": 8,
    "num_shared_experts": 0,
    "routed_scaling_factor": 1.0,
    "qk_scale_factor": 5.4730064863875,
    "output_multiplier": 0.17677669529663687,
    "final_logit_softcapping": 20.0,
    "residual_gate_temperature": 0.3,
    "bos_token_id": 200000,
    "eos_token_id": 200001,
    "pad_token_id": 200018,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "hidden_act": "silu",
    "use_cache": True,
    "intermediate_size": 16384,
}
QUANTIZATION = {
    "quant_method": "modelopt",
    "quant_algo": "NVFP4",
    "group_size": 16,
    "ignore": ["lm_head", "*self_attn*", "*.layers.0.mlp.experts", "model.language_model.layers.61.mlp.experts"],
}
DRAFT: dict[str, Any] = {
    "architectures": ["DFlash2DraftModel"],
    "model_type": "qwen3",
    "vocab_size": 202048,
    "hidden_size": 8192,
    "intermediate_size": 16384,
    "num_hidden_layers": 5,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 1048576,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000,
    "sliding_window": 2048,
    "layer_types": ["sliding_attention"] * 5,
    "is_causal": False,
    "block_size": 8,
    "num_target_layers": 62,
    "dflash_config": {
        "block_size": 8,
        "mask_token_id": 201818,
        "target_layer_ids": [1, 16, 30, 44, 59],
        "selector_rank": 256,
        "selector_top_k": 16,
        "conv_kernel_size": 2,
        "conv_group_size": 16,
        "output_multiplier": 0.17677669529663687,
        "final_logit_softcapping": 20,
    },
}


def write_target(directory: Path, text: dict[str, Any], **outer: Any) -> Path:
    content = {
        "architectures": ["MuseSparkForConditionalGeneration"],
        "model_type": "muse_spark",
        "text_config": text,
        **outer,
    }
    (directory / "config.json").write_text(json.dumps(content), encoding="utf-8")
    return directory


def write_draft(directory: Path, **changes: Any) -> Path:
    (directory / "config.json").write_text(json.dumps({**DRAFT, **changes}), encoding="utf-8")
    return directory


def test_published_target_follows_the_specification(tmp_path: Path) -> None:
    config = load_target_config(write_target(tmp_path, TEXT, quantization_config=QUANTIZATION))
    full = [layer for layer in range(62) if config.is_full(layer)]
    assert full == list(range(1, 62, 4))
    assert len(full) == 16
    assert [config.rope_theta(layer) for layer in (0, 1)] == [500000.0, 0.0]
    assert config.window(0) == 2048
    assert config.window(1) is None
    assert config.attention_scale == pytest.approx(0.6841258107984375, rel=1e-12)
    assert [layer for layer in range(62) if not config.nvfp4_experts(layer)] == [0, 61]


def test_quantisation_comes_from_either_file(tmp_path: Path) -> None:
    write_target(tmp_path, TEXT)
    assert not any(load_target_config(tmp_path).nvfp4_experts(layer) for layer in range(62))
    section = {"quant_algo": "NVFP4", "group_size": 16, "exclude_modules": ["*layers.3.mlp.experts*"]}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps({"quantization": section}), encoding="utf-8")
    config = load_target_config(tmp_path)
    assert [layer for layer in range(62) if not config.nvfp4_experts(layer)] == [3]


@pytest.mark.parametrize(
    "entry",
    [
        "model.language_model.layers.3.mlp.experts",  # as published exports name it, and as SGLang needs it
        "layers.3.mlp.experts",
        "model.language_model.layers.3.mlp",
        "model.language_model.layers.3.mlp.experts.gate_up_proj",
        "*layers.3.mlp.experts*",
    ],
)
def test_ways_to_exclude_the_experts_of_a_layer(tmp_path: Path, entry: str) -> None:
    quantization = {**QUANTIZATION, "ignore": ["lm_head", "model.language_model.layers.2.mlp.gate", entry]}
    config = load_target_config(write_target(tmp_path, TEXT, quantization_config=quantization))
    assert [layer for layer in range(62) if not config.nvfp4_experts(layer)] == [3]


def test_stop_ids_join_both_files(tmp_path: Path) -> None:
    write_target(tmp_path, TEXT)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [200001, 200008]}', encoding="utf-8")
    assert load_target_config(tmp_path).eos_token_ids == (200001, 200008)


def test_round_trip(tmp_path: Path) -> None:
    target = load_target_config(write_target(tmp_path, TEXT, quantization_config=QUANTIZATION))
    (tmp_path / "config.json").write_text(json.dumps(target.to_hf()), encoding="utf-8")
    assert load_target_config(tmp_path) == target
    draft = load_draft_config(write_draft(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps(draft.to_hf()), encoding="utf-8")
    assert load_draft_config(tmp_path) == draft


OPTIONAL = {
    "model_type", "num_shared_experts", "tie_word_embeddings", "attention_bias", "hidden_act", "use_cache",
    "intermediate_size", "bos_token_id", "pad_token_id", "eos_token_id",
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(set(TEXT) - OPTIONAL))
def test_missing_field_is_named(tmp_path: Path, name: str) -> None:
    text = {key: value for key, value in TEXT.items() if key != name}
    with pytest.raises(UserError, match=rf"\b{name} is missing"):
        load_target_config(write_target(tmp_path, text))


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"hidden_size": "8192"}, r"hidden_size is '8192', expected a valid integer"),
        ({"num_hidden_layers": 10**9}, r"num_hidden_layers is 1000000000, expected less than or equal to 10000"),
        ({"sliding_window": 2**31}, r"sliding_window is 2147483648, expected less than 2147483648"),
        ({"head_dim": 0}, r"head_dim is 0, expected greater than 0"),
        ({"rms_norm_eps": -1e-5}, r"rms_norm_eps is -1e-05, expected greater than 0"),
        ({"attention_bias": True}, r"attention_bias is True, expected False"),
        ({"hidden_act": "gelu"}, r"hidden_act is 'gelu', expected 'silu'"),
        ({"num_shared_experts": 1}, r"num_shared_experts is 1, expected 0"),
        ({"tie_word_embeddings": True}, r"tie_word_embeddings is True, expected False"),
        ({"layer_types": ["full_attention"]}, r"layer_types has 1 entries, expected num_hidden_layers = 62"),
        ({"layer_types": ["chunked"] * 62}, r"layer_types.0 is 'chunked', expected 'sliding_attention' or 'full_att"),
        ({"mlp_layer_types": ["dense"] + ["sparse"] * 61}, r"mlp_layer_types.0 is 'dense', expected 'sparse'"),
        ({"num_key_value_heads": 24}, r"num_attention_heads is 128, expected a multiple of num_key_value_heads = 24"),
        ({"num_experts_per_tok": 257}, r"num_experts_per_tok is 257, expected at most num_local_experts = 256"),
        ({"rope_parameters": {"rope_type": "yarn"}}, r"rope_type is 'yarn', expected 'default'"),
        ({"query_temperature": 2.0}, r"query_temperature is 2.0, but this field is unknown"),
        ({"eos_token_id": 999999}, r"eos_token_id is \[999999\], expected ids below vocab_size = 202048"),
        ({"eos_token_id": None}, r"eos_token_id is \(\), expected 1 or more entries\."),
        ({"eos_token_id": [[1]]}, r"eos_token_id.0 is \[1\], expected a valid integer"),
        ({"rope_parameters": {"rope_theta": "x"}}, r"rope_parameters.rope_theta is 'x', expected a valid number"),
        ({"moe_hidden_size": 4097}, r"moe_hidden_size is 4097, expected a multiple of 16"),
        ({"final_logit_softcapping": float("inf")}, r"final_logit_softcapping is inf, expected a finite number"),
    ],
)
def test_wrong_field_says_found_and_expected(tmp_path: Path, change: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        load_target_config(write_target(tmp_path, {**TEXT, **change}))


def test_all_wrong_fields_are_listed_together(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"hidden_size is 0.*num_attention_heads is -1"):
        load_target_config(write_target(tmp_path, {**TEXT, "hidden_size": 0, "num_attention_heads": -1}))


def test_config_of_another_model_is_refused(tmp_path: Path) -> None:
    write_target(tmp_path, TEXT, architectures=["LlamaForCausalLM"])
    with pytest.raises(UserError, match=r"architectures is \['LlamaForCausalLM'\], expected \['MuseSpark"):
        load_target_config(tmp_path)
    with pytest.raises(UserError, match="expected \\['DFlash2DraftModel'\\]"):
        load_draft_config(tmp_path)


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"{", "is not JSON"),
        (b"\xff\xfe", "cannot be read"),
        (b"[]", "expected a JSON object"),
        (b"[" * 100_000, "is not JSON"),
        (b'{"a": ' + b"1" * 5000 + b"}", "is not JSON"),
        (None, "does not exist"),
    ],
)
def test_unreadable_file(tmp_path: Path, content: bytes | None, sentence: str) -> None:
    if content is not None:
        (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(UserError, match=sentence):
        load_target_config(tmp_path)


@pytest.mark.parametrize(
    ("section", "sentence"),
    [
        ({**QUANTIZATION, "quant_method": "gptq"}, "quant_method is 'gptq'"),
        ({**QUANTIZATION, "quant_algo": "FP8"}, "quant_algo is 'FP8', expected 'NVFP4'"),
        ({**QUANTIZATION, "group_size": 32}, "group_size is 32, expected 16"),
        ({key: value for key, value in QUANTIZATION.items() if key != "ignore"}, "exclude list"),
    ],
)
def test_other_quantisation_is_refused(tmp_path: Path, section: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        load_target_config(write_target(tmp_path, TEXT, quantization_config=section))


@pytest.mark.parametrize(
    ("nested", "sentence"),
    [
        ({"conv_kernel_size": 3}, "conv_kernel_size is 3, expected 2"),
        ({"conv_group_size": 24}, "conv_group_size is 24, expected a divisor"),
        ({"mask_token_id": 202048}, "mask_token_id is 202048, expected an id below"),
        ({"target_layer_ids": [1, 61]}, r"target_layer_ids is \[1, 61\], expected layers before the last"),
        ({"block_size": 17}, "block_size is 17, expected less than or equal to 16"),
        ({"attention_sink_bias": True}, "unknown fields that may change the model: attention_sink_bias"),
    ],
)
def test_wrong_draft_field(tmp_path: Path, nested: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        load_draft_config(write_draft(tmp_path, dflash_config={**DRAFT["dflash_config"], **nested}))


def test_absent_causality_means_bidirectional(tmp_path: Path) -> None:
    draft = {key: value for key, value in DRAFT.items() if key != "is_causal"}
    (tmp_path / "config.json").write_text(json.dumps(draft), encoding="utf-8")
    assert load_draft_config(tmp_path).is_causal is False


def test_pairing(tmp_path: Path) -> None:
    target: TargetConfig = load_target_config(write_target(tmp_path, TEXT))
    draft: DraftConfig = load_draft_config(write_draft(tmp_path))
    check_pair(target, draft)
    other = draft.model_copy(update={"hidden_size": 4096, "num_target_layers": 52})
    with pytest.raises(UserError, match=r"hidden_size is 4096 in the draft, expected the target's 8192; .*52"):
        check_pair(target, other)
