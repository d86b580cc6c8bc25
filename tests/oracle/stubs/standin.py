"""Makes a package importable without being there: every name exists, none can be used."""

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable
from types import ModuleType


class Missing:
    """A name that can be imported and whose attributes can be named, but which raises when called."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> "Missing":
        if name.startswith("__"):
            raise AttributeError(name)
        return Missing(f"{self._name}.{name}")

    def __call__(self, *args: object, **kwargs: object) -> None:
        raise NotImplementedError(f"{self._name} is not part of the stand-in used on machines without a GPU")


class _SubmoduleFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, package: str) -> None:
        self._package = package

    def find_spec(self, fullname: str, path: object, target: object = None) -> importlib.machinery.ModuleSpec | None:
        if fullname.startswith(self._package + "."):
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        module.__getattr__ = names_of(module.__name__)  # type: ignore[method-assign]


def names_of(module_name: str) -> Callable[[str], Missing]:
    """A module-level `__getattr__` that knows every name."""

    def getter(name: str) -> Missing:
        if name.startswith("__"):
            raise AttributeError(name)
        return Missing(f"{module_name}.{name}")

    return getter


def answer_submodules(package: str) -> None:
    """Let `import package.anything` succeed."""
    sys.meta_path.append(_SubmoduleFinder(package))
