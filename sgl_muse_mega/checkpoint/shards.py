"""Sharded safetensors checkpoints: a lazy reader that checks everything before it reads, and a writer that leaves
nothing half-written behind.

A checkpoint folder holds `model.safetensors.index.json` and the shards it names, or a single `model.safetensors`. Where
both exist the index counts.
"""

import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from re import Pattern
from typing import Any, Self

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from sgl_muse_mega.errors import UserError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
DEFAULT_SHARD_BYTES = 5 * 10**9
_STALE = ("model-*-of-*.safetensors", "mask_embedding.pt")
_LISTED = 4

_DTYPES = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "F64": torch.float64,
    "U8": torch.uint8,
    "F8_E4M3": torch.float8_e4m3fn,
}


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """What a checkpoint must hold under a name."""

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.bfloat16

    def check(self, name: str, tensor: Tensor) -> None:
        """Raises ValueError when `tensor`, about to be written as `name`, has another shape or dtype."""
        if tuple(tensor.shape) != self.shape or tensor.dtype != self.dtype:
            raise ValueError(
                f"{name} has shape {list(tensor.shape)} and dtype {tensor.dtype}, expected {list(self.shape)} and "
                f"{self.dtype}"
            )


class CheckpointReader:
    """Context manager over one checkpoint folder; opening it reads the headers of all shards, never their data.

    Raises UserError when the folder is not a checkpoint, or when index and shards do not agree: a shard is missing,
    truncated or damaged, a tensor is in two shards, is not in the shard named for it, or is not in the index.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._shard_of: dict[str, Any] = {}
        weight_map = _weight_map(directory)
        holders: dict[str, list[str]] = {}
        with ExitStack() as stack:
            for file in [SINGLE] if weight_map is None else sorted(set(weight_map.values())):
                shard = stack.enter_context(_open(directory / file))
                for name in shard.keys():  # noqa: SIM118 - not a mapping
                    self._shard_of[name] = shard
                    holders.setdefault(name, []).append(file)
            if weight_map is not None:
                _check_index(directory / INDEX, weight_map, holders)
            self._stack = stack.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def __contains__(self, name: str) -> bool:
        return name in self._shard_of

    def __iter__(self) -> Iterator[str]:
        return iter(self._shard_of)

    def stored_dtype(self, name: str) -> str:
        """safetensors' name of the tensor's dtype, such as `BF16` or `U8`."""
        return str(self._shard_of[name].get_slice(name).get_dtype())

    def require(self, specs: Mapping[str, TensorSpec], ignored: Pattern[str]) -> None:
        """Checks that the checkpoint holds exactly `specs`, apart from names that `ignored` matches from their start.

        Raises UserError listing the missing and the unknown tensors and those of wrong dtype or shape.
        """
        problems = []
        missing = [name for name in specs if name not in self]
        if missing:
            problems.append(f"{_count(missing, 'missing tensor')}: {listed(missing)}")
        unknown = [name for name in self if name not in specs and not ignored.match(name)]
        if unknown:
            problems.append(f"{_count(unknown, 'unknown tensor')}: {listed(sorted(unknown))}")
        mismatches = [text for name, spec in specs.items() if name in self and (text := self._mismatch(name, spec))]
        problems += mismatches[:_LISTED]
        if len(mismatches) > _LISTED:
            problems.append(f"{len(mismatches) - _LISTED} more of wrong dtype or shape")
        if problems:
            raise UserError(
                f"{self._directory} does not hold the model its configuration describes: {'; '.join(problems)}."
            )

    def read(self, name: str, index: tuple[slice, ...] = ()) -> Tensor:
        """The tensor or the part `index` of it, contiguous; only that part is read from disk.

        Always a copy: safetensors hands out views of the mapped file, which would fault if the file were cut later.
        """
        stored = self._shard_of[name].get_slice(name)
        part: Tensor = stored[index] if index else stored[:]
        return part.clone(memory_format=torch.contiguous_format)

    def _mismatch(self, name: str, spec: TensorSpec) -> str | None:
        stored = self._shard_of[name].get_slice(name)
        dtype, shape = stored.get_dtype(), tuple(stored.get_shape())
        if _DTYPES.get(dtype) != spec.dtype:
            expected = next(label for label, known in _DTYPES.items() if known == spec.dtype)
            return f"{name} has dtype {dtype}, expected {expected}"
        if shape != spec.shape:
            return f"{name} has shape {list(shape)}, expected {list(spec.shape)}"
        return None


@contextmanager
def staged(directory: Path) -> Iterator[Path]:
    """A temporary folder inside `directory` whose files replace the checkpoint there when the block succeeds.

    When it fails the temporary folder is removed and the old checkpoint is untouched. The file that makes a folder a
    checkpoint (index or single file) is removed first and moved in last, so that a reader never meets a mixture.
    Raises UserError when the disk refuses.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix=".unfinished-", dir=directory))
    except OSError as error:
        raise UserError(f"{directory} cannot be written: {error}.") from error
    try:
        yield folder
        for stale in (directory / INDEX, directory / SINGLE, *(p for glob in _STALE for p in directory.glob(glob))):
            stale.unlink(missing_ok=True)
        for file in sorted(folder.iterdir(), key=lambda path: path.name in (INDEX, SINGLE)):
            os.replace(file, directory / file.name)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{directory} cannot be written: {error}; the new checkpoint is incomplete.") from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def write_shards(folder: Path, tensors: Iterable[tuple[str, Tensor]], max_shard_bytes: int) -> None:
    """Writes the tensors in order as `model.safetensors`, or as numbered shards with an index when they are larger than
    `max_shard_bytes` together; a tensor larger than that gets a shard of its own.

    `tensors` may be a generator: at most one shard's tensors are held at a time. Raises ValueError on a repeated name.
    """
    shards: list[list[str]] = []
    seen: set[str] = set()
    pending: dict[str, Tensor] = {}
    pending_bytes = total_bytes = 0

    def flush() -> None:
        save_file(pending, folder / f"{len(shards)}.safetensors", metadata={"format": "pt"})
        shards.append(list(pending))
        pending.clear()

    for name, tensor in tensors:
        if name in seen:
            raise ValueError(f"tensor {name} is written twice")
        seen.add(name)
        if pending and pending_bytes + tensor.nbytes > max_shard_bytes:
            flush()
            pending_bytes = 0
        pending[name] = _own_storage(tensor, pending.values())
        pending_bytes += tensor.nbytes
        total_bytes += tensor.nbytes
    flush()
    if len(shards) == 1:
        os.replace(folder / "0.safetensors", folder / SINGLE)
        return
    weight_map = {}
    for number, names in enumerate(shards):
        file = f"model-{number + 1:05d}-of-{len(shards):05d}.safetensors"
        os.replace(folder / f"{number}.safetensors", folder / file)
        weight_map.update(dict.fromkeys(names, file))
    index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def listed(names: Sequence[str]) -> str:
    """The first few names, with the number of the others."""
    rest = len(names) - _LISTED
    return ", ".join(names[:_LISTED]) + (f" and {rest} more" if rest > 0 else "")


