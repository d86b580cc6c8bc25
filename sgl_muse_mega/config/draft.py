"""Configuration of a DFlash2 draft (model specification, section 6)."""

from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from sgl_muse_mega.config.fields import Positive, Size, TokenId, Validated, Window

DRAFT_ARCHITECTURE = "DFlash2DraftModel"

DFLASH_FIELDS = frozenset(
    [
        "block_size",
        "conv_kernel_size",
        "conv_group_size",
        "selector_rank",
        "selector_top_k",
        "target_layer_ids",
        "mask_token_id",
        "output_multiplier",
        "final_logit_softcapping",
        "num_target_layers",
        "input_embedding_scale",
        "normed_embedding",
    ]
)


class DraftConfig(Validated):
    """A DFlash2 draft (specification section 6)."""

    model_type: Literal["qwen3"] = "qwen3"
    vocab_size: Size
    hidden_size: Size
    intermediate_size: Size
    num_hidden_layers: Size
    num_attention_heads: Size
    num_key_value_heads: Size
    head_dim: Annotated[int, Field(gt=0, multiple_of=2)]
    max_position_embeddings: Size
    rms_norm_eps: Positive
    rope_theta: Positive
    sliding_window: Window
    layer_types: tuple[Literal["sliding_attention"], ...]
    is_causal: bool = False  # D-17
    block_size: Annotated[int, Field(ge=2, le=16)]
    conv_kernel_size: Literal[2]
    conv_group_size: Size
    selector_rank: Size
    selector_top_k: Size
    target_layer_ids: Annotated[tuple[Annotated[int, Field(ge=0)], ...], Field(min_length=1)]
    mask_token_id: TokenId
    output_multiplier: Positive
    final_logit_softcapping: Positive
    num_target_layers: Size
    input_embedding_scale: Positive = 1.0
    normed_embedding: bool = True  # D-16: whether block rows enter as the target's normed embedding or as the raw row
    use_sliding_window: Literal[True] = True
    attention_bias: Literal[False] = False
    hidden_act: Literal["silu"] = "silu"
    tie_word_embeddings: bool = False

    @field_validator("layer_types", "target_layer_ids", mode="before")
    @classmethod
    def _as_tuple(cls, value: Any) -> Any:
        return tuple(value) if isinstance(value, list) else value

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if len(self.layer_types) != self.num_hidden_layers:
            raise ValueError(
                f"layer_types has {len(self.layer_types)} entries, expected num_hidden_layers = "
                f"{self.num_hidden_layers}"
            )
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads is {self.num_attention_heads}, expected a multiple of num_key_value_heads = "
                f"{self.num_key_value_heads}"
            )
        if self.hidden_size % self.conv_group_size:
            raise ValueError(
                f"conv_group_size is {self.conv_group_size}, expected a divisor of hidden_size = {self.hidden_size}"
            )
        if max(self.target_layer_ids) >= self.num_target_layers - 1:
            raise ValueError(
                f"target_layer_ids is {list(self.target_layer_ids)}, expected layers before the last of "
                f"num_target_layers = {self.num_target_layers}"
            )
        if self.mask_token_id >= self.vocab_size:
            raise ValueError(
                f"mask_token_id is {self.mask_token_id}, expected an id below vocab_size = {self.vocab_size}"
            )
        if self.selector_top_k > self.vocab_size:
            raise ValueError(f"selector_top_k is {self.selector_top_k}, expected at most vocab_size {self.vocab_size}")
        return self

    def to_hf(self) -> dict[str, Any]:
        """Content of a `config.json` that `load_draft_config` reads back to an equal configuration."""
        flat = self.model_dump(mode="json")
        nested = {name: flat.pop(name) for name in sorted(DFLASH_FIELDS) if name in flat}
        return {
            "architectures": [DRAFT_ARCHITECTURE],
            "dtype": "bfloat16",
            **flat,
            "block_size": self.block_size,
            "num_target_layers": self.num_target_layers,
            "dflash_config": nested,
        }
