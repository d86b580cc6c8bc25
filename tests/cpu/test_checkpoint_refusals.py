"""Checkpoints that are refused, each in one sentence."""

import json
import math
from pathlib import Path

import pytest
import torch
from checkpoint_case import EXPERTS, LAYERS, draft_config, edit, refusal, same, saved_target, target_config
from safetensors.torch import load_file, save_file

from sgl_muse_mega.checkpoint import draft, target, tiny
from sgl_muse_mega.checkpoint.random_weights import random_draft
from sgl_muse_mega.checkpoint.shards import INDEX

# --- refusals of the folder ---


def test_a_folder_without_weights_is_not_a_checkpoint(tmp_path):
    for folder in (tmp_path, tmp_path / "absent"):
        message = refusal(lambda folder=folder: target.load_target(folder, target_config()))
        assert f"{folder} is not a checkpoint folder" in message


@pytest.mark.parametrize("keep", [0, 5, 100, 0.5, -1])
def test_a_truncated_shard_is_refused_by_name(tmp_path, keep):
    config = saved_target(tmp_path, max_shard_bytes=20000)
    victim = sorted(tmp_path.glob("model-*"))[1]
    content = victim.read_bytes()
    victim.write_bytes(content[: int(keep * len(content)) if isinstance(keep, float) else keep])
    message = refusal(lambda: target.load_target(tmp_path, config))
    assert str(victim) in message
    assert "truncated" in message


def change_index(folder: Path, change) -> None:
    index = json.loads((folder / INDEX).read_text())
    change(index)
    (folder / INDEX).write_text(json.dumps(index))


def test_a_missing_index_entry_is_refused(tmp_path):
    config = saved_target(tmp_path, max_shard_bytes=20000)
    change_index(tmp_path, lambda index: index["weight_map"].pop("lm_head.weight"))
    message = refusal(lambda: target.load_target(tmp_path, config))
    assert "does not list lm_head.weight" in message


def test_an_index_naming_a_missing_file_is_refused(tmp_path):
    config = saved_target(tmp_path, max_shard_bytes=20000)
    victim = sorted(tmp_path.glob("model-*"))[-1]
    victim.unlink()
    message = refusal(lambda: target.load_target(tmp_path, config))
    assert f"names {victim.name}, which does not exist" in message


def test_an_index_pointing_to_the_wrong_shard_is_refused(tmp_path):
    config = saved_target(tmp_path, max_shard_bytes=20000)
    files = sorted(path.name for path in tmp_path.glob("model-*"))
    change_index(tmp_path, lambda index: index["weight_map"].update({"lm_head.weight": files[0]}))
    message = refusal(lambda: target.load_target(tmp_path, config))
    assert f"its shards lack lm_head.weight (in {files[0]})" in message


def test_a_duplicate_tensor_is_refused(tmp_path):
    config = saved_target(tmp_path, max_shard_bytes=20000)
    first = sorted(tmp_path.glob("model-*"))[0]
    content = {name: tensor.clone() for name, tensor in load_file(first).items()}
    first.unlink()
    save_file({**content, "lm_head.weight": torch.ones(64, 32).bfloat16()}, first)
    assert "duplicates of lm_head.weight" in refusal(lambda: target.load_target(tmp_path, config))
    text = (tmp_path / INDEX).read_text()
    (tmp_path / INDEX).write_text(
        text.replace('"weight_map": {', '"weight_map": {"lm_head.weight": "x.safetensors",', 1)
    )
    assert "lm_head.weight is listed twice" in refusal(lambda: target.load_target(tmp_path, config))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "\x00\xff",
        "[]",
        "{}",
        '{"weight_map": []}',
        '{"weight_map": {"a": 1}}',
        '{"weight_map": {"a": "../a"}}',
        '{"weight_map": {"a": ""}}',
        "[" * 100_000,
    ],
)
def test_a_broken_index_is_refused(tmp_path, text):
    (tmp_path / INDEX).write_bytes(text.encode("latin-1"))
    assert INDEX in refusal(lambda: target.load_target(tmp_path, target_config()))


# --- refusals of the content ---


