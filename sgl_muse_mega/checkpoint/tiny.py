"""Where the bundled tiny pair and its evaluation problems are installed."""

from pathlib import Path

from sgl_muse_mega.errors import UserError

_ROOT = Path(__file__).parent.parent / "data" / "tiny"


def target_directory() -> Path:
    """Folder of the tiny target (config, weights, tokenizer); raises UserError where it is not installed."""
    return _installed("target/config.json").parent


def draft_directory() -> Path:
    """Folder of the tiny draft; raises UserError where it is not installed."""
    return _installed("draft/config.json").parent


def problems_path() -> Path:
    """JSON lines of problems that neither model has seen; raises UserError where the file is not installed."""
    return _installed("problems.jsonl")


def _installed(name: str) -> Path:
    path = _ROOT / name
    if not path.is_file():
        raise UserError(f"The bundled tiny pair lacks {path}; install sgl-muse-mega again, with its data files.")
    return path
