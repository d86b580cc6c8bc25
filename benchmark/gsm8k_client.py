"""A running SGLang server as `bench_gsm8k.py` asks it: one streamed request at a time, over either of its APIs."""

import json
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from sgl_muse_mega.commands.text import Text
from sgl_muse_mega.errors import UserError

KEPT = (  # of what a server says of itself
    "version", "launch_command", "model_path", "tp_size", "ep_size", "quantization", "kv_cache_dtype", "page_size",
    "attention_backend", "moe_runner_backend", "context_length", "max_running_requests", "enable_nvidia_megakernel",
    "speculative_algorithm", "speculative_draft_model_path", "speculative_num_draft_tokens",
    "speculative_accept_threshold_single", "speculative_accept_threshold_acc", "reasoning_parser", "chat_template",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Asking:
    """What every request asks for; `reasoning_effort` and `template_arguments` reach the chat template."""

    api: str = "chat"  # or "native"
    max_new_tokens: int = 4096
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int | None = None
    ignore_eos: bool = False
    reasoning_effort: str | None = None
    template_arguments: dict[str, Any] = field(default_factory=dict)
    instruction: str = ""
    timeout: float = 600.0  # seconds between two pieces of an answer

    def prompt(self, question: str) -> str:
        return f"{question}\n\n{self.instruction}" if self.instruction else question

    def sampling(self) -> dict[str, Any]:
        seed = {} if self.seed is None else {"seed" if self.api == "chat" else "sampling_seed": self.seed}
        return {"temperature": self.temperature, "top_p": self.top_p, "ignore_eos": self.ignore_eos} | seed


@dataclass(slots=True)
class Answer:
    """One answered question. What the server did not say is None."""

    text: str = ""
    tokens: int | None = None  # the first one, which the prompt's forward gives, included
    reasoning_tokens: int | None = None
    verify_steps: int | None = None
    accept_length: float | None = None  # the server's own, of this request
    histogram: list[int] = field(default_factory=list)  # verify steps by accepted drafts
    finish: str | None = None
    first_seconds: float | None = None  # to the first token
    seconds: float = 0.0  # to the last
    error: str | None = None


class Server:
    """One server by its address."""

    def __init__(self, url: str, asking: Asking, tokenizer: Path | None = None) -> None:
        """tokenizer: a model folder; prompts then go as token ids (native API), for servers without a tokenizer.

        Raises UserError when nobody answers there.
        """
        self.url, self._asking = url.rstrip("/"), asking
        self._text = Text(tokenizer) if tokenizer else None
        timeout = httpx.Timeout(asking.timeout, connect=10.0)
        key = os.environ.get("SGLANG_API_KEY")  # not an option, which would end up beside the results
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        # No proxy: a benchmark's server is where its address says.
        self._client = httpx.Client(base_url=self.url, timeout=timeout, trust_env=False, headers=headers)
        self.info = self._get("/server_info")
        self._whole = not self.info.get("incremental_streaming_output")  # native pieces repeat what came before
        self._model = self._get("/v1/models")["data"][0]["id"] if asking.api == "chat" else ""

    def close(self) -> None:
        self._client.close()

    def described(self) -> dict[str, Any]:
        """What of the server belongs beside a result."""
        return {"url": self.url} | {name: self.info.get(name) for name in KEPT} | {"environment": self.environment()}

    def environment(self) -> dict[str, str] | None:
        """SGLang's variables in the server's environment; None when it does not show them."""
        shown: dict[str, str] | None = self._state(self.info).get("env_vars")
        return shown

    def accept_length(self) -> float | None:
        """SGLang's running average since its metrics were last cleared; it lags by up to one of its log intervals."""
        found = self._state(self._get("/server_info")).get("avg_spec_accept_length")
        return None if found is None else float(found)

    def clear(self) -> bool:
        """Empties the prefix cache and the server's metrics; False when the server declines, or is not there."""
        try:
            return self._client.post("/flush_cache", params={"timeout": 30}).status_code == 200
        except httpx.HTTPError:
            return False

    def ask(self, question: str) -> Answer:
        """Answers one question; whatever goes wrong with it is in `Answer.error`."""
        answer, start = Answer(), time.perf_counter()
        take = self._take_chat if self._asking.api == "chat" else self._take_native
        try:
            for piece in self._pieces(question):
                answer.seconds = time.perf_counter() - start
                if answer.first_seconds is None:
                    answer.first_seconds = answer.seconds
                if "error" in piece:
                    answer.error = str(piece["error"].get("message", piece["error"]))
                    break
                take(answer, piece)
        except httpx.HTTPError as error:
            answer.error = f"{type(error).__name__}: {error}"
        except (KeyError, ValueError, TypeError, AttributeError, IndexError) as error:
            answer.error = f"the server sent something else than an answer ({type(error).__name__}: {error})"
        if answer.error is None and answer.finish is None:
            answer.error = "the answer broke off: no reason to finish came"
        return answer

    def _pieces(self, question: str) -> Iterator[dict[str, Any]]:
        """The JSON objects of a streamed answer."""
        path, body = self._request(question)
        with self._client.stream("POST", path, json=body) as response:
            if response.status_code != 200:
                text = response.read().decode(errors="replace")
                yield {"error": {"message": f"status {response.status_code}: {text.strip()[:500]}"}}
                return
            for line in response.iter_lines():
                if line.startswith("data:"):
                    data = line.removeprefix("data:").strip()
                    if data == "[DONE]":
                        return
                    yield json.loads(data)

    def _request(self, question: str) -> tuple[str, dict[str, Any]]:
        asking = self._asking
        prompt = asking.prompt(question)
        if asking.api == "native":
            text = {"input_ids": self._text.encode(prompt, raw=False)} if self._text else {"text": prompt}
            sampling = asking.sampling() | {"max_new_tokens": asking.max_new_tokens}
            return "/generate", {**text, "sampling_params": sampling, "stream": True}
        body = {
            "model": self._model,
            "messages": [{"role": "user", "content": prompt}],
            "max_tokens": asking.max_new_tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_spec_tokens_details": True,
            **asking.sampling(),
        }
        if asking.reasoning_effort is not None:
            body["reasoning_effort"] = asking.reasoning_effort
        if asking.template_arguments:
            body["chat_template_kwargs"] = asking.template_arguments
        return "/v1/chat/completions", body

    def _take_chat(self, answer: Answer, piece: dict[str, Any]) -> None:
        for choice in piece.get("choices", ()):
            answer.text += choice["delta"].get("content") or ""
            answer.finish = choice.get("finish_reason") or answer.finish
        usage = piece.get("usage")
        if usage:
            answer.tokens, answer.reasoning_tokens = usage["completion_tokens"], usage.get("reasoning_tokens")
        details = (piece.get("sglext") or {}).get("spec_tokens_details")
        if details:
            _take_speculation(answer, details)

    def _take_native(self, answer: Answer, piece: dict[str, Any]) -> None:
        meta = piece["meta_info"]
        text = self._text.decode(piece["output_ids"]) if self._text else piece["text"]
        answer.text = text if self._whole else answer.text + text
        answer.tokens, answer.reasoning_tokens = meta["completion_tokens"], meta.get("reasoning_tokens")
        answer.finish = (meta.get("finish_reason") or {}).get("type")
        _take_speculation(answer, meta)

    def _get(self, path: str) -> dict[str, Any]:
        try:
            response = self._client.get(path, timeout=30.0)
            response.raise_for_status()
            found: dict[str, Any] = response.json()
        except (httpx.HTTPError, ValueError) as error:
            raise UserError(
                f"{self.url}{path} does not answer as an SGLang server ({type(error).__name__}: {error}); start one "
                "there, or give its address with --url."
            ) from None
        return found

    @staticmethod
    def _state(info: dict[str, Any]) -> dict[str, Any]:
        return (info.get("internal_states") or [{}])[0]


def _take_speculation(answer: Answer, details: dict[str, Any]) -> None:
    answer.verify_steps = details.get("spec_verify_ct") or answer.verify_steps
    answer.accept_length = details.get("spec_accept_length") or answer.accept_length
    answer.histogram = details.get("spec_correct_drafts_histogram") or answer.histogram
