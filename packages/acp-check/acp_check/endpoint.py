"""An OpenAI-compatible endpoint on 127.0.0.1 with the scripted answers that a check needs."""

from __future__ import annotations

import json
import re
import select
import socket
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from acp_check.rules.turns import FLOOD_LINES, SPOKEN
from acp_check.run import EndpointLog

MODEL = "acp-check"
WINDOW = 200_000
FILE = "acp-check.txt"
_MAX_BODY = 64 << 20
_PURPOSE = re.compile(r"acp-check:(\w+)")
_FAMILIES = (
    ("read", "view", "cat"),
    ("write", "create", "edit"),
    ("bash", "shell", "exec", "command", "terminal", "run"),
)
_PLANS = (("todo", "plan"),)


class ScriptedEndpoint:
    """Serves chat completions on 127.0.0.1. The word after `acp-check:` in the last user message selects the answer.

    For `say`, the answer is a fixed text. For `tool` and `plan`, the answer calls tools that the agent offers. For
    `hang`, the answer never ends. For `flood`, the answer is long. Any other request, such as one for a title, is
    answered with `ok`.
    """

    def __init__(self, workspace: str) -> None:
        self.log = EndpointLog()
        self._workspace = workspace
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        endpoint = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                endpoint.answer_get(self)

            def do_POST(self) -> None:
                endpoint.answer_post(self)

            def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the name of the base class
                """Log nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)

    def __enter__(self) -> ScriptedEndpoint:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(5)

    @property
    def base_url(self) -> str:
        """The base URL that agents get. It ends with /v1."""
        return f"http://127.0.0.1:{self._server.server_address[1]}/v1"

    def wait_until_left(self, timeout_s: float) -> None:
        """Wait until the agent has closed the connections of all answers that never end, or the time is up."""
        deadline = time.monotonic() + timeout_s
        while self.log.left < self.log.hung and time.monotonic() < deadline:
            self._stopping.wait(0.02)

    def answer_get(self, handler: BaseHTTPRequestHandler) -> None:
        """Answer a GET request with the list of models, which contains one model."""
        models = [{"id": MODEL, "object": "model", "created": 0, "owned_by": "acp-check", "context_length": WINDOW}]
        _send_json(handler, {"object": "list", "data": models})

    def answer_post(self, handler: BaseHTTPRequestHandler) -> None:
        """Answer a chat completion."""
        try:
            length = min(int(handler.headers.get("Content-Length") or 0), _MAX_BODY)
            request = json.loads(handler.rfile.read(length))
            messages = [message for message in request["messages"] if isinstance(message, dict)]
        except (ValueError, KeyError, TypeError, RecursionError):
            _send_json(handler, {"error": {"message": "not a chat completion", "type": "invalid_request_error"}}, 400)
            return
        with self._lock:
            self.log.requests += 1
        purpose = _purpose(messages)
        calls: list[dict[str, Any]] = []
        is_after_tool = bool(messages) and messages[-1].get("role") == "tool"
        if purpose in ("tool", "plan") and not is_after_tool:
            calls = list(_tool_calls(request.get("tools"), _PLANS if purpose == "plan" else _FAMILIES, self._workspace))
        text = "" if calls else _TEXTS.get(purpose, "ok")
        if not request.get("stream"):
            message = {"role": "assistant", "content": text} | ({"tool_calls": calls} if calls else {})
            finish = "tool_calls" if calls else "stop"
            choice = {"index": 0, "message": message, "finish_reason": finish}
            _send_json(handler, _envelope("chat.completion") | {"choices": [choice], "usage": _USAGE})
            return
        self._stream(handler, purpose, text, calls)

    def _stream(self, handler: BaseHTTPRequestHandler, purpose: str, text: str, calls: list[dict[str, Any]]) -> None:
        handler.send_response(200)
        handler.send_header("Content-Type", "text/event-stream")
        handler.send_header("Connection", "close")
        handler.end_headers()
        handler.close_connection = True
        if purpose == "hang":
            with self._lock:
                self.log.hung += 1
        try:
            for piece in _pieces(text):
                handler.wfile.write(_event({"content": piece}))
            if purpose == "hang":
                self._wait_until_closed(handler.connection)
            for index, call in enumerate(calls):
                handler.wfile.write(_event({"tool_calls": [{"index": index, **call}]}))
            handler.wfile.write(_event({}, "tool_calls" if calls else "stop"))
            last = _envelope("chat.completion.chunk") | {"choices": [], "usage": _USAGE}
            handler.wfile.write(f"data: {json.dumps(last)}\n\ndata: [DONE]\n\n".encode())
        except OSError:
            if purpose == "hang" and not self._stopping.is_set():
                with self._lock:
                    self.log.left += 1

    def _wait_until_closed(self, connection: socket.socket) -> None:
        """Wait until the check ends or the connection is closed. :raises OSError: the agent has closed the
        connection."""
        while not self._stopping.is_set():
            readable, _, _ = select.select([connection], [], [], 0.05)
            if readable and not connection.recv(4096):
                raise ConnectionResetError


_USAGE = {"prompt_tokens": 100, "completion_tokens": 10, "total_tokens": 110}
_TEXTS = {
    "say": SPOKEN,
    "hang": "This answer never ends. ",
    "flood": "".join(f"line {number} {'-' * 60}\n" for number in range(FLOOD_LINES)),
}


def _purpose(messages: list[dict[str, Any]]) -> str:
    """Return the word after `acp-check:` in the last user message, or an empty string if there is none."""
    for message in reversed(messages):
        if message.get("role") == "user":
            found = _PURPOSE.findall(json.dumps(message.get("content"), ensure_ascii=False))
            return found[-1] if found else ""
    return ""


def _tool_calls(tools: Any, families: tuple[tuple[str, ...], ...], workspace: str) -> Iterator[dict[str, Any]]:
    """Yield one tool call for each family of tools. Skip a family if the agent offers none of its tools."""
    functions = [tool.get("function") for tool in tools if isinstance(tool, dict)] if isinstance(tools, list) else []
    named = [each for each in functions if isinstance(each, dict) and isinstance(each.get("name"), str)]
    for number, words in enumerate(families):
        chosen = next((each for word in words for each in named if word in each["name"].lower()), None)
        if chosen is not None:
            arguments = _example(chosen.get("parameters"), "", workspace)
            function = {"name": chosen["name"], "arguments": json.dumps(arguments)}
            yield {"id": f"call_{number}_{time.monotonic_ns()}", "type": "function", "function": function}


def _example(schema: Any, name: str, workspace: str) -> Any:
    """Return a harmless value that the JSON schema allows. `name` is the name of the member that the schema
    describes."""
    if not isinstance(schema, dict):
        return {}
    if schema.get("enum"):
        return schema["enum"][0]
    alternatives = next((schema[key] for key in ("anyOf", "oneOf") if isinstance(schema.get(key), list)), None)
    if alternatives:
        return _example(alternatives[0], name, workspace)
    kind = schema.get("type")
    kind = kind[0] if isinstance(kind, list) and kind else kind
    if kind in (None, "object"):
        members = schema.get("properties")
        members = members if isinstance(members, dict) else {}
        required: Any = schema.get("required")
        required = required if isinstance(required, list) else []
        return {key: _example(inner, key.lower(), workspace) for key, inner in members.items() if key in required}
    if kind == "array":
        return [_example(schema.get("items"), name, workspace)]
    if kind in ("integer", "number"):
        return max(1, schema.get("minimum") or 1)
    if kind == "boolean":
        return False
    if any(word in name for word in ("path", "file")):
        return f"{workspace}/{FILE}"
    if any(word in name for word in ("dir", "cwd")):
        return workspace
    return "echo acp-check" if "command" in name or name == "cmd" else "acp-check"


def _pieces(text: str) -> Iterator[str]:
    size = 7 if len(text) < 1000 else 4096
    return (text[at : at + size] for at in range(0, len(text), size))


def _envelope(kind: str) -> dict[str, Any]:
    return {"id": "chatcmpl-acp-check", "object": kind, "created": 0, "model": MODEL}


def _event(delta: dict[str, Any], finish: str | None = None) -> bytes:
    choice = {"index": 0, "delta": delta, "finish_reason": finish}
    return f"data: {json.dumps(_envelope('chat.completion.chunk') | {'choices': [choice]})}\n\n".encode()


def _send_json(handler: BaseHTTPRequestHandler, body: Any, status: int = 200) -> None:
    data = json.dumps(body).encode()
    handler.send_response(status)
    handler.send_header("Content-Type", "application/json")
    handler.send_header("Content-Length", str(len(data)))
    handler.end_headers()
    handler.wfile.write(data)
