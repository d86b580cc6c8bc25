"""Typed, validated configuration of the target, the draft and their pairing, read from Hugging Face `config.json`."""

from sgl_muse_mega.config.draft import DraftConfig
from sgl_muse_mega.config.files import check_pair, load_draft_config, load_target_config
from sgl_muse_mega.config.target import QuantizationConfig, RopeParameters, TargetConfig

__all__ = [
    "DraftConfig",
    "QuantizationConfig",
    "RopeParameters",
    "TargetConfig",
    "check_pair",
    "load_draft_config",
    "load_target_config",
]