def test_an_extra_tensor_is_refused(tmp_path):
    config = saved_target(tmp_path)
    extra = [f"{LAYERS}1.mlp.shared_expert.{i}.weight" for i in range(9)]
    edit(tmp_path, lambda content: content.update({name: torch.ones(2) for name in extra}))
    message = refusal(lambda: target.load_target(tmp_path, config))
    assert f"9 unknown tensors: {extra[0]}, " in message
    assert "and 5 more" in message
    assert extra[8] not in message


def test_missing_tensors_are_refused(tmp_path):
    config = saved_target(tmp_path)
    edit(tmp_path, lambda content: content.pop(LAYERS + "2.self_attn.gate_proj.weight"))
    assert "1 missing tensor: model.language_model.layers.2.self_attn.gate_proj.weight" in refusal(
        lambda: target.load_target(tmp_path, config)
    )


def test_a_layer_beyond_the_configuration_is_refused(tmp_path):
    saved_target(tmp_path)
    shorter = target_config(num_hidden_layers=2)
    assert "layers.2." in refusal(lambda: target.load_target(tmp_path, shorter))


@pytest.mark.parametrize(
    ("name", "tensor", "expected"),
    [
        ("lm_head.weight", torch.ones(64, 31).bfloat16(), "lm_head.weight has shape [64, 31], expected [64, 32]"),
        ("lm_head.weight", torch.ones(64, 32).half(), "lm_head.weight has dtype F16, expected BF16"),
        (LAYERS + "0.mlp.gate.weight", torch.ones(8, 32).bfloat16(), "mlp.gate.weight has dtype BF16, expected F32"),
        (
            LAYERS + "2.post_feedforward_residual_gate.gate",
            torch.ones(32).bfloat16(),
            "residual_gate.gate has dtype BF16, expected F32",
        ),
        (LAYERS + "0.mlp.gate.e_score_correction_bias", torch.ones(8).bfloat16(), "has dtype BF16, expected F32"),
        (EXPERTS + "gate_up_proj_weight_scale", torch.ones(8, 96, 2), "has dtype F32, expected F8_E4M3"),
        (EXPERTS + "down_proj_weight_scale_2", torch.ones(8, 1), "has shape [8, 1], expected [8]"),
        (EXPERTS + "gate_up_proj_weight_scale_2", torch.ones(8), "has shape [8], expected [8, 2]"),
    ],
)
def test_wrong_shape_or_dtype_is_refused(tmp_path, name, tensor, expected):
    config = saved_target(tmp_path)
    edit(tmp_path, lambda content: content.update({name: tensor}))
    assert expected in refusal(lambda: target.load_target(tmp_path, config))


def test_stored_form_against_the_quantisation_config_is_refused(tmp_path):
    for quantised in (False, True):
        saved_target(tmp_path / str(quantised), quantised)
    message = refusal(lambda: target.load_target(tmp_path / "False", target_config(True)))
    assert "Layer 1 has NVFP4 experts by the quantisation config, but" in message
    assert "stored as BF16" in message
    message = refusal(lambda: target.load_target(tmp_path / "True", target_config(False)))
    assert "Layer 1 has BF16 experts by the quantisation config, but" in message
    assert "stored as U8" in message


def poison(name: str, index: tuple[int, ...], value: int | float):
    def change(content):
        tensor = content[name]
        (tensor.view(torch.uint8) if tensor.dtype == torch.float8_e4m3fn else tensor)[index] = value

    return change


@pytest.mark.parametrize(
    ("suffix", "index", "value", "kind"),
    [
        ("gate_up_proj_weight_scale", (6, 3, 1), 0x7F, "NaN"),
        ("down_proj_weight_scale", (6, 3, 1), 0x81, "negative"),
        ("gate_up_proj_weight_scale_2", (6, 1), math.nan, "NaN"),
        ("down_proj_weight_scale_2", (6,), -1.0, "negative"),
        ("down_proj_weight_scale_2", (6,), math.inf, "infinite"),
    ],
)
def test_bad_scales_are_refused_by_name_on_the_rank_that_holds_them(tmp_path, suffix, index, value, kind):
    config = saved_target(tmp_path)
    edit(tmp_path, poison(EXPERTS + suffix, index, value))
    for rank, ranks in ((0, 1), (1, 2), (3, 4)):
        message = refusal(lambda rank=rank, ranks=ranks: target.load_target(tmp_path, config, rank=rank, ranks=ranks))
        assert f"{EXPERTS}{suffix} holds 1 {kind} scale" in message
    target.load_target(tmp_path, config, rank=0, ranks=2)


