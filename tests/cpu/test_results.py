import json
import subprocess
from pathlib import Path

import pytest

from sgl_muse_mega import results
from sgl_muse_mega.errors import UserError
from sgl_muse_mega.results import Figure

ENVIRONMENT = {
    "date": "2026-11-30T12:34:56+00:00",
    "gpu": "NVIDIA H200",
    "driver": "580.1",
    "commit": "abc",
    "command": "sgl-muse-mega bench layer --save",
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(results, "_SOURCE", tmp_path)
    (tmp_path / "pyproject.toml").touch()
    return tmp_path / "benchmark" / "results"


def test_figure_of_repeats() -> None:
    assert Figure.of([3.0, 1.0, 2.0, 10.0], "us") == Figure(2.5, 1.0, 10.0, 4, "us")
    assert Figure.of([0.5], "fraction", n=500) == Figure(0.5, 0.5, 0.5, 500, "fraction")


def test_save_writes_the_run_and_enters_the_figures(folder: Path) -> None:
    path = results.save("layer", ENVIRONMENT, {"rows": [1, 2]}, {"layer.t8.us": Figure(1.0, 0.5, 2.0, 7, "us")})
    assert path == folder / "layer-2026-11-30T12-34-56-nvidia-h200.json"
    assert json.loads(path.read_text()) == {"environment": ENVIRONMENT, "rows": [1, 2]}
    results.save("step", ENVIRONMENT, {}, {"step.w8.ms": Figure(4.0, 4.0, 4.0, 1, "ms")})
    table = json.loads((folder / "figures.json").read_text())
    assert table["layer.t8.us"] == {
        "median": 1.0,
        "min": 0.5,
        "max": 2.0,
        "n": 7,
        "unit": "us",
        **ENVIRONMENT,
        "file": path.name,
    }
    assert list(table) == ["layer.t8.us", "step.w8.ms"]


@pytest.mark.parametrize("content", ["{half", "[]"])
def test_damaged_figures_are_refused_before_anything_is_written(folder: Path, content: str) -> None:
    folder.mkdir(parents=True)
    (folder / "figures.json").write_text(content)
    with pytest.raises(UserError, match="repair or remove"):
        results.save("layer", ENVIRONMENT, {}, {"layer.t8.us": Figure(1.0, 1.0, 1.0, 1, "us")})
    assert [path.name for path in folder.iterdir()] == ["figures.json"]


def test_failed_write_leaves_nothing(folder: Path) -> None:
    with pytest.raises(ValueError, match="JSON compliant"):
        results.save("layer", ENVIRONMENT, {"rows": [float("nan")]}, {})
    assert list(folder.iterdir()) == []


def test_unwritable_folder_is_one_sentence(folder: Path) -> None:
    folder.parent.parent.joinpath("benchmark").touch()
    with pytest.raises(UserError, match="cannot be written"):
        results.save("layer", ENVIRONMENT, {}, {})


def test_environment_names_commit_and_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def git(*arguments: str) -> str:
        identity = ("-c", "user.name=n", "-c", "user.email=e@example.org", "-c", "commit.gpgsign=false")
        return subprocess.run(
            ["git", "-C", tmp_path, *identity, *arguments], check=True, capture_output=True, text=True
        ).stdout.strip()

    monkeypatch.setattr(results, "_SOURCE", tmp_path)
    assert results.environment(None)["commit"] is None
    git("init", "-q")
    (tmp_path / "code.py").write_text("1")
    (tmp_path / "benchmark" / "results").mkdir(parents=True)
    (tmp_path / "benchmark" / "results" / "figures.json").write_text("{}")
    git("add", ".")
    git("commit", "-qm", "first")
    head = git("rev-parse", "HEAD")
    assert results.environment(None)["commit"] == head
    (tmp_path / "benchmark" / "results" / "figures.json").write_text('{"a": 1}')
    assert results.environment(None)["commit"] == head
    (tmp_path / "code.py").write_text("2")
    assert results.environment("H200")["commit"] == f"{head}+changes"
    assert results.environment("H200")["gpu"] == "H200"
    assert results.environment(None)["gpu"] == "cpu"
    assert results.environment(None)["driver"] is None


def test_results_go_to_the_checkout_or_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(results, "_SOURCE", tmp_path / "installed")
    monkeypatch.chdir(tmp_path)
    assert results.results_directory() == tmp_path / "benchmark" / "results"


def test_an_unwritable_folder_is_found_before_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(results, "results_directory", lambda: tmp_path / "benchmark" / "results")
    results.check_writable()
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(results, "results_directory", lambda: tmp_path / "file" / "results")
    with pytest.raises(UserError, match="The results cannot be written to"):
        results.check_writable()
