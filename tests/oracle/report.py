"""Collects the measured differences of a run; printed at its end and the source of docs/reference.md."""

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

MEASURED: dict[str, dict[str, list[Any]]] = defaultdict(lambda: defaultdict(list))


def note(what: str, values: Mapping[str, Any]) -> None:
    """values: name of an equation or quantity -> a `Difference` or a number; the largest is reported."""
    for name, value in values.items():
        MEASURED[what][name].append(value)


def lines() -> list[str]:
    return [
        f"{what}: {name}: {max(values, key=lambda v: getattr(v, 'rms', v))}"
        for what, table in MEASURED.items()
        for name, values in table.items()
    ]
