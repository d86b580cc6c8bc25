"""Every sentence in which the plugin refuses or declines something, from its sources, and those that tests heard."""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import sgl_muse_mega

PACKAGE = Path(sgl_muse_mega.__file__).parent
SOURCES = sorted((PACKAGE / "serving").glob("*.py"))
DECLINING = ("declines", "problem")  # functions whose results are reasons
END = r"(\.|;.*)?"  # what may be put behind a reason: the stop that makes it a sentence, or what to do about it


@dataclass(frozen=True)
class Sentence:
    place: str
    pattern: re.Pattern[str]


def _pattern(node: ast.expr | None) -> re.Pattern[str] | None:
    """A literal or an f-string as a pattern; None for anything else."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return re.compile(re.escape(node.value) + END, re.DOTALL)
    if isinstance(node, ast.JoinedStr):
        parts = [re.escape(v.value) if isinstance(v, ast.Constant) else ".*" for v in node.values]
        return re.compile("".join(parts) + END, re.DOTALL)
    return None


def written() -> Iterator[Sentence]:
    """All of them: yielded by a check, returned by a function that declines, or raised as a UserError."""
    for source in SOURCES:
        tree = ast.parse(source.read_text())
        for function in (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)):
            for node in ast.walk(function):
                said: ast.expr | None = None
                if isinstance(node, ast.Yield) or (isinstance(node, ast.Return) and function.name in DECLINING):
                    said = node.value
                elif isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and node.exc.args:
                    said = node.exc.args[0] if ast.unparse(node.exc.func) == "UserError" else None
                pattern = _pattern(said)
                if pattern:
                    yield Sentence(f"{source.relative_to(PACKAGE)}:{node.lineno}", pattern)


class Heard:
    """What the plugin said while tests ran."""

    def __init__(self) -> None:
        self.texts: set[str] = set()

    def listen(self, patch: pytest.MonkeyPatch) -> None:
        from sgl_muse_mega.errors import UserError
        from sgl_muse_mega.serving import hooks, reasons, target, worker

        original = UserError.__init__

        def init(error: UserError, *args: Any) -> None:
            self.texts.add(str(args[0]) if args else "")
            original(error, *args)

        patch.setattr(UserError, "__init__", init)
        for module, name in (
            *((reasons, name) for name in vars(reasons) if name.startswith("_") or name.endswith("_reasons")),
            (hooks, "problems"), (target.TargetMegakernel, "declines"), (worker, "declines"),
        ):  # fmt: skip
            function = getattr(module, name)
            if callable(function) and getattr(function, "__module__", "").startswith("sgl_muse_mega.serving"):
                patch.setattr(module, name, self._heard(function))

    def _heard(self, function: Any) -> Any:
        def listening(*args: Any, **kwargs: Any) -> Any:
            found = function(*args, **kwargs)
            if isinstance(found, str):
                self.texts.add(found)
            elif isinstance(found, list):
                self.texts.update(item for item in found if isinstance(item, str))
            elif isinstance(found, Iterator):
                found = list(found)
                self.texts.update(found)
                return iter(found)
            return found

        return listening

    def unheard(self) -> list[str]:
        """Places whose sentence no test heard."""
        return [s.place for s in written() if not any(s.pattern.fullmatch(text) for text in self.texts)]