@pytest.mark.parametrize(("ranks", "reason"), [(3, "num_attention_heads = 8"), (16, "num_local_experts = 8")])
def test_a_model_that_does_not_divide_is_refused(tmp_path, ranks, reason):
    config = saved_target(tmp_path)
    message = refusal(lambda: target.load_target(tmp_path, config, ranks=ranks))
    assert f"does not divide among {ranks} ranks" in message
    assert reason in message


def test_kv_heads_that_neither_divide_nor_repeat_are_refused(tmp_path):
    config = target_config(num_attention_heads=12, num_key_value_heads=6, num_local_experts=8)
    message = refusal(lambda: target.load_target(tmp_path, config, ranks=4))
    assert message.startswith("The model does not divide among 4 ranks: num_key_value_heads = 6;")


# --- the draft ---


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda c: c.pop("fc.weight"), "1 missing tensor: fc.weight"),
        (lambda c: c.update({"fc.weight": torch.ones(32, 32).bfloat16()}), "has shape [32, 32], expected [32, 64]"),
        (lambda c: c.update({"norm.weight": torch.ones(32)}), "norm.weight has dtype F32, expected BF16"),
        (lambda c: c.update({"lm_head.weight": torch.ones(2)}), "1 unknown tensor: lm_head.weight"),
        (lambda c: c.update({"model.norm.weight": c["norm.weight"].clone()}), "1 unknown tensor: model.norm.weight"),
    ],
)
def test_draft_content_is_checked(tmp_path, change, expected):
    config = draft_config()
    draft.save_draft(tmp_path, config, random_draft(config, seed=1))
    edit(tmp_path, change)
    assert expected in refusal(lambda: draft.load_draft(tmp_path, config))


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ({"embedding": torch.ones(32), "mask_token_id": 7}, "is for mask_token_id 7, but"),
        ({"embedding": torch.ones(32)}, "is for mask_token_id None, but"),
        ({"embedding": torch.ones(31), "mask_token_id": 63}, "shape [31], expected hidden_size = 32"),
        ({"mask_token_id": 63}, "no tensor named embedding"),
        ([1], "no tensor named embedding"),
        (Path("/"), "damaged or holds more than tensors"),
        (b"\x80\x02garbage", "damaged or holds more than tensors"),
        (b"", "damaged or holds more than tensors"),
    ],
)
def test_a_mask_embedding_that_does_not_fit_is_refused(tmp_path, content, expected):
    config = draft_config()
    draft.save_draft(tmp_path, config, random_draft(config, seed=1))
    path = tmp_path / draft.MASK_EMBEDDING
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        torch.save(content, path)
    message = refusal(lambda: draft.load_draft(tmp_path, config))
    assert str(path) in message
    assert expected in message


def test_a_mask_embedding_row_of_any_float_type_is_taken(tmp_path):
    config = draft_config()
    draft.save_draft(tmp_path, config, random_draft(config, seed=1))
    torch.save({"embedding": torch.arange(32.0)[None], "mask_token_id": 63}, tmp_path / draft.MASK_EMBEDDING)
    assert same(draft.load_draft(tmp_path, config).mask_embedding, torch.arange(32.0).bfloat16())


# --- the bundled pair ---


def test_a_missing_bundled_pair_is_one_sentence(tmp_path, monkeypatch):
    monkeypatch.setattr(tiny, "_ROOT", tmp_path)
    for find in (tiny.target_directory, tiny.draft_directory, tiny.problems_path):
        assert str(tmp_path) in refusal(find)
    (tmp_path / "target").mkdir()
    (tmp_path / "target" / "config.json").write_text("{}")
    (tmp_path / "problems.jsonl").write_text("")
    assert tiny.target_directory() == tmp_path / "target"
    assert tiny.problems_path() == tmp_path / "problems.jsonl"
