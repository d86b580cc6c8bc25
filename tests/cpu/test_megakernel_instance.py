"""Instances: what fits the kernels, tilings, and the shared-memory map."""

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sgl_muse_mega.errors import UserError
from sgl_muse_mega.megakernel.instance import HOPPER_SHARED_BYTES, Instance
from sgl_muse_mega.megakernel.random_step import spark_config, tiny_config
from sgl_muse_mega.megakernel.tiling import padded_rows


def spark(**changes: object) -> Instance:
    instance = Instance.for_config(spark_config(), nvfp4=True, fp8_cache=True, row_cap=8, sms=132, local_experts=64)
    return dataclasses.replace(instance, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize("nvfp4", [True, False])
@pytest.mark.parametrize("row_cap", [8, 16])
def test_full_size_fits_shared_memory_with_a_deep_ring(nvfp4: bool, row_cap: int) -> None:
    instance = spark(nvfp4=nvfp4, row_cap=row_cap)
    instance.check()
    assert instance.shared_offsets["SHARED_BYTES"] <= HOPPER_SHARED_BYTES
    assert instance.stages * instance.stage_bytes >= 150 * 1024


def test_order_of_sums_does_not_depend_on_the_row_capacity() -> None:
    """A row of a step of 8 must have the bits of the same row in a step of 16."""
    eight, sixteen = spark(row_cap=8), spark(row_cap=16)
    assert eight.gate_up_tiles == sixteen.gate_up_tiles
    assert eight.down_tiles == sixteen.down_tiles
    assert (eight.gate_up_tiles.k_parts, eight.down_tiles.k_parts) == (4, 8)  # every math warp has a share
    for a, b in zip(eight.dense_products, sixteen.dense_products, strict=True):
        assert a == b


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"head_dim": 128}, "head_dim is 128"),
        ({"hidden": 8200}, "hidden_size 8200"),
        ({"moe_inter": 96}, "moe_intermediate_size 96"),
        ({"moe_hidden": 100}, "moe_hidden_size 100"),
        ({"row_cap": 12}, "row capacity is 12"),
        ({"kv_heads": 5}, "KV heads"),
        ({"experts": 258}, "258 experts"),
    ],
)
def test_sizes_that_do_not_fit_are_refused_with_the_reason(changes: dict[str, object], words: str) -> None:
    with pytest.raises(UserError, match=words):
        spark(**changes).check()


def test_all_reasons_are_in_one_sentence() -> None:
    with pytest.raises(UserError) as caught:
        spark(head_dim=128, hidden=8200).check()
    assert "head_dim is 128" in str(caught.value)
    assert "hidden_size 8200" in str(caught.value)


@settings(deadline=None)
@given(st.integers(1, 64), st.integers(1, 64), st.sampled_from((8, 16)))
def test_every_multiple_of_64_has_a_tiling(latent: int, inner: int, row_cap: int) -> None:
    instance = spark(moe_hidden=64 * latent, moe_inter=64 * inner, row_cap=row_cap)
    instance.check()
    for tiles, n_tiles, k, segments in (
        (instance.gate_up_tiles, 2 * inner, 64 * latent, 2),
        (instance.down_tiles, latent, 64 * inner, 1),
    ):
        assert n_tiles % tiles.tiles == 0
        assert tiles.tiles % segments == 0
        assert (k // 16) % (tiles.steps * tiles.boxes) == 0
        assert tiles.steps == 2 * tiles.k_parts
        assert tiles.tiles * tiles.k_parts <= instance.math_warps
        assert tiles.boxes * tiles.box_bytes <= instance.stage_weight_bytes
        assert padded_rows(row_cap, tiles.steps * 32) <= instance.stage_token_bytes


@given(st.integers(1, 64), st.sampled_from((128, 256, 512)))
def test_padded_rows_end_where_the_last_row_ends(rows: int, row_bytes: int) -> None:
    def offset(row: int) -> int:  # ring.cuh, row_offset
        return (row >> 1) * (2 * row_bytes + 64) + (row & 1) * (row_bytes + 64)

    ends = [offset(row) + row_bytes for row in range(rows)]
    starts = [offset(row) for row in range(1, rows)]
    assert all(end <= start for end, start in zip(ends, starts, strict=False))
    assert ends[-1] <= padded_rows(rows, row_bytes)
    assert all(offset(row) % 16 == 0 for row in range(rows))
    # two neighbouring rows lie half a bank line apart
    assert all((offset(row + 1) - offset(row)) % 128 == 64 for row in range(0, rows - 1, 2))


def test_header_carries_every_size_once() -> None:
    text = Instance.for_config(tiny_config(), nvfp4=True, fp8_cache=False, row_cap=8, sms=4).header()
    names = [line.split()[2] for line in text.splitlines() if line.startswith("constexpr")]
    assert len(names) == len(set(names))
    assert "constexpr int HIDDEN = 256;" in text
