"""`generate --backend emulator` on the bundled pair writes what the reference writes."""

import json
import subprocess
import sys

import pytest


def generate(backend: str, *options: str) -> dict[str, object]:
    command = [sys.executable, "-m", "sgl_muse_mega.cli", "generate", "--backend", backend, "--json", "--raw", *options]
    result = subprocess.run([*command, "Ann has 3"], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    found: dict[str, object] = json.loads(result.stdout)
    return found


@pytest.mark.parametrize(
    "options",
    [
        ("--width", "4"),
        ("--no-draft", "--kv-cache-dtype", "fp8"),
        ("--tree", "--nodes", "6", "--width", "4", "--kv-cache-dtype", "fp8"),
    ],
)
def test_the_emulator_decodes_what_the_reference_decodes(options: tuple[str, ...]) -> None:
    length = ("--max-new-tokens", "6", "--ignore-eos")
    ours, theirs = (generate(backend, *options, *length) for backend in ("emulator", "reference"))
    assert ours["text"]
    assert (ours["text"], ours["ids"]) == (theirs["text"], theirs["ids"])
