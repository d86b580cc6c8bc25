"""What bench_gsm8k.py sends and reads, against SGLang's own request and response types."""

import json
import sys
from typing import Any

import pytest
from conftest import ROOT

sys.path.insert(0, str(ROOT / "benchmark"))

import gsm8k_client
from gsm8k_client import Answer, Asking, Server

from sgl_muse_mega.checkpoint import tiny

META = {
    "completion_tokens": 13, "spec_verify_ct": 3, "spec_accept_length": 13 / 3, "spec_num_correct_drafts": 9,
    "spec_correct_drafts_histogram": [0, 0, 0, 3], "finish_reason": {"type": "stop", "matched": 2},
}  # fmt: skip


def client(api: str) -> Any:
    """A client that has not asked anybody anything yet."""
    made = object.__new__(Server)
    made._asking = Asking(
        api=api, seed=5, ignore_eos=True, reasoning_effort="low", template_arguments={"thinking": True}, instruction="x"
    )
    made._text, made._model, made._whole = None, "spark", True
    return made


def test_chat_requests() -> None:
    from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest

    path, body = client("chat")._request("How many?")
    assert path == "/v1/chat/completions"
    assert set(body) <= set(ChatCompletionRequest.model_fields)
    made = ChatCompletionRequest(**body)
    assert made.return_spec_tokens_details
    assert made.stream_options is not None
    assert made.stream_options.include_usage
    assert made.chat_template_kwargs is not None
    assert made.chat_template_kwargs["thinking"] is True
    assert (made.reasoning_effort, made.seed, made.ignore_eos, made.max_tokens) == ("low", 5, True, 4096)


def test_native_requests() -> None:
    from sglang.srt.managers.io_struct import GenerateReqInput
    from sglang.srt.sampling.sampling_params import SamplingParams

    path, body = client("native")._request("How many?")
    assert path == "/generate"
    made = GenerateReqInput(**body)
    assert made.stream
    sampling = SamplingParams(**body["sampling_params"])
    assert (sampling.sampling_seed, sampling.ignore_eos, sampling.max_new_tokens) == (5, True, 4096)


def test_chat_answers() -> None:
    from sglang.srt.entrypoints.openai import protocol
    from sglang.srt.entrypoints.openai.utils import spec_tokens_details_from_meta_info

    def chunk(**parts: Any) -> dict[str, Any]:
        made = protocol.ChatCompletionStreamResponse(id="1", created=0, model="spark", **parts)
        found: dict[str, Any] = json.loads(made.model_dump_json())
        return found

    def choice(finish: str | None = None, **delta: Any) -> dict[str, Any]:
        part = protocol.ChatCompletionResponseStreamChoice(
            index=0, delta=protocol.DeltaMessage(**delta), finish_reason=finish
        )
        return chunk(choices=[part])

    details = spec_tokens_details_from_meta_info(META)
    usage = protocol.UsageInfo(prompt_tokens=5, total_tokens=18, completion_tokens=13, reasoning_tokens=6)
    pieces = [
        choice(role="assistant", content=""),
        choice(reasoning_content="thinking 99"),
        choice(content="#### "),
        choice(content="42"),
        choice("stop"),
        chunk(choices=[], sglext=protocol.SglExt(spec_tokens_details=details)),
        chunk(choices=[], usage=usage),
    ]
    answer, reader = Answer(), client("chat")
    for piece in pieces:
        reader._take_chat(answer, piece)
    assert (answer.text, answer.finish) == ("#### 42", "stop")
    assert (answer.tokens, answer.reasoning_tokens, answer.verify_steps) == (13, 6, 3)
    assert answer.accept_length == pytest.approx(13 / 3)
    assert answer.histogram == [0, 0, 0, 3]


def test_native_answers() -> None:
    answer, reader = Answer(), client("native")
    for count, finish in ((4, None), (13, META["finish_reason"])):
        reader._take_native(
            answer, {"text": "x" * count, "meta_info": META | {"finish_reason": finish, "completion_tokens": count}}
        )
    assert (answer.text, answer.tokens, answer.finish, answer.verify_steps) == ("x" * 13, 13, "stop", 3)


def test_what_is_kept_of_a_server_exists() -> None:
    from sglang.srt.environ import envs
    from sglang.srt.server_args import ServerArgs

    made = ServerArgs(model_path=str(tiny.target_directory()))
    names = {*gsm8k_client.KEPT, "incremental_streaming_output"} - {"version"}
    assert {name for name in names if not hasattr(made, name)} == set()
    assert envs.SGLANG_EXPOSE_OWN_ENV_VARS.name == "SGLANG_EXPOSE_OWN_ENV_VARS"
    assert envs.SGLANG_SIMULATE_ACC_LEN.get() <= 0
