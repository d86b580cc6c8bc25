"""The GSM8K benchmark against a server that behaves, and against servers that do not."""

import json
import socket
import stat
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from gsm8k_server import TOKENS, VERIFY, FakeServer

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmark"))

import bench_gsm8k
import gsm8k_numbers
from gpu_state import GpuState
from gsm8k_client import Answer

from sgl_muse_mega import results
from sgl_muse_mega.commands.problems import read_problems

REAL = {"SGLANG_SIMULATE_ACC_LEN": "-1"}


@pytest.fixture
def start() -> Iterator[Callable[..., FakeServer]]:
    servers: list[FakeServer] = []

    def started(*arguments: Any, **options: Any) -> FakeServer:
        servers.append(FakeServer(*arguments, **options))
        return servers[-1]

    yield started
    for server in servers:
        server.close()


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "test.jsonl"
    lines = [{"question": f"Add {n} and {n + 2} .", "answer": f"#### {2 * n + 2 + (n == 3)}"} for n in range(1, 6)]
    path.write_text("\n".join(map(json.dumps, lines)))
    return path


def bench(tmp_path: Path, data: Path, url: str, *more: str) -> tuple[int, dict[str, Any]]:
    """Exit status and the written record."""
    path = tmp_path / "out.json"
    status = bench_gsm8k.main(["--data", str(data), "--url", url, "--warmup", "1", "--json", str(path), *more])
    return status, json.loads(path.read_text()) if path.exists() else {}


@pytest.mark.parametrize("api", ["chat", "native"])
def test_numbers_of_a_server_that_behaves(
    api: str, start: Callable[..., FakeServer], data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server = start(environment=REAL)
    more = ("--reasoning-effort", "low", "--template-arguments", '{"x": 1}') if api == "chat" else ()
    status, record = bench(tmp_path, data, server.url, "--runs", "2", "--api", api, *more)
    assert status == 0
    assert server.cleared == 2
    assert len(server.asked) == 2 * (1 + 5)
    first = record["runs"][0]
    assert (first["right"], first["questions"], first["failed"], first["truncated"]) == (4, 5, 0, 0)  # one is wrong
    assert first["exact"] == 0.8
    assert first["tokens"] == 5 * TOKENS
    assert first["verify_steps"] == 5 * VERIFY
    assert first["accept_server"] == 4.1
    assert first["accept_per_request"] == first["accept_token_weighted"] == pytest.approx(TOKENS / VERIFY)
    assert first["accept_pooled"] == pytest.approx((TOKENS - 1) / VERIFY)
    assert first["acceptance"] == "real"
    answer = first["answers"][0]
    assert 0 < answer["first_seconds"] < answer["seconds"]
    decoding = sum(a["seconds"] - a["first_seconds"] for a in first["answers"])
    assert first["decode_tokens_per_second"] == pytest.approx(5 * (TOKENS - 1) / decoding)
    assert first["ms_per_step"] == pytest.approx(decoding * 1e3 / (5 * VERIFY))
    exact = record["spread"]["A"]["exact"]
    assert (exact["median"], exact["min"], exact["max"]) == (0.8, 0.8, 0.8)
    asked = server.asked[-1]
    if api == "chat":
        assert (asked["model"], asked["reasoning_effort"], asked["max_tokens"]) == ("spark", "low", 4096)
        assert asked["chat_template_kwargs"] == {"x": 1}
        assert record["asking"]["reasoning_effort"] == "low"
        assert first["reasoning_tokens"] == 30
        assert "99" not in answer["text"]  # reasoning is no answer
    printed = capsys.readouterr().out
    assert "accept_pooled" in printed
    assert "NOT FOR PUBLICATION" not in printed


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("status", "status 500"),
        ("error", "aborted by the scheduler"),
        ("broken off", "the answer broke off"),
        ("not JSON", "something else than an answer"),
    ],
)
def test_questions_that_fail_are_counted_and_named(
    fault: str, said: str, start: Callable[..., FakeServer], data: Path, tmp_path: Path, capsys: Any
) -> None:
    status, record = bench(tmp_path, data, start(fault, at=3, environment=REAL).url, "--runs", "1")
    assert status == 1
    run = record["runs"][0]
    assert (run["questions"], run["failed"]) == (5, 2)
    assert run["right"] <= 3
    assert run["tokens"] == 3 * TOKENS
    assert said in capsys.readouterr().out


