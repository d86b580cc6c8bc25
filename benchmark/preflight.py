"""What a benchmark needs is looked at before it begins, so that no GPU spends minutes on a run that cannot end well."""

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from sgl_muse_mega import results
from sgl_muse_mega.errors import UserError

RIVAL = ("device.sh", "make_models.py")  # of a folder for --stock, whatever is run of it


def need_gpus(count: int) -> None:
    """Raises UserError unless so many GPUs are visible."""
    import torch

    found = torch.cuda.device_count()
    if found < count:
        raise UserError(
            f"This run needs {count} GPU{'s' if count > 1 else ''} and torch finds {found}; run it on such a machine, "
            "or ask for less."
        )


def need_ranks(ranks: int) -> None:
    """Raises UserError for a number of ranks that the kernels do not know."""
    if ranks not in (1, 2, 4, 8):
        raise UserError(f"The kernels take 1, 2, 4 or 8 ranks, {ranks} were asked for; change --ranks.")


def need_rival(folder: Path | None, *files: str) -> None:
    """Raises UserError unless the folder given as --stock, if any, holds the rival's scripts."""
    if folder is None:
        return
    missing = [name for name in (*RIVAL, *files) if not (folder / name).is_file()]
    if missing:
        raise UserError(f"{folder} is not the rival's folder, it has no {' and no '.join(missing)}; change --stock.")


def need_room_for(file: Path | None, save: bool = False) -> None:
    """Raises UserError when the results could not be written in the end: to `file`, or among the kept ones (`save`)."""
    if save:
        results.check_writable()
    if file is None:
        return
    folder = file.absolute().parent
    if file.is_dir() or not os.access(file if file.exists() else folder, os.W_OK):
        raise UserError(f"{file} cannot be written; --json needs the name of a file in a folder that there is.")


def need_known(option: str, chosen: Sequence[str], known: Sequence[str]) -> None:
    """Raises UserError for a word in a list with commas that the option does not know."""
    unknown = [word for word in chosen if word not in known]
    if unknown:
        raise UserError(f"{option} does not know {', '.join(map(repr, unknown))}; it takes {', '.join(known)}.")


def guarded(main: Callable[[], int]) -> int:
    """The exit status of a benchmark; 2 after one sentence when it refuses its input or this machine."""
    try:
        return main()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
