"""SGLang's view of a model's configuration as this package's typed one."""

from typing import Any

from pydantic import ValidationError

from sgl_muse_mega.config import DraftConfig, TargetConfig
from sgl_muse_mega.errors import UserError

_NOT_IN_TEXT = ("model_type", "quantization", "rope_parameters")
_SERVERS_BUSINESS = ("bos_token_id", "pad_token_id", "eos_token_ids")  # SGLang decides where a text begins and ends


def target_config(hf_config: Any) -> TargetConfig:
    """The text part of a served Muse Spark. hf_config: SGLang's outer or text configuration object.

    Per-layer lists are those SGLang serves, whatever the checkpoint left to defaults. Whether a layer's experts are
    NVFP4 is not taken from here but from the loaded tensors. Raises UserError naming every field that the kernels
    cannot take.
    """
    text = getattr(hf_config, "text_config", hf_config)
    fields: dict[str, Any] = {"eos_token_ids": (0,)}
    for name in TargetConfig.model_fields:
        if name in _NOT_IN_TEXT or name in _SERVERS_BUSINESS:
            continue
        value = getattr(text, name, None)
        if value is not None:
            fields[name] = _plain(name, value)
    try:
        return TargetConfig.model_validate(fields)
    except ValidationError as error:
        clauses = "; ".join(_clause(detail) for detail in error.errors())
        raise UserError(f"The kernels cannot take this model's configuration: {clauses}.") from None


def _clause(detail: Any) -> str:
    name = ".".join(str(part) for part in detail["loc"])
    text = str(detail["msg"]).removeprefix("Value error, ")
    return f"{name} is {detail['input']!r}: {text}" if name else text


def _plain(name: str, value: Any) -> Any:
    """JSON types as the strict model wants them."""
    if name == "layer_rope_theta":
        return tuple(float(theta) for theta in value)
    if isinstance(value, list):
        return tuple(value)
    if TargetConfig.model_fields[name].annotation is float and isinstance(value, int):
        return float(value)
    return value


def draft_config(hf_config: Any, *, layers_to_capture: tuple[int, ...]) -> DraftConfig:
    """A served DFlash2 draft. layers_to_capture: the target's layers whose streams it gets, in their order.

    SGLang gives a draft the target's normed embedding, unscaled. Raises UserError naming every field that the kernels
    cannot take.
    """
    nested = getattr(hf_config, "dflash_config", None) or {}
    fields: dict[str, Any] = {"target_layer_ids": layers_to_capture, "normed_embedding": True}
    for name in DraftConfig.model_fields:
        value = nested.get(name, getattr(hf_config, name, None))
        if name == "rope_theta" and value is None:
            value = (getattr(hf_config, "rope_parameters", None) or {}).get("rope_theta")
        if value is not None and name not in fields and name != "model_type":
            fields[name] = tuple(value) if isinstance(value, list) else value
            if DraftConfig.model_fields[name].annotation is float and isinstance(value, int):
                fields[name] = float(value)
    try:
        return DraftConfig.model_validate(fields)
    except ValidationError as error:
        clauses = "; ".join(_clause(detail) for detail in error.errors())
        raise UserError(f"The kernels cannot take this draft's configuration: {clauses}.") from None
