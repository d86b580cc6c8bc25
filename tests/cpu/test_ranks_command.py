"""`--ranks` of generate and eval: what is refused, and the processes of the other ranks. No GPU is touched."""

import subprocess
import sys
from typing import Any

import pytest
import torch
from torch.distributed import HashStore

from sgl_muse_mega.commands import ranks as command
from sgl_muse_mega.commands.pair import Pair, PairOptions
from sgl_muse_mega.commands.ranks import PORT, RANK, RankProcesses
from sgl_muse_mega.errors import UserError
from sgl_muse_mega.megakernel.accept_instance import AcceptInstance
from sgl_muse_mega.megakernel.mailbox import LoopBack
from sgl_muse_mega.megakernel.peers import StoreGroup
from sgl_muse_mega.megakernel.place import Place


class FakeProcess:
    """A child that has said something and ended with a code, or still runs (None)."""

    def __init__(self, arguments: list[str], *, env: dict[str, str], stdout: int, stderr: Any) -> None:
        self.arguments, self.environment, self.stdout = arguments, env, stdout
        self.killed, self.waited, self.returncode = False, False, None
        stderr.write(b"first\nsecond\nError: no\n")
        children.append(self)

    def poll(self) -> int | None:
        return self.returncode

    def kill(self) -> None:
        self.killed = True

    def wait(self, timeout: float | None = None) -> None:
        self.waited = True


children: list[FakeProcess] = []


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch) -> list[FakeProcess]:
    children.clear()
    monkeypatch.setattr(subprocess, "Popen", FakeProcess)
    monkeypatch.setattr(command.atexit, "register", lambda function: None)
    return children


@pytest.mark.parametrize("backend", ["auto", "reference", "emulator"])
def test_other_backends_have_one_rank(backend: str) -> None:
    with pytest.raises(UserError, match="Several ranks need GPUs"):
        Pair(PairOptions(None, None, False, backend, "bf16", None, ranks=2))


@pytest.mark.parametrize("ranks", [0, 3, 16])
def test_other_numbers_are_refused(ranks: int) -> None:
    with pytest.raises(UserError, match=f"{ranks} were asked for; change --ranks"):
        RankProcesses(ranks, ["generate"])


def test_the_other_ranks_run_the_same_command(processes: list[FakeProcess], capsys: pytest.CaptureFixture[str]) -> None:
    first = RankProcesses(4, ["eval", "--ranks", "4", "--save"])
    assert first.rank == 0
    assert [child.environment[RANK] for child in processes] == ["1", "2", "3"]
    assert len({child.environment[PORT] for child in processes}) == 1
    assert {tuple(child.arguments[1:]) for child in processes} == {
        ("-m", "sgl_muse_mega.cli", "eval", "--ranks", "4")
    }  # one of them saves, not all
    assert {child.stdout for child in processes} == {subprocess.DEVNULL}
    processes[0].returncode, processes[1].returncode = 0, 2
    first.stop()
    assert [child.killed for child in processes] == [False, False, True]
    assert capsys.readouterr().err == "Rank 2: first\nRank 2: second\nRank 2: Error: no\n"
    first.close()
    assert all(child.waited for child in processes)


def test_a_rank_that_failed_ends_the_command() -> None:
    """Rank 0 waits in the store, where only its own end helps."""
    program = (
        "import threading, time; from sgl_muse_mega.commands.ranks import RankProcesses; "
        "ranks = RankProcesses(2, ['no-such-command']); threading.Thread(target=ranks.watch, args=(0.5,)).start(); "
        "time.sleep(90)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert "Rank 1: " in done.stderr
    assert "no-such-command" in done.stderr


def test_a_rank_that_was_started_starts_nobody(processes: list[FakeProcess], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(RANK, "3")
    monkeypatch.setenv(PORT, "1234")
    assert RankProcesses(4, ["generate"]).rank == 3
    assert processes == []


def test_too_few_gpus_are_refused(processes: list[FakeProcess], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(UserError, match="2 ranks need as many GPUs and this machine shows 1"):
        RankProcesses(2, ["generate"]).connect()


def test_a_place_joins_parts_of_one_rank() -> None:
    place = Place(LoopBack(1), StoreGroup(HashStore(), 0, 1))
    place.meet()
    table = torch.arange(12, dtype=torch.bfloat16).view(4, 3)
    assert torch.equal(place.join(table), table)
    assert torch.equal(place.vocabulary_row(table, 2), table[2])
    assert place.first_problem(None) is None
    assert place.first_problem("no memory") == "rank 0: no memory"


def test_a_vocabulary_that_does_not_divide_is_refused() -> None:
    with pytest.raises(UserError, match="1004 ids do not divide among 8 ranks in pairs"):
        AcceptInstance.for_sms(8, vocab=1004, selector_k=4, softcap=0.0, row_cap=8, ranks=8)