def test_cut_answers_and_answers_without_accept_length(
    start: Callable[..., FakeServer], data: Path, tmp_path: Path
) -> None:
    _, record = bench(tmp_path, data, start("length", at=3).url, "--runs", "1")
    run = record["runs"][0]
    assert (run["truncated"], run["failed"]) == (2, 0)
    assert run["right"] < 4
    _, record = bench(tmp_path, data, start("no meta", at=3).url, "--runs", "1")
    run = record["runs"][0]
    assert (run["without_accept_length"], run["verify_steps"]) == (2, 3 * VERIFY)
    assert run["accept_pooled"] == pytest.approx((TOKENS - 1) / VERIFY)
    _, record = bench(tmp_path, data, start("no meta", at=0).url, "--runs", "1", "--api", "native")
    run = record["runs"][0]
    assert run["accept_pooled"] is run["ms_per_step"] is run["accept_per_request"] is None
    assert run["decode_tokens_per_second"] > 0


def test_a_server_that_keeps_failing_ends_it(
    start: Callable[..., FakeServer], data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server = start("status", at=0)
    status, record = bench(tmp_path, data, server.url)
    assert (status, record) == (2, {})
    assert "failed 3 questions in a row" in capsys.readouterr().err
    good, bad = start(environment=REAL), start("status", at=0)
    status, record = bench(tmp_path, data, good.url, "--compare", bad.url)
    assert status == 2
    assert [run["server"] for run in record["runs"]] == ["A"]  # what there was is kept
    assert "in a row" in record["stopped"]


def test_a_server_that_is_gone_costs_no_run(
    start: Callable[..., FakeServer], data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second is gone when its run begins; and whatever else ends the program, what was measured lies there."""
    left, right = start(environment=REAL), start(environment=REAL)
    whole = bench_gsm8k.one_run

    def run(server: Any, *rest: Any) -> dict[str, Any]:
        if server.url == right.url:
            (unfinished,) = [json.loads((tmp_path / "out.json").read_text())]
            assert [unfinished["unfinished"], len(unfinished["runs"])] == [True, 1]
            server._client.base_url = f"http://127.0.0.1:{free_port()}"
        return whole(server, *rest)

    monkeypatch.setattr(bench_gsm8k, "one_run", run)
    status, record = bench(tmp_path, data, left.url, "--compare", right.url)
    assert status == 2
    assert [run["server"] for run in record["runs"]] == ["A"]
    assert "unfinished" not in record
    assert "ConnectError" in record["stopped"]


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


@pytest.mark.parametrize(
    ("words", "said"),
    [(["--runs", "0"], "--runs is 0"), (["--json", "absent/out.json"], "absent/out.json cannot be written")],
)
def test_what_could_not_be_kept_is_not_measured(
    words: list[str], said: str, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench_gsm8k.main(["--data", str(data), *words]) == 2
    assert said in capsys.readouterr().err


def test_nobody_there(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        status, _ = bench(tmp_path, data, f"http://127.0.0.1:{free.getsockname()[1]}")
    assert status == 2
    assert "does not answer as an SGLang server" in capsys.readouterr().err


def test_two_servers_in_turns(start: Callable[..., FakeServer], data: Path, tmp_path: Path) -> None:
    left, right = start(environment=REAL), start("length", at=3, environment=REAL, enable_nvidia_megakernel=False)
    status, record = bench(tmp_path, data, left.url, "--compare", right.url, "--runs", "2", "--limit", "4")
    assert status == 0
    assert [(run["server"], run["turn"]) for run in record["runs"]] == [("A", 1), ("B", 1), ("A", 2), ("B", 2)]
    compared = record["spread"]["compared"]
    a, b = record["runs"][2:]
    assert compared["tokens_per_second_ratio"]["max"] >= b["tokens_per_second"] / a["tokens_per_second"]
    assert (compared["texts"], compared["equal_texts"]) == (4, 3)
    assert [server["enable_nvidia_megakernel"] for server in record["servers"]] == [True, False]


def test_a_cache_that_stays_is_said(
    start: Callable[..., FakeServer], data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, record = bench(tmp_path, data, start("busy", at=99).url, "--runs", "1")
    assert record["runs"][0]["cleared"] is False
    assert "the prefix cache was not emptied" in capsys.readouterr().out


def test_a_server_without_speculation(
    start: Callable[..., FakeServer], data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server = start("no meta", at=0, environment=REAL, speculative_algorithm=None, speculative_num_draft_tokens=None)
    status, _ = bench(tmp_path, data, server.url, "--runs", "1")
    printed = capsys.readouterr().out
    assert status == 0
    assert "no speculation" in printed
    assert "without an accept length" not in printed


def test_simulated_acceptance(
    start: Callable[..., FakeServer], data: Path, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = start(environment={"SGLANG_SIMULATE_ACC_LEN": "4"})
    assert bench(tmp_path, data, server.url) == (2, {})
    assert server.asked == []  # refused before the first question
    assert "SGLANG_SIMULATE_ACC_LEN is 4" in capsys.readouterr().err
    status, record = bench(tmp_path, data, server.url, "--allow-simulated", "--runs", "1")
    assert status == 0
    assert record["runs"][0]["acceptance"] == "simulated"
    assert "NOT FOR PUBLICATION" in capsys.readouterr().out
    _, record = bench(tmp_path, data, start().url, "--runs", "1")
    assert record["runs"][0]["acceptance"] == "unknown"
    monkeypatch.setenv("SGLANG_SIMULATE_ACC_LEN", "3.5")
    assert gsm8k_numbers.acceptance({}, [])[0] == "simulated"


@pytest.mark.parametrize(
    ("histogram", "state"),
    [
        ([0, 0, 0, 300, 280], "suspect"),
        ([200, 30, 10, 3], "real"),
        ([250, 40], "real"),  # a draft that knows nothing
        ([0] * 7 + [400], "real"),  # a text that repeats itself
        ([0, 0, 20, 20], "real"),  # too few to tell
    ],
)
def test_accepted_drafts_without_any_spread(histogram: list[int], state: str) -> None:
    answers = [Answer(histogram=histogram[:4]), Answer(histogram=[0] * 4 + histogram[4:])]
    assert gsm8k_numbers.acceptance({}, answers, drafts=7)[0] == state


def test_saved_results_and_the_key(
    start: Callable[..., FakeServer], data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(results, "results_directory", lambda: tmp_path / "results")
    monkeypatch.setenv("SGLANG_API_KEY", "a secret")
    server = start(environment=REAL)
    assert bench(tmp_path, data, server.url, "--runs", "1", "--save")[0] == 0
    assert server.authorizations == {"Bearer a secret"}
    (saved,) = (tmp_path / "results").glob("gsm8k-*-cpu.json")
    assert json.loads(saved.read_text())["spread"]["A"]["accept_pooled"]["median"] == pytest.approx(4.0)
    assert "a secret" not in saved.read_text()


def test_tokenizer_needs_the_native_api(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench(tmp_path, data, "http://127.0.0.1:1", "--tokenizer", str(tmp_path))[0] == 2
    assert "add --api native" in capsys.readouterr().err


def test_the_bundled_problems_are_the_default() -> None:
    assert len(read_problems(bench_gsm8k.parse([]).data, None)) == 500


def test_gpus(tmp_path: Path) -> None:
    program = tmp_path / "nvidia-smi"
    rows = ["0, NVIDIA H200, 1980, 3201, 612.50, 55, 0x0000000000000000", "0, NVIDIA H200, 1700, 3201, 698.1, 61, 0x4"]
    rows.append("0, NVIDIA H200, [N/A], 3201, 80, 40, 0x0000000000000001")
    program.write_text("#!/bin/sh\n" + "".join(f"echo '{row}'\n" for row in rows) + "exec sleep 60\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    with GpuState(program=str(program)) as gpus:
        deadline = time.monotonic() + 20
        while len(gpus._rows) < 3 and time.monotonic() < deadline:
            time.sleep(0.01)
    state = gpus.result()["gpu0"]
    assert state["clocks.sm"] == {"median": 1840.0, "min": 1700.0, "max": 1980.0, "unit": "MHz"}
    assert (state["power.draw"]["max"], state["samples"], state["throttle_reasons"]) == (698.1, 3, ["0x4"])
    program.write_text("#!/bin/sh\necho 'Field is not a valid field to query.'\n")
    with GpuState(program=str(program)) as gpus:
        gpus._reader.join()
    assert "not a valid field" in gpus.result()["missing"]
    with GpuState(program="no-such-program") as gpus:
        pass
    assert "not on this machine" in gpus.result()["missing"]
