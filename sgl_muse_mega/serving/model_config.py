"""SGLang's view of a model's configuration as this package's typed one."""

import json
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
    if detail["type"] == "missing":  # the input is all of the fields then
        return f"{name} is missing"
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

    SGLang gives a draft the target's normed embedding, unscaled, and takes sliding layers for causal where the
    checkpoint does not say. Raises UserError naming every field that the kernels cannot take.
    """
    nested = getattr(hf_config, "dflash_config", None) or {}
    causal = getattr(hf_config, "is_causal", None)
    fields: dict[str, Any] = {
        "target_layer_ids": layers_to_capture,
        "normed_embedding": True,
        "is_causal": True if causal is None else causal,
    }
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


def draft_of_arguments(cfg: Any, hf_config: Any) -> DraftConfig:
    """The draft that a server with these arguments will load, before it does. hf_config: the target's.

    Raises UserError as `draft_config` does, and OSError or ValueError where SGLang cannot read the configuration.
    """
    from sglang.srt.speculative.dflash_utils import parse_dflash_draft_config
    from sglang.srt.utils.hf_transformers_utils import get_config

    draft = get_config(
        cfg.speculative_draft_model_path,
        trust_remote_code=cfg.trust_remote_code,
        revision=cfg.speculative_draft_model_revision,
        model_override_args=json.loads(cfg.json_model_override_args),
    )
    text = getattr(hf_config, "text_config", hf_config)
    taps = parse_dflash_draft_config(draft_hf_config=draft).resolve_target_layer_ids(
        target_num_layers=int(text.num_hidden_layers), draft_num_layers=int(getattr(draft, "num_hidden_layers", 1))
    )
    return draft_config(draft, layers_to_capture=tuple(sorted(set(taps))))
