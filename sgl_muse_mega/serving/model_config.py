"""SGLang's view of a model's configuration as this package's typed one."""

from typing import Any

from pydantic import ValidationError

from sgl_muse_mega.config import TargetConfig
from sgl_muse_mega.errors import UserError

_RENAMED = {"eos_token_ids": "eos_token_id"}
_NOT_IN_TEXT = ("model_type", "quantization", "rope_parameters")


def target_config(hf_config: Any) -> TargetConfig:
    """The text part of a served Muse Spark. hf_config: SGLang's outer or text configuration object.

    Per-layer lists are those SGLang serves, whatever the checkpoint left to defaults. Whether a layer's experts are
    NVFP4 is not taken from here but from the loaded tensors. Raises UserError naming every field that the kernels
    cannot take.
    """
    text = getattr(hf_config, "text_config", hf_config)
    fields: dict[str, Any] = {}
    for name in TargetConfig.model_fields:
        value = None if name in _NOT_IN_TEXT else getattr(text, _RENAMED.get(name, name), None)
        if value is not None:
            fields[name] = _plain(name, value)
    try:
        return TargetConfig.model_validate(fields)
    except ValidationError as error:
        wrong = [
            f"{'.'.join(str(_RENAMED.get(str(part), part)) for part in detail['loc']) or 'the configuration'}: "
            f"{detail['msg']} (it is {detail['input']!r})"[:200]
            for detail in error.errors()
        ]
        raise UserError(f"The kernels cannot take this model's configuration: {'; '.join(wrong)}.") from None


def _plain(name: str, value: Any) -> Any:
    """JSON types as the strict model wants them."""
    if name == "eos_token_ids":
        return tuple(value) if isinstance(value, list | tuple) else (value,)
    if name == "layer_rope_theta":
        return tuple(float(theta) for theta in value)
    if isinstance(value, list):
        return tuple(value)
    if TargetConfig.model_fields[name].annotation is float and isinstance(value, int):
        return float(value)
    return value