def _count(names: Sequence[str], noun: str) -> str:
    return f"{len(names)} {noun}{'s' if len(names) > 1 else ''}"


def _own_storage(tensor: Tensor, others: Iterable[Tensor]) -> Tensor:
    """A contiguous CPU tensor that shares no memory with `others`, which the file format forbids."""
    plain = tensor.detach().cpu().contiguous()
    storage = plain.untyped_storage().data_ptr()
    return plain.clone() if any(other.untyped_storage().data_ptr() == storage for other in others) else plain


def _weight_map(directory: Path) -> dict[str, str] | None:
    """The index's tensor-to-file map, or None for a single-file checkpoint."""
    path = directory / INDEX
    if not path.is_file():
        if (directory / SINGLE).is_file():
            return None
        raise UserError(
            f"{directory} is not a checkpoint folder: it has neither {INDEX} nor {SINGLE}; give the folder that "
            "holds the weights."
        )
    try:
        content = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not a valid index: {error}.") from None
    weight_map = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise UserError(f"{path} is not a valid index: it has no weight_map from tensor names to file names.")
    for name, file in weight_map.items():
        if not file or Path(file).name != file:
            raise UserError(f"{path} places {name} in {file!r}, which is not a file name in the same folder.")
    absent = [file for file in sorted(set(weight_map.values())) if not (directory / file).is_file()]
    if absent:
        raise UserError(f"{path} names {listed(absent)}, which does not exist; the download is incomplete.")
    return weight_map


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    entries = dict(pairs)
    if len(entries) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(name for name in names if names.count(name) > 1)} is listed twice")
    return entries


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path} is truncated or damaged ({error}); fetch it again.") from None


def _check_index(path: Path, weight_map: Mapping[str, str], holders: Mapping[str, Sequence[str]]) -> None:
    """Refuses an index that does not say where each tensor is, given the files that really hold each of them."""
    unlisted = [f"{name} (in {files[0]})" for name, files in holders.items() if name not in weight_map]
    repeated = [f"{name} (in {' and '.join(files)})" for name, files in holders.items() if len(files) > 1]
    misplaced = [f"{name} (in {file})" for name, file in weight_map.items() if file not in holders.get(name, ())]
    problems = [
        f"{text} {listed(names)}"
        for text, names in (
            ("it does not list", unlisted),
            ("its shards hold duplicates of", repeated),
            ("its shards lack", misplaced),
        )
        if names
    ]
    if problems:
        raise UserError(f"{path} does not describe its shards: {'; '.join(problems)}; fetch the checkpoint again.")
