"""Every server command in the documentation, through SGLang's own parser and argument resolution."""

import re
import shlex
from pathlib import Path

import pytest
from conftest import ROOT, _device

from sgl_muse_mega.checkpoint import tiny
from sgl_muse_mega.serving import reasons, switches

pytestmark = pytest.mark.usefixtures("plugins")
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))


def commands(page: Path) -> list[str]:
    blocks = re.findall(r"```bash\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    return [line for line in lines if "sglang serve" in line]


COMMANDS = [(page.name, command) for page in PAGES for command in commands(page)]


def test_there_are_some() -> None:
    text = " ".join(command for _, command in COMMANDS)
    assert len(COMMANDS) >= 4
    assert all(part in text for part in ("--tp-size 8", "--tp-size 4", switches.EXPERIMENTAL_SM103))


@pytest.mark.parametrize(("page", "command"), COMMANDS)
def test_command(page: str, command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.server_args import prepare_server_args

    before, _, after = command.partition("sglang serve ")
    for assignment in before.split():
        name, _, value = assignment.partition("=")
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN", "1")  # than the bundled pair's
    words = shlex.split(after)
    for option, folder in (
        ("--model-path", tiny.target_directory()),
        ("--speculative-draft-model-path", tiny.draft_directory()),
    ):
        words[words.index(option) + 1] = str(folder)  # the bundled pair has the same form
    gb300 = switches.EXPERIMENTAL_SM103 in before
    _device(monkeypatch, "sm_103" if gb300 else "sm_90")
    # Without a GPU, SGLang does not find the device and its attention backend by itself.
    words += ["--device", "cuda", "--load-format", "dummy", "--skip-tokenizer-init", "--attention-backend", "fa3"]
    if gb300:
        with pytest.raises(ValueError, match=r"setup:\n  - the experts of layers \[0, 5\] are BF16[^\n]*$"):
            prepare_server_args(words).resolve_once()
        monkeypatch.setattr(reasons, "_bf16_layers", lambda _cfg: [])
    prepare_server_args(words).resolve_once()
