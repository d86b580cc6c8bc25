"""benchmark/server_check.py: right kernels pass, and a word that differs is named."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmark"))

import server_check


def run(folder: Path, steps: int) -> tuple[int, dict[str, list[str]]]:
    file = folder / "server.json"
    status = server_check.main(["--emulator", "--steps", str(steps), "--json", str(file)])
    return status, json.loads(file.read_text())["differing"]


def test_right_kernels(tmp_path: Path) -> None:
    status, found = run(tmp_path, 2)
    assert (status, len(found)) == (0, 9)
    assert not any(found.values())


def test_what_differs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    formulas = server_check.table_formulas
    begin, end, forward = formulas.begin_step, formulas.end_step, formulas.begin_forward

    def begin_step(inputs: Any, *args: Any, **kwargs: Any) -> None:
        begin(inputs, *args, **kwargs)
        inputs.full_slots[1] += 1

    def end_step(inputs: Any, state: Any, result: Any, **kwargs: Any) -> None:
        end(inputs, state, result, **kwargs)
        result[-1] += 1

    def begin_forward(inputs: Any, *args: Any, **kwargs: Any) -> None:
        forward(inputs, *args, **kwargs)
        inputs.full_pages[:] += 1

    monkeypatch.setattr(formulas, "begin_step", begin_step)
    monkeypatch.setattr(formulas, "end_step", end_step)
    monkeypatch.setattr(formulas, "begin_forward", begin_forward)
    status, found = run(tmp_path, 1)
    assert status == 1
    steps = [faults for name, faults in found.items() if "forward" not in name]
    assert all(faults == ["begin full_slots", "end result"] for faults in steps)
    assert [faults for name, faults in found.items() if "forward" in name] == [["forward full_pages"]] * 3
    assert "FAIL begin full_slots, end result" in capsys.readouterr().out
