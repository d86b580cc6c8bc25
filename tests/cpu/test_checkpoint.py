"""Reading and writing checkpoints: round trips, one rank's share, and every refusal."""

import dataclasses
import json
import math
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from sgl_muse_mega.checkpoint import draft, shards, target, tiny
from sgl_muse_mega.checkpoint.random_weights import random_draft, random_target
from sgl_muse_mega.checkpoint.shards import INDEX, SINGLE, CheckpointReader
from sgl_muse_mega.checkpoint.weights import ConvWeights, Nvfp4Experts
from sgl_muse_mega.config import DraftConfig, TargetConfig, load_draft_config, load_target_config
from sgl_muse_mega.errors import UserError

LAYERS = "model.language_model.layers."
EXPERTS = LAYERS + "1.mlp.experts."


def target_config(quantised: bool = True, **changes) -> TargetConfig:
    """Three small layers; of a quantised one only layer 1 has NVFP4 experts."""
    fields = {
        "vocab_size": 64,
        "hidden_size": 32,
        "num_hidden_layers": 3,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5,
        "post_norm_eps": 1e-8,
        "sliding_window": 16,
        "moe_hidden_size": 32,
        "moe_intermediate_size": 48,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "routed_scaling_factor": 1.0,
        "qk_scale_factor": 5.4,
        "output_multiplier": 0.2,
        "final_logit_softcapping": 20.0,
        "residual_gate_temperature": 0.3,
        "eos_token_ids": [1],
    }
    exclude = ("*layers.0.mlp.experts*", "*layers.2.mlp.experts*", "*self_attn*", "lm_head")
    quantization = {"quant_algo": "NVFP4", "group_size": 16, "exclude": exclude} if quantised else None
    return TargetConfig.model_validate({**fields, "quantization": quantization, **changes})


def draft_config(**changes) -> DraftConfig:
    fields = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "sliding_window": 16,
        "layer_types": ["sliding_attention"] * 2,
        "is_causal": False,
        "block_size": 8,
        "conv_kernel_size": 2,
        "conv_group_size": 16,
        "selector_rank": 8,
        "selector_top_k": 4,
        "target_layer_ids": [0, 1],
        "mask_token_id": 63,
        "output_multiplier": 0.2,
        "final_logit_softcapping": 20.0,
        "num_target_layers": 3,
    }
    return DraftConfig.model_validate({**fields, **changes})


