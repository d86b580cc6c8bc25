"""Reading and writing checkpoints: round trips, one rank's share, shards."""

import dataclasses

import pytest
import torch
from checkpoint_case import (
    EXPERTS,
    LAYERS,
    assert_same,
    draft_config,
    edit,
    refusal,
    same,
    saved_target,
    target_config,
    tensors,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from sgl_muse_mega.checkpoint import draft, shards, target
from sgl_muse_mega.checkpoint.random_weights import random_draft, random_target
from sgl_muse_mega.checkpoint.shards import INDEX, SINGLE, CheckpointReader
from sgl_muse_mega.checkpoint.weights import Nvfp4Experts
from sgl_muse_mega.config import load_draft_config, load_target_config

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
