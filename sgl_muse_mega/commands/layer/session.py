"""The other end of an arm: a process with its own kernels and memory, asked for one turn at a time."""

import contextlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from sgl_muse_mega.errors import UserError

_SCRIPT = Path(__file__).with_name("arm.py")
_ROOT = Path(__file__).parents[3]


@dataclass(frozen=True, slots=True)
class ArmSpec:
    """A version of the kernels: another checkout, other fields of `Instance`, or both."""

    name: str
    root: Path = _ROOT
    tuning: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def parse(cls, text: str) -> "ArmSpec":
        """ "name:math_warps=12,PREFETCH,DEPTH=3@../other-checkout": lower-case items are fields of `Instance`, others
        macros for the kernels. Items and checkout may be left out.

        Raises UserError when the text has no name or names no checkout.
        """
        head, _, folder = text.partition("@")
        name, _, items = head.partition(":")
        root = Path(folder).resolve() if folder else _ROOT
        if not name:
            raise UserError(f"A variant is NAME:ITEM,ITEM@CHECKOUT and {text!r} has no name; put one first.")
        if not (root / "sgl_muse_mega" / "megakernel").is_dir():
            raise UserError(f"{root} is no checkout of sgl-muse-mega (it has no sgl_muse_mega/megakernel).")
        tuning: dict[str, Any] = {}
        defines = []
        for item in filter(None, items.split(",")):
            key, _, value = item.partition("=")
            if not re.fullmatch(r"[A-Za-z_]\w*", key):
                raise UserError(f"{item!r} of variant {name} is neither FIELD=VALUE nor a macro.")
            if key != key.lower():
                defines.append(item)
                continue
            try:
                tuning[key] = json.loads(value)
            except ValueError:
                raise UserError(f"{item!r} of variant {name} needs a number, true or false as its value.") from None
        if defines:
            tuning["defines"] = defines
        return cls(name, root, tuning)


class ArmProcess:
    """A running arm. Its compiler messages go to stderr."""

    def __init__(self, spec: ArmSpec, workload: Mapping[str, Any]) -> None:
        """Starts the process and does not wait for it: `ready` does."""
        self.spec = spec
        paths = [str(spec.root), os.environ.get("PYTHONPATH", "")]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
        # -P: the script's own folder must not come before the checkout it measures
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(_SCRIPT)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment,
            text=True,
        )  # fmt: skip
        self._send(dict(workload) | {"tuning": spec.tuning})

    def ready(self) -> dict[str, Any]:
        """The arm's description, once its kernels are built and its weights are there. Raises UserError."""
        return self._receive()

    def ask(self, question: str, **arguments: Any) -> dict[str, Any]:
        """Raises UserError with the arm's own sentence, or when it has died."""
        self._send({"ask": question, **arguments})
        return self._receive()

    def _send(self, content: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(content) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise UserError(f"The process of variant {self.spec.name} has ended; see its output above.") from None

    def _receive(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise UserError(f"The process of variant {self.spec.name} ended with {self._process.wait()}.")
        content: dict[str, Any] = json.loads(line)
        if "error" in content:
            raise UserError(f"Variant {self.spec.name}: {content['error']}")
        return content

    def close(self) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()


class Session:
    """Several arms on one GPU, started together; one works while the others wait. An arm that fails is dropped.

    Entering starts the processes; the first question waits until their kernels and weights are there.
    """

    def __init__(self, specs: list[ArmSpec], workload: Mapping[str, Any]) -> None:
        """Raises UserError when two arms have one name."""
        names = [spec.name for spec in specs]
        if len(set(names)) != len(names):
            raise UserError(f"Two variants have the same name ({', '.join(names)}); give each its own.")
        self.failures: dict[str, str] = {}
        self._specs, self._workload = specs, workload
        self._arms: dict[str, ArmProcess] = {}
        self._descriptions: dict[str, dict[str, Any]] = {}

    def __enter__(self) -> "Session":
        for spec in self._specs:
            self._arms[spec.name] = ArmProcess(spec, self._workload)
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        self._close()

    @property
    def descriptions(self) -> dict[str, dict[str, Any]]:
        """Of every arm that could be built (`arm.Arm.describe`). Raises UserError when there is none."""
        if not self._descriptions:
            self._descriptions = self._each(ArmProcess.ready)
        return self._descriptions

    @property
    def names(self) -> list[str]:
        """The arms that are left, in order."""
        return list(self._arms)

    def _each(
        self, action: Callable[[ArmProcess], dict[str, Any]], only: Container[str] | None = None
    ) -> dict[str, dict[str, Any]]:
        answers = {}
        for name, arm in list(self._arms.items()):
            if only is not None and name not in only:
                continue
            try:
                answers[name] = action(arm)
            except UserError as error:
                self.failures[name] = str(error)
                del self._arms[name]
                arm.close()
                if not self._arms:
                    raise
        return answers

    def ask(self, question: str, only: Container[str] | None = None, **arguments: Any) -> dict[str, dict[str, Any]]:
        """The same question to every arm (of `only`), in turn. Raises UserError once the last has failed."""
        _ = self.descriptions  # they are ready
        return self._each(lambda arm: arm.ask(question, **arguments), only)

    def ask_all_rows(self, question: str, rows: Iterable[int]) -> dict[str, dict[str, dict[str, Any]]]:
        """The same question for each number of rows: answers by rows, then by arm."""
        return {str(count): self.ask(question, rows=count) for count in rows}

    def _close(self) -> None:
        for arm in self._arms.values():
            arm.close()
