"""Reads `config.json` files and turns what is wrong with them into one sentence."""

import json
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from sgl_muse_mega.config.draft import DFLASH_FIELDS, DRAFT_ARCHITECTURE, DraftConfig
from sgl_muse_mega.config.fields import Validated
from sgl_muse_mega.config.target import TARGET_ARCHITECTURE, TargetConfig
from sgl_muse_mega.errors import UserError

Model = TypeVar("Model", bound=Validated)

# Written by every exporter and without influence on the arithmetic of inference.
_BOOKKEEPING = frozenset(
    [
        "_name_or_path",
        "architectures",
        "attention_dropout",
        "auto_map",
        "chunk_size_feed_forward",
        "dtype",
        "id2label",
        "initializer_range",
        "is_encoder_decoder",
        "label2id",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "problem_type",
        "return_dict",
        "torch_dtype",
        "transformers_version",
        "use_cache",
    ]
)


def load_target_config(directory: Path) -> TargetConfig:
    """Reads `config.json` (and, where present, `hf_quant_config.json` and `generation_config.json`) of a target.

    Stop ids are the union of the text config's and the generation config's (D-13).
    Raises UserError naming every wrong field with the value found and the value expected.
    """
    raw = _read_json(directory / "config.json")
    _check_architecture(raw, TARGET_ARCHITECTURE, directory)
    text = raw.get("text_config")
    if not isinstance(text, dict):
        raise UserError(f"{directory / 'config.json'}: text_config is {_shown(text)}, expected an object.")
    text = _without_bookkeeping(text)
    quantization = _quantization(raw, directory)
    if quantization is not None:
        text["quantization"] = quantization
    stops = _token_list(text.pop("eos_token_id", None))
    if (directory / "generation_config.json").is_file():
        stops += _token_list(_read_json(directory / "generation_config.json").get("eos_token_id"))
    text["eos_token_ids"] = [token for index, token in enumerate(stops) if token not in stops[:index]]
    return _validated(TargetConfig, text, directory / "config.json", {"eos_token_ids": "eos_token_id"})


def load_draft_config(directory: Path) -> DraftConfig:
    """Reads `config.json` of a DFlash2 draft; keys of `dflash_config` win over top-level ones of the same name.

    Raises UserError naming every wrong field with the value found and the value expected.
    """
    path = directory / "config.json"
    raw = _read_json(path)
    _check_architecture(raw, DRAFT_ARCHITECTURE, directory)
    nested = raw.pop("dflash_config", None)
    if not isinstance(nested, dict):
        raise UserError(f"{path}: dflash_config is {_shown(nested)}, expected an object.")
    unknown = sorted(set(nested) - DFLASH_FIELDS)
    if unknown:
        raise UserError(f"{path}: dflash_config has unknown fields that may change the model: {', '.join(unknown)}.")
    fields = {**_without_bookkeeping(raw), **nested}
    rope = fields.pop("rope_parameters", None)
    if isinstance(rope, dict):
        if rope.get("rope_type", "default") != "default" or set(rope) - {"rope_type", "rope_theta"}:
            raise UserError(f"{path}: rope_parameters is {_shown(rope)}, expected the default type without scaling.")
        fields.setdefault("rope_theta", rope.get("rope_theta"))
    for name in ("rope_scaling", "max_window_layers", "bos_token_id", "eos_token_id", "pad_token_id"):
        if fields.pop(name, None) is not None and name == "rope_scaling":
            raise UserError(f"{path}: rope_scaling is set, expected none.")
    return _validated(DraftConfig, fields, path, {})


def check_pair(target: TargetConfig, draft: DraftConfig) -> None:
    """Refuses a draft that was not made for this target; raises UserError listing every mismatch."""
    reasons = []
    for name, ours, theirs in (
        ("hidden_size", target.hidden_size, draft.hidden_size),
        ("vocab_size", target.vocab_size, draft.vocab_size),
        ("num_hidden_layers / num_target_layers", target.num_hidden_layers, draft.num_target_layers),
    ):
        if ours != theirs:
            reasons.append(f"{name} is {theirs} in the draft, expected the target's {ours}")
    if max(draft.target_layer_ids) >= target.num_hidden_layers - 1:
        reasons.append(
            f"target_layer_ids is {list(draft.target_layer_ids)}, expected layers up to {target.num_hidden_layers - 2}"
        )
    if reasons:
        raise UserError(f"The draft does not fit the target: {'; '.join(reasons)}.")


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path} does not exist; expected a model folder with this file.") from None
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}.") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path} cannot be read: {error}.") from None
    except (ValueError, RecursionError) as error:  # more than JSONDecodeError: numbers and nesting have limits
        raise UserError(f"{path} is not JSON: {error}.") from None
    if not isinstance(content, dict):
        raise UserError(f"{path} holds {_shown(content)}, expected a JSON object.")
    return content


def _check_architecture(raw: dict[str, Any], expected: str, directory: Path) -> None:
    found = raw.get("architectures")
    if found != [expected]:
        raise UserError(f"{directory / 'config.json'}: architectures is {_shown(found)}, expected ['{expected}'].")


def _without_bookkeeping(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if name not in _BOOKKEEPING}


def _token_list(value: Any) -> list[Any]:
    if value is None:
        return []
    return list(value) if isinstance(value, list) else [value]


def _quantization(raw: dict[str, Any], directory: Path) -> dict[str, Any] | None:
    """The quantisation section from `config.json` or `hf_quant_config.json`, reduced to our fields."""
    section, path = raw.get("quantization_config"), directory / "config.json"
    if section is None and (directory / "hf_quant_config.json").is_file():
        path = directory / "hf_quant_config.json"
        section = _read_json(path).get("quantization")
    if section is None:
        return None
    if not isinstance(section, dict):
        raise UserError(f"{path}: the quantisation section is {_shown(section)}, expected an object.")
    method = section.get("quant_method", "modelopt")
    if method != "modelopt":
        raise UserError(f"{path}: quant_method is {_shown(method)}, expected 'modelopt' (NVFP4) or no quantisation.")
    exclude = section.get("exclude_modules", section.get("ignore"))
    if not isinstance(exclude, list):
        raise UserError(f"{path}: the exclude list (ignore or exclude_modules) is {_shown(exclude)}, expected a list.")
    return {
        "quant_algo": section.get("quant_algo"),
        "group_size": section.get("group_size"),
        "exclude": tuple(exclude),
    }


def _validated(model: type[Model], fields: dict[str, Any], path: Path, renamed: dict[str, str]) -> Model:
    try:
        return model.model_validate(fields)
    except ValidationError as error:
        sentences = [_sentence(detail, renamed) for detail in error.errors()]
        raise UserError(f"{path}: {'; '.join(sentences)}.") from None


def _sentence(detail: Any, renamed: dict[str, str]) -> str:
    """One clause per wrong field: field, value found, what is expected."""
    name = ".".join(renamed.get(str(part), str(part)) for part in detail["loc"])
    if detail["type"] == "missing":
        return f"{name} is missing"
    if detail["type"] == "extra_forbidden":
        return f"{name} is {_shown(detail['input'])}, but this field is unknown and may change the model"
    if detail["type"] == "value_error":
        return str(detail["ctx"]["error"])
    if detail["type"] == "too_short":
        return f"{name} is {_shown(detail['input'])}, expected {detail['ctx']['min_length']} or more entries"
    expected = detail["msg"].removeprefix("Input should be ")
    return f"{name} is {_shown(detail['input'])}, expected {expected}"


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
