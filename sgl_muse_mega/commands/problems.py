"""Problems in GSM8K's form: JSON lines with a question, and an answer that ends in "#### number"."""

import json
import re
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

from sgl_muse_mega.commands.text import read_utf8
from sgl_muse_mega.errors import UserError

_NUMBER = re.compile(r"-?(?:\d[\d,]*)?\.?\d+")


@dataclass(frozen=True, slots=True)
class Problem:
    line: int  # 1-based, in the file
    question: str
    expected: Decimal


def read_problems(path: Path, limit: int | None) -> list[Problem]:
    """The first `limit` problems of a file, all of it checked. Raises UserError naming the line that is wrong."""
    # JSON strings may hold the other characters that splitlines() splits at
    lines = enumerate(read_utf8(path).split("\n"), start=1)
    problems = [_problem(path, number, line) for number, line in lines if line.strip()]
    if not problems:
        raise UserError(f"{path} holds no problem; expected one JSON object a line.")
    if limit is not None and limit < 1:
        raise UserError(f"The number of problems must be at least 1, found {limit}; change --limit.")
    return problems[:limit]


def final_number(text: str) -> Decimal | None:
    """The answer in a solution: the number behind the last "####", or the last number where there is no such mark."""
    _, mark, tail = text.rpartition("####")
    numbers = _NUMBER.findall(tail if mark else text)
    if not numbers:
        return None
    return Decimal(numbers[0 if mark else -1].replace(",", ""))


def _problem(path: Path, number: int, line: str) -> Problem:
    def refuse(reason: str) -> UserError:
        wanted = 'expected {"question": "...", "answer": "... #### number"}'
        return UserError(f"Line {number} of {path} {reason}; {wanted}.")

    try:
        entry: Any = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise refuse(f"is not JSON ({error})") from None
    if not isinstance(entry, dict):
        raise refuse("is not a JSON object")
    for name in ("question", "answer"):
        if not isinstance(entry.get(name), str) or not entry[name].strip():
            raise refuse(f"has no text under {name!r}")
    expected = final_number(entry["answer"]) if "####" in entry["answer"] else None
    if expected is None:
        raise refuse("has no number behind #### in its answer")
    return Problem(number, entry["question"], expected)
