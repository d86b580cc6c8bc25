"""Configuration of the target, the text part of Muse Spark (model specification, section 1).

Every field of that section is a field here or pinned to the one value this package implements; an unknown field is
refused, because it may change the arithmetic. Attribute names are the checkpoint's.
"""

import math
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from sgl_muse_mega.config.fields import Positive, Size, TokenId, Validated, Window

TARGET_ARCHITECTURE = "MuseSparkForConditionalGeneration"

MAX_LAYERS = 10_000
"""More is a damaged file, and its lists of layers would fill the memory before they could be refused."""

LayerType = Literal["sliding_attention", "full_attention"]


class RopeParameters(Validated):
    """Rotary embedding of the sliding layers; only the unscaled form exists for this model."""

    rope_type: Literal["default"] = "default"
    rope_theta: Positive = 500000.0


class QuantizationConfig(Validated):
    """What a ModelOpt export says about quantised modules (specification section 3.2)."""

    quant_algo: Literal["NVFP4"]
    group_size: Literal[16]
    exclude: tuple[str, ...]

    def quantises(self, module: str) -> bool:
        """Whether `module` (full dotted name) is quantised: no entry of the exclude list names it, as a pattern or as
        the path of a module round it or inside it, with or without the wrapper's prefix, nor matches one of its parts.
        """
        names = {module, module.removeprefix("model."), module.removeprefix("model.language_model.")}
        paths = {f"{name}." for name in names}
        names.update(module.split("."))
        return not any(
            any(fnmatchcase(name, entry) for name in names)
            or any(path.startswith(f"{entry}.") or entry.startswith(path) for path in paths)
            for entry in self.exclude
        )


class TargetConfig(Validated):
    """The text part of Muse Spark (specification section 1)."""

    model_type: Literal["muse_spark_text"] = "muse_spark_text"
    vocab_size: Size
    hidden_size: Size
    num_hidden_layers: Annotated[int, Field(gt=0, le=MAX_LAYERS)]
    num_attention_heads: Size
    num_key_value_heads: Size
    head_dim: Annotated[int, Field(gt=0, multiple_of=2)]
    max_position_embeddings: Size
    rms_norm_eps: Positive
    post_norm_eps: Positive
    sliding_window: Window
    layer_types: tuple[LayerType, ...]
    layer_rope_theta: tuple[Annotated[float, Field(ge=0, allow_inf_nan=False)], ...]
    rope_parameters: RopeParameters = RopeParameters()
    mlp_layer_types: tuple[Literal["sparse"], ...]
    moe_hidden_size: Annotated[int, Field(gt=0, multiple_of=16)]
    moe_intermediate_size: Annotated[int, Field(gt=0, multiple_of=16)]
    num_local_experts: Size
    num_experts_per_tok: Size
    num_shared_experts: Literal[0] = 0
    routed_scaling_factor: Positive
    qk_scale_factor: Positive
    output_multiplier: Positive
    final_logit_softcapping: Positive
    residual_gate_temperature: Positive
    bos_token_id: TokenId | None = None
    eos_token_ids: Annotated[tuple[TokenId, ...], Field(min_length=1)]
    pad_token_id: TokenId | None = None
    attention_bias: Literal[False] = False
    hidden_act: Literal["silu"] = "silu"
    tie_word_embeddings: Literal[False] = False
    intermediate_size: Size | None = None  # width of a dense MLP; no layer has one
    quantization: QuantizationConfig | None = None

    @model_validator(mode="before")
    @classmethod
    def _derive_lists(cls, data: Any) -> Any:
        """Fills absent per-layer lists by the formula of section 1 (servers disagree on other defaults, D-15)."""
        layers = data.get("num_hidden_layers")
        if not isinstance(layers, int) or layers > MAX_LAYERS:
            return data
        full = [(layers - 1 - i) % 4 == 0 for i in range(layers)]
        rope = data.get("rope_parameters")
        theta = rope.get("rope_theta") if isinstance(rope, Mapping) else None
        base = theta if isinstance(theta, int | float) else 500000.0  # anything else is refused as a field
        derived = {
            "layer_types": tuple("full_attention" if f else "sliding_attention" for f in full),
            "layer_rope_theta": tuple(0.0 if f else base for f in full),
            "mlp_layer_types": ("sparse",) * layers,
        }
        return {**derived, **{k: v for k, v in data.items() if v is not None or k not in derived}}

    @field_validator("layer_types", "layer_rope_theta", "mlp_layer_types", "eos_token_ids", mode="before")
    @classmethod
    def _as_tuple(cls, value: Any) -> Any:
        return tuple(value) if isinstance(value, list) else value

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        for name in ("layer_types", "layer_rope_theta", "mlp_layer_types"):
            entries = len(getattr(self, name))
            if entries != self.num_hidden_layers:
                raise ValueError(f"{name} has {entries} entries, expected num_hidden_layers = {self.num_hidden_layers}")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads is {self.num_attention_heads}, expected a multiple of num_key_value_heads = "
                f"{self.num_key_value_heads}"
            )
        if self.num_experts_per_tok > self.num_local_experts:
            raise ValueError(
                f"num_experts_per_tok is {self.num_experts_per_tok}, expected at most num_local_experts = "
                f"{self.num_local_experts}"
            )
        for name in ("bos_token_id", "pad_token_id"):
            token = getattr(self, name)
            if token is not None and token >= self.vocab_size:
                raise ValueError(f"{name} is {token}, expected an id below vocab_size = {self.vocab_size}")
        if max(self.eos_token_ids) >= self.vocab_size:
            raise ValueError(
                f"eos_token_id is {list(self.eos_token_ids)}, expected ids below vocab_size = {self.vocab_size}"
            )
        return self

    def is_full(self, layer: int) -> bool:
        """Whether layer `layer` attends to the whole context instead of a window."""
        return self.layer_types[layer] == "full_attention"

    def window(self, layer: int) -> int | None:
        """Keys visible to a query of this layer, itself included; None on full layers (section 2.3)."""
        return None if self.is_full(layer) else self.sliding_window

    def rope_theta(self, layer: int) -> float:
        """Rotary base of the layer; 0 means no rotation at all."""
        return self.layer_rope_theta[layer]

    def nvfp4_experts(self, layer: int) -> bool:
        """Whether this layer's routed experts are stored as NVFP4, by the quantisation config."""
        return self.quantization is not None and self.quantization.quantises(
            f"model.language_model.layers.{layer}.mlp.experts"
        )

    @property
    def attention_scale(self) -> float:
        """Softmax scale with qk_scale_factor folded in (A6, D-5)."""
        return self.qk_scale_factor / math.sqrt(self.head_dim)

    def to_hf(self) -> dict[str, Any]:
        """Content of a `config.json` that `load_target_config` reads back to an equal configuration."""
        text = self.model_dump(mode="json", exclude={"quantization", "eos_token_ids"}, exclude_none=True)
        text["eos_token_id"] = list(self.eos_token_ids)
        hf: dict[str, Any] = {
            "architectures": [TARGET_ARCHITECTURE],
            "model_type": "muse_spark",
            "dtype": "bfloat16",
            "text_config": text,
        }
        if self.quantization is not None:
            hf["quantization_config"] = {
                "quant_method": "modelopt",
                "quant_algo": self.quantization.quant_algo,
                "group_size": self.quantization.group_size,
                "ignore": list(self.quantization.exclude),
            }
        return hf