def tensors(container, prefix: str = "") -> dict[str, torch.Tensor]:
    """Every tensor of a weight container by its path."""
    found = {}
    for field in dataclasses.fields(container):
        value = getattr(container, field.name)
        if isinstance(value, torch.Tensor):
            found[prefix + field.name] = value
        elif isinstance(value, Nvfp4Experts | ConvWeights):
            found |= tensors(value, f"{prefix}{field.name}.")
        elif isinstance(value, tuple):
            for i, layer in enumerate(value):
                found |= tensors(layer, f"{prefix}{field.name}.{i}.")
    return found


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal dtype, shape and bits."""
    a, b = a.contiguous(), b.contiguous()
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def assert_same(found, expected) -> None:
    found, expected = tensors(found), tensors(expected)
    assert found.keys() == expected.keys()
    assert [name for name in found if not same(found[name], expected[name])] == []


def saved_target(folder: Path, quantised: bool = True, **options) -> TargetConfig:
    config = target_config(quantised)
    target.save_target(folder, config, random_target(config, seed=1), **options)
    return config


def edit(folder: Path, change) -> None:
    """Rewrites the single file of a checkpoint after `change(tensors)`."""
    content = {name: tensor.clone() for name, tensor in load_file(folder / SINGLE).items()}
    change(content)
    (folder / SINGLE).unlink()  # the old file may still be mapped
    save_file(content, folder / SINGLE)


def refusal(action) -> str:
    with pytest.raises(UserError) as caught:
        action()
    text = str(caught.value)
    assert "\n" not in text
    assert len(text) < 700
    assert text.endswith(".")
    return text


# --- round trips ---


@pytest.mark.parametrize("quantised", [False, True])
@pytest.mark.parametrize("max_shard_bytes", [10**9, 20000])
def test_target_round_trip(tmp_path, quantised, max_shard_bytes):
    config = target_config(quantised)
    weights = random_target(config, seed=3)
    target.save_target(tmp_path, config, weights, max_shard_bytes=max_shard_bytes)
    assert load_target_config(tmp_path) == config
    assert (tmp_path / INDEX).exists() == (max_shard_bytes < 10**9)
    loaded = target.load_target(tmp_path, config)
    assert_same(loaded, weights)
    assert [isinstance(layer.gate_up_proj, Nvfp4Experts) for layer in loaded.layers] == [False, quantised, False]


def test_names_and_stored_forms_are_those_of_the_specification(tmp_path):
    saved_target(tmp_path)
    content = load_file(tmp_path / SINGLE)
    assert len(content) == 3 + 3 * 18 + 6
    assert content["lm_head.weight"].shape == (64, 32)
    shapes = {name.removeprefix(EXPERTS): (tuple(t.shape), t.dtype) for name, t in content.items() if EXPERTS in name}
    assert shapes == {
        "gate_up_proj": ((8, 96, 16), torch.uint8),
        "gate_up_proj_weight_scale": ((8, 96, 2), torch.float8_e4m3fn),
        "gate_up_proj_weight_scale_2": ((8, 2), torch.float32),
        "gate_up_proj_input_scale": ((8, 2), torch.float32),
        "down_proj": ((8, 32, 24), torch.uint8),
        "down_proj_weight_scale": ((8, 32, 3), torch.float8_e4m3fn),
        "down_proj_weight_scale_2": ((8,), torch.float32),
        "down_proj_input_scale": ((8,), torch.float32),
        "post_expert_norm.weight": ((32,), torch.bfloat16),
    }
    assert content[LAYERS + "2.mlp.gate.e_score_correction_bias"].dtype == torch.float32


QUERY_ROWS, KV_ROWS = ("q_proj", "gate_proj"), ("k_proj", "v_proj")
SPLIT_ROWS = ("embed_tokens", "lm_head", "gate_up_proj", "down_proj", "pre_expert_proj", "post_expert_proj")


@pytest.mark.parametrize("quantised", [False, True])
@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_shares_of_all_ranks_concatenate_to_the_whole(tmp_path, quantised, ranks):
    config = saved_target(tmp_path, quantised, max_shard_bytes=20000)
    whole = tensors(target.load_target(tmp_path, config))
    loaded = [target.load_target(tmp_path, config, rank=r, ranks=ranks) for r in range(ranks)]
    assert [share.layers[1].first_expert for share in loaded] == [r * 8 // ranks for r in range(ranks)]
    shares = [tensors(share) for share in loaded]
    copies = max(1, ranks // config.num_key_value_heads)
    for name, expected in whole.items():
        field = name.split(".")[2] if name.startswith("layers.") else name
        parts = [share[name] for share in shares]
        assert all(part.is_contiguous() for part in parts)
        if field in QUERY_ROWS or field in SPLIT_ROWS:
            found = torch.cat([part.view(torch.uint8) for part in parts]).view(expected.dtype)
        elif field in KV_ROWS:
            assert all(same(parts[r], parts[r - r % copies]) for r in range(ranks))
            found = torch.cat(parts[::copies])
        elif field == "o_proj":
            found = torch.cat(parts, dim=1)
        else:
            assert all(same(part, expected) for part in parts)
            found = parts[0]
        assert same(found, expected), name


@pytest.mark.parametrize("quantised", [False, True])
def test_shares_of_loaded_weights_are_those_that_are_loaded(tmp_path, quantised):
    config = saved_target(tmp_path, quantised)
    whole = target.load_target(tmp_path, config)
    for rank, ranks in ((0, 1), (1, 2), (2, 4), (7, 8)):
        assert_same(
            target.share_target(config, whole, rank=rank, ranks=ranks),
            target.load_target(tmp_path, config, rank=rank, ranks=ranks),
        )


def test_a_rank_holds_the_kv_head_its_queries_use(tmp_path):
    config = saved_target(tmp_path)
    whole = target.load_target(tmp_path, config).layers[0]
    for ranks in (2, 4, 8):
        for rank in range(ranks):
            share = target.load_target(tmp_path, config, rank=rank, ranks=ranks).layers[0]
            heads = config.num_attention_heads // ranks
            first_kv = rank * heads // (config.num_attention_heads // config.num_key_value_heads)
            assert same(share.k_proj[:8], whole.k_proj[8 * first_kv : 8 * first_kv + 8])


def test_experts_stored_one_by_one_load_like_stacked_ones(tmp_path):
    config = saved_target(tmp_path / "stacked", quantised=False)
    expected = target.load_target(tmp_path / "stacked", config, rank=1, ranks=2)
    content = load_file(tmp_path / "stacked" / SINGLE)
    for layer in (0, 2):
        base = f"{LAYERS}{layer}.mlp.experts."
        gate_up, down = content.pop(base + "gate_up_proj"), content.pop(base + "down_proj")
        for e in range(8):
            content[f"{base}{e}.gate_proj.weight"] = gate_up[e, :48].clone()
            content[f"{base}{e}.up_proj.weight"] = gate_up[e, 48:].clone()
            content[f"{base}{e}.down_proj.weight"] = down[e].clone()
    (tmp_path / "single").mkdir()
    save_file(content, tmp_path / "single" / SINGLE)
    assert_same(target.load_target(tmp_path / "single", config, rank=1, ranks=2), expected)
    del content[LAYERS + "2.mlp.experts.5.up_proj.weight"]
    save_file(content, tmp_path / "single" / SINGLE)
    message = refusal(lambda: target.load_target(tmp_path / "single", config))
    assert "1 missing tensor: model.language_model.layers.2.mlp.experts.5.up_proj.weight" in message


@pytest.mark.parametrize("mask", [False, True])
@pytest.mark.parametrize("prefix", ["", "model."])
def test_draft_round_trip(tmp_path, mask, prefix):
    config = draft_config()
    weights = random_draft(config, seed=5)
    if mask:
        weights = dataclasses.replace(weights, mask_embedding=torch.randn(32).bfloat16())
    draft.save_draft(tmp_path, config, weights)
    assert load_draft_config(tmp_path) == config
    content = load_file(tmp_path / SINGLE)
    assert len(content) == 15 * 2 + 6
    assert "candidate_selector.predecessor_codebook" in content
    assert content["layers.1.attention_conv.kernel_projection.weight"].shape == (8, 32)
    edit(tmp_path, lambda held: [held.update({prefix + name: held.pop(name)}) for name in content])
    assert_same(draft.load_draft(tmp_path, config), weights)


def test_saving_again_replaces_the_old_checkpoint_and_its_mask(tmp_path):
    config = draft_config()
    old = dataclasses.replace(random_draft(config, seed=1), mask_embedding=torch.ones(32).bfloat16())
    draft.save_draft(tmp_path, config, old, max_shard_bytes=5000)
    (tmp_path / "tokenizer.json").write_text("{}")
    assert len(list(tmp_path.glob("model-*"))) > 2
    new = random_draft(config, seed=2)
    draft.save_draft(tmp_path, config, new)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", SINGLE, "tokenizer.json"]
    assert_same(draft.load_draft(tmp_path, config), new)


def test_ignored_tensors_are_ignored(tmp_path):
    config = saved_target(tmp_path)
    text, layer = "model.language_model.", LAYERS + "1."
    names = [
        *("model.vision_tower.blocks.0.weight", "model.vision_adapter.x", "model.vision_projection.y"),
        *("model.audio_tower.z", text + "rotary_emb.inv_freq", text + "embed_norm.weight"),
        *(layer + "self_attn.rotary_emb.inv_freq", layer + "mlp.num_tokens_per_expert", layer + "mlp.norm_weight"),
        *(layer + "self_attn.q_scale", layer + "self_attn.k_scale", layer + "self_attn.v_scale"),
    ]
    edit(tmp_path, lambda content: content.update({name: torch.ones(2) for name in names}))
    assert_same(target.load_target(tmp_path, config), random_target(config, seed=1))


# --- shards ---


names_and_sizes = st.dictionaries(st.text("abc.", min_size=1, max_size=6), st.integers(0, 50), min_size=1, max_size=12)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(names_and_sizes, st.integers(1, 300), st.data())
def test_shards_hold_everything_within_their_size(tmp_path_factory, sizes, max_bytes, data):
    folder = tmp_path_factory.mktemp("shards")
    content = {name: torch.arange(size, dtype=torch.float32) for name, size in sizes.items()}
    with shards.staged(folder) as stage:
        shards.write_shards(stage, content.items(), max_bytes)
    with CheckpointReader(folder) as reader:
        assert set(reader) == set(content)
        for name, tensor in content.items():
            assert same(reader.read(name), tensor)
        name = data.draw(st.sampled_from(sorted(sizes)))
        a, b = sorted(data.draw(st.tuples(st.integers(0, sizes[name]), st.integers(0, sizes[name]))))
        assert same(reader.read(name, (slice(a, b),)), content[name][a:b])
    for file in folder.glob("model-*"):
        held = load_file(file)
        assert len(held) == 1 or sum(t.nbytes for t in held.values()) <= max_bytes


def test_read_tensors_outlive_the_file(tmp_path):
    with shards.staged(tmp_path) as stage:
        shards.write_shards(stage, [("a", torch.arange(4000.0))], 10**6)
    with CheckpointReader(tmp_path) as reader:
        whole, part = reader.read("a"), reader.read("a", (slice(1000, 3000),))
    (tmp_path / SINGLE).write_bytes(b"")
    assert torch.equal(whole[1000:3000], part)
    assert part[0] == 1000


def test_views_of_one_storage_can_be_written(tmp_path):
    base = torch.arange(12.0).reshape(3, 4)
    content = {"a": base, "b": base[1], "c": base.T, "d": base[1:]}
    with shards.staged(tmp_path) as stage:
        shards.write_shards(stage, content.items(), 10**6)
    assert all(same(tensor, content[name]) for name, tensor in load_file(tmp_path / SINGLE).items())


def test_a_failed_save_leaves_the_old_checkpoint_alone(tmp_path):
    config = saved_target(tmp_path, max_shard_bytes=20000)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    weights = random_target(config, seed=9)
    wrong = dataclasses.replace(weights, norm=weights.norm.float())
    with pytest.raises(ValueError, match=r"norm\.weight has shape \[32\] and dtype torch\.float32"):
        target.save_target(tmp_path, config, wrong, max_shard_bytes=20000)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    share = target.load_target(tmp_path, config, rank=0, ranks=2)
    with pytest.raises(ValueError, match=r"embed_tokens\.weight has shape \[32, 32\]"):
        target.save_target(tmp_path / "new", config, share)
    assert list((tmp_path / "new").iterdir()) == []
    with pytest.raises(ValueError, match="form"):
        target.save_target(tmp_path / "new", target_config(quantised=False), weights)


def test_an_unwritable_place_is_one_sentence(tmp_path):
    (tmp_path / "file").write_text("")
    config = draft_config()
    message = refusal(lambda: draft.save_draft(tmp_path / "file", config, random_draft(config, seed=1)))
    assert "cannot be written" in message


def test_writing_a_name_twice_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="a is written twice"), shards.staged(tmp_path) as stage:
        shards.write_shards(stage, [("a", torch.ones(1)), ("a", torch.ones(1))], 10**6)
    assert list(tmp_path.iterdir()) == []


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
