"""An HTTP server on the loopback interface that answers as SGLang does, or wrongly in one way at a time."""

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar

TOKENS, VERIFY, CORRECT = 13, 3, 9  # of every answer: the first token, then three steps of 4


class FakeServer:
    """`fault` decides what goes wrong with question number `at` of each run; requests are kept in `asked`."""

    def __init__(
        self, fault: str = "", at: int = 1, environment: dict[str, str] | None = None, port: int = 0, **info: Any
    ) -> None:
        self.fault, self.at = fault, at
        self.info = {
            "version": "0.5.23", "speculative_algorithm": "DFLASH", "speculative_num_draft_tokens": 8,
            "enable_nvidia_megakernel": True, "incremental_streaming_output": False,
            "internal_states": [{"avg_spec_accept_length": 4.1, "env_vars": environment}],
        } | info  # fmt: skip
        self.asked: list[dict[str, Any]] = []
        self.authorizations: set[str | None] = set()
        self.cleared = 0
        handler = type("Handler", (_Handler,), {"server_state": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", port), handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def broken(self) -> bool:
        """Whether the request that is being answered is the one that goes wrong."""
        return bool(self.fault) and (self.at == 0 or len(self.asked) % self.at == 0)


def answer_text(question: str) -> str:
    """Adds all numbers of the question."""
    total = sum(int(word) for word in question.replace("\n", " ").split(" ") if word.isdigit())
    return f"So it is\n#### {total}"


class _Handler(BaseHTTPRequestHandler):
    server_state: ClassVar[FakeServer]
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        self.server_state.authorizations.add(self.headers.get("Authorization"))
        found = {"/health": {}, "/server_info": self.server_state.info, "/v1/models": {"data": [{"id": "spark"}]}}
        self._send(found[self.path])

    def do_POST(self) -> None:
        state = self.server_state
        state.authorizations.add(self.headers.get("Authorization"))
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or "{}")
        if self.path.startswith("/flush_cache"):
            state.cleared += 1
            return self._send({}, 400 if state.fault == "busy" else 200)
        state.asked.append({"path": self.path, **body})
        if state.broken() and state.fault == "status":
            return self._send({"error": {"message": "out of memory"}}, 500)
        native = self.path == "/generate"
        question = body.get("text", "") if native else body["messages"][0]["content"]
        pieces = list((_native if native else _chat)(answer_text(question), state.fault if state.broken() else ""))
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        for piece in pieces:
            if piece is None:  # the connection ends in the middle of the answer
                break
            time.sleep(0.002)
            self.wfile.write(f"data: {piece if isinstance(piece, str) else json.dumps(piece)}\n\n".encode())
        self.close_connection = True
        return None

    def _send(self, content: Any, status: int = 200) -> None:
        data = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


def _details(fault: str) -> dict[str, Any]:
    if fault == "no meta":
        return {}
    return {"spec_verify_ct": VERIFY, "spec_accept_length": TOKENS / VERIFY, "spec_num_correct_drafts": CORRECT}


def _chat(text: str, fault: str) -> Any:
    def delta(content: str, finish: str | None = None) -> dict[str, Any]:
        return {"choices": [{"index": 0, "delta": {"content": content}, "finish_reason": finish}], "usage": None}

    yield delta("")
    yield {"choices": [{"index": 0, "delta": {"reasoning_content": "3 and 4 are 99", "content": None}}]}
    yield delta(text[:5])
    if fault == "broken off":
        yield None
    if fault == "error":
        yield {"error": {"message": "aborted by the scheduler"}}
    if fault == "not JSON":
        yield "<html>"
    yield delta("" if fault == "length" else text[5:])
    yield delta("", "length" if fault == "length" else "stop")
    if _details(fault):
        yield {"choices": [], "sglext": {"spec_tokens_details": _details(fault)}}
    yield {"choices": [], "usage": {"completion_tokens": TOKENS, "reasoning_tokens": 6}}
    yield "[DONE]"


def _native(text: str, fault: str) -> Any:
    for count in (1, 5, 9, TOKENS):
        last = count == TOKENS
        if last and fault == "broken off":
            yield None
        finish = {"type": "stop"} if last else None
        meta = {"completion_tokens": count, "finish_reason": finish} | (_details(fault) if last else {})
        yield {"text": text[: len(text) * count // TOKENS], "meta_info": meta}
    yield "[DONE]"
