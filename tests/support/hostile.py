"""Hostile client messages, and checks that the process survives them.

Hypothesis makes the lines: valid requests with members replaced, dropped or added, responses without a request, and
lines that are no messages. A real process gets them in batches. After each batch it must be alive, every line it
wrote must be JSON-RPC, every request that it could understand must have exactly one answer, and stdout must have no
log output.
"""

from __future__ import annotations

import json
import os
import queue
import re
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from tests.support.fork_server import command

__all__ = ["SECRET", "HostileClient", "HostileClientV2", "batches", "batches_v2"]

ROOT = Path(__file__).parents[2]
SECRET = "sk-hostile-0123456789abcdef"
WAIT_S = 120.0
SESSIONS = ("@0", "@1", "@2")
"""Placeholders for the ids of the open sessions."""

INFO = {"name": "t", "version": "0"}
FORBIDDEN = ("Traceback", 'File "', SECRET, "pydantic", "KeyError", "TypeError", "AttributeError")

text = st.sampled_from(
    ["", "x", "\x00", "\u2028", "é" * 40, "/", "..", "file:///etc/passwd", "say hi", "/help", "/nope a", "-1"]
)
scalar = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(allow_nan=False, allow_infinity=False),
    text,
    st.text(max_size=20),
)
nested = st.recursive(
    scalar,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
plain: list[Any] = [None, True, 0, -1, 2**70, 1e308, "", "x", [], {}, [None], [[]], {"": None}, {"type": "text"}]
plain += [{"type": "text", "text": None}, ["a", 1], {"name": "a"}, {"systemPrompt": 1}, {"model": []}, "\x00" * 9]
junk = st.one_of(st.sampled_from(plain), st.sampled_from(plain), st.sampled_from(plain), nested)
session = st.sampled_from([*SESSIONS, "nobody", ""])
block = st.one_of(
    st.builds(lambda words: {"type": "text", "text": words}, text),
    st.just({"type": "image", "data": "aGk=", "mimeType": "image/png"}),
    st.just({"type": "audio", "data": "aGk=", "mimeType": "audio/wav"}),
    st.just({"type": "resource", "resource": {"uri": "file:///a", "text": "a"}}),
    st.just({"type": "resource_link", "uri": "plain/path.md", "name": "a"}),
    junk,
)
server = st.one_of(st.just({"name": "a", "command": "/nonexistent/x", "args": [], "env": []}), junk)


def requests(cwd: str) -> st.SearchStrategy[tuple[str, dict[str, Any]]]:
    """A method and valid parameters for it."""
    where = {"cwd": st.just(cwd), "mcpServers": st.lists(server, max_size=2)}
    shapes: Mapping[str, Mapping[str, st.SearchStrategy[Any]]] = {
        "initialize": {"protocolVersion": st.integers(0, 65535), "clientCapabilities": junk},
        "authenticate": {"methodId": st.sampled_from(["configured", "login", ""])},
        "logout": {},
        "session/new": where,
        "session/load": where | {"sessionId": session},
        "session/resume": where | {"sessionId": session},
        "session/fork": where | {"sessionId": session},
        "session/list": {"cursor": scalar},
        "session/close": {"sessionId": session},
        "session/delete": {"sessionId": st.just("nobody")},
        "session/prompt": {"sessionId": session, "prompt": st.lists(block, min_size=1, max_size=3)},
        "session/set_mode": {"sessionId": session, "modeId": st.sampled_from(["ask", "plan", "yolo"])},
        "session/set_config_option": {
            "sessionId": session,
            "configId": st.sampled_from(["mode", "model", "thought_level", "auto_compact", "x"]),
            "value": scalar,
        },
        "_session/steering": {"sessionId": session, "prompt": st.lists(block, max_size=2)},
        "fs/read_text_file": {"sessionId": session, "path": text},
        "": {},
    }
    return one_of(shapes)


def requests_v2(cwd: str) -> st.SearchStrategy[tuple[str, dict[str, Any]]]:
    """A method of version 2 of the protocol and valid parameters for it."""
    where = {"cwd": st.just(cwd), "mcpServers": st.lists(server.map(typed), max_size=2)}
    shapes: Mapping[str, Mapping[str, st.SearchStrategy[Any]]] = {
        "initialize": {"protocolVersion": st.integers(0, 65535), "info": st.just(INFO), "capabilities": junk},
        "auth/login": {"methodId": st.sampled_from(["configured", "login", ""])},
        "auth/logout": {},
        "session/new": where,
        "session/resume": where | {"sessionId": session, "replayFrom": st.sampled_from([None, {"type": "start"}])},
        "session/list": {"cursor": scalar},
        "session/close": {"sessionId": session},
        "session/delete": {"sessionId": st.just("nobody")},
        "session/prompt": {"sessionId": session, "prompt": st.lists(block, min_size=1, max_size=3)},
        "session/set_config_option": {
            "sessionId": session,
            "configId": st.sampled_from(["mode", "model", "thought_level", "auto_compact", "x"]),
            "type": st.sampled_from(["id", "boolean", "_own"]),
            "value": scalar,
        },
        "tool_call/cancel": {"sessionId": session, "toolCallId": text},
        "session/load": where | {"sessionId": session},
        "": {},
    }
    return one_of(shapes)


def typed(described: Any) -> Any:
    """A server of version 2, which names its type."""
    return described | {"type": "stdio"} if isinstance(described, dict) else described


def one_of(shapes: Mapping[str, Mapping[str, st.SearchStrategy[Any]]]) -> st.SearchStrategy[tuple[str, dict[str, Any]]]:
    """One of these methods with its parameters."""
    return st.one_of(
        *(st.tuples(st.just(method), st.fixed_dictionaries(dict(shape))) for method, shape in shapes.items())
    )


kind = st.integers(0, 18)
other_ids = st.sampled_from([1, "1", -1, 2**63, "", "a", "\ud800", "i" * 1000, "i" * 2000, 1.0, True, {}])


@st.composite
def lines(draw: st.DrawFn, good: st.SearchStrategy[tuple[str, dict[str, Any]]]) -> bytes:
    """One line without its newline. A request's id is 0; `send` replaces it."""
    method, params = draw(good)
    message: dict[str, Any] = {"jsonrpc": "2.0", "id": 0, "method": method, "params": params}
    match draw(kind):
        case 0:
            message = {"jsonrpc": "2.0", "id": draw(scalar), "result": draw(junk)}
        case 1:
            message = {"jsonrpc": "2.0", "id": draw(st.integers(0, 50)), "error": draw(junk)}
        case 2:
            names = ["session/cancel", "$/cancel_request", "session/update", "_x", ""]
            message = {"jsonrpc": "2.0", "method": draw(st.sampled_from(names)), "params": draw(junk)}
        case 3:
            message = {"jsonrpc": "2.0", "method": "session/cancel", "params": {"sessionId": draw(session)}}
        case 4:
            message["params"] = draw(junk)
        case 5 | 6 | 7 if params:
            params[draw(st.sampled_from(sorted(params)))] = draw(junk)
        case 8 if params:
            del params[draw(st.sampled_from(sorted(params)))]
        case 9:
            params[draw(st.text(max_size=8))] = draw(junk)
            params["_meta"] = draw(junk)
        case 10:
            message[draw(st.sampled_from(["jsonrpc", "method", "id", "params", "extra"]))] = draw(junk)
        case 11:
            whole = json.dumps(message).encode()
            return whole[: draw(st.integers(0, len(whole)))]
        case 12:
            return draw(st.binary(max_size=60)).replace(b"\n", b" ")
        case 13:
            depth = draw(st.sampled_from([50, 150, 500, 20_000]))
            return b'{"jsonrpc":"2.0","id":0,"method":"x","params":' + b"[" * depth + b"]" * depth + b"}"
        case 14:
            message["params"] = params | {
                "huge": "x" * draw(st.sampled_from([5_000, 5_000, 5_000, 200_000, 1_100_000]))
            }
        case 15 if params:
            params[draw(st.sampled_from(sorted(params)))] = "x" * draw(st.sampled_from([*[5_000] * 9, 1_100_000]))
        case 16:
            message["id"] = draw(other_ids)
        case 17:
            message = {"jsonrpc": "2.0", "id": draw(other_ids), "result": draw(junk), "error": draw(junk)}
        case 18:
            return b"[" + json.dumps(message).encode() + b"]" * draw(st.integers(0, 2))
        case _:
            pass
    return json.dumps(message, ensure_ascii=draw(st.booleans())).encode(errors="replace")


class Batch(list[bytes]):
    """Lines to send in one write. Its repr is short, because hypothesis prints examples."""

    def __repr__(self) -> str:
        return f"<{len(self)} lines>"


def batches(cwd: Path, size: int) -> st.SearchStrategy[Batch]:
    """Batches of `size` lines."""
    return st.lists(lines(requests(str(cwd))), min_size=size, max_size=size).map(Batch)


def batches_v2(cwd: Path, size: int) -> st.SearchStrategy[Batch]:
    """Batches of `size` lines for version 2 of the protocol."""
    return st.lists(lines(requests_v2(str(cwd))), min_size=size, max_size=size).map(Batch)


PROGRAM = """
import faulthandler, sys
from crow.__main__ import main
faulthandler.enable()  # so that a crash says where it was
sys.exit(main())
"""


class HostileClient:
    """A process under attack. `send` raises AssertionError if a check fails."""

    arguments: Sequence[str] = ("acp",)
    hello: Mapping[str, Any] = {"protocolVersion": 1}
    login = "authenticate"
    forbidden: Sequence[str] = FORBIDDEN

    def __init__(self, home: Path, cwd: Path) -> None:
        self._cwd = cwd
        self.sent = 0
        self._lines: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._answers: Counter[int | str] = Counter()
        self._asked: Counter[int | str] = Counter()
        self._sent_ids: Counter[int | str] = Counter()
        self._results: dict[int | str, Any] = {}
        self._opened: list[str] = []
        self._stderr = b""
        environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), "CROW_HOME": str(home)}
        self._process = subprocess.Popen(
            [*command(PROGRAM), *self.arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment | {"CROW_MODEL": "offline", "OPENAI_API_KEY": SECRET},
            cwd=cwd,
        )
        self._readers = [threading.Thread(target=self._read_out), threading.Thread(target=self._read_err)]
        for reader in self._readers:
            reader.start()
        self._request("initialize", self.hello)
        self._sessions = [self._new_session() for _ in SESSIONS]

    def send(self, batch: Sequence[bytes]) -> None:
        """Send the lines in one write, check the output, then prompt in a new session."""
        out = []
        for line in batch:
            for number, name in enumerate(SESSIONS):
                line = line.replace(f'"{name}"'.encode(), json.dumps(self._sessions[number]).encode())
            self.sent += 1
            line = line.replace(b'"id": 0', b'"id": %d' % (self.sent + 1000), 1)
            request_id, is_request = named(line)
            if request_id is not None:
                self._sent_ids[request_id] += 1
                self._asked[request_id] += is_request
            out.append(line)
        self._write(b"\n".join(out) + b"\n")
        self._await(lambda: all(self._answers[one] for one, count in self._asked.items() if count))
        twice = {one: count for one, count in self._answers.items() if count > self._sent_ids[one]}
        assert not twice, f"answered more often than asked: {twice}"
        self._request(self.login, {"methodId": "configured"})  # a batch may have logged out
        session_id = self._new_session()
        params = {"sessionId": session_id, "prompt": [{"type": "text", "text": "say still here"}]}
        self._check_answer(self._request("session/prompt", params))
        self._opened.append(session_id)
        while self._opened:  # sessions that the batch opened
            self._request("session/close", {"sessionId": self._opened.pop()})
        assert self._stderr == b"", self._stderr

    def _check_answer(self, answer: Any) -> None:
        assert answer["stopReason"] == "end_turn"

    def close(self) -> None:
        """Close stdin and wait for the exit."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        code = self._process.wait(WAIT_S)
        for reader in self._readers:
            reader.join()
        for pipe in (self._process.stdout, self._process.stderr):
            assert pipe is not None
            pipe.close()
        assert (code, self._stderr) == (0, b""), (code, self._stderr)

    def _new_session(self) -> str:
        return str(self._request("session/new", {"cwd": str(self._cwd), "mcpServers": []})["sessionId"])

    def _request(self, method: str, params: Mapping[str, Any]) -> Any:
        self.sent += 1
        request_id = f"own-{self.sent}"
        self._sent_ids[request_id] += 1
        message = {"jsonrpc": "2.0", "id": request_id, "method": method, "params": params}
        self._write(json.dumps(message).encode() + b"\n")
        self._await(lambda: request_id in self._results)
        answer = self._results.pop(request_id)
        assert "result" in answer, answer
        return answer["result"]

    def _write(self, data: bytes) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(data)
        self._process.stdin.flush()

    def _await(self, done: Any) -> None:
        until = time.monotonic() + WAIT_S
        while not done():
            try:
                line = self._lines.get(timeout=max(0.0, until - time.monotonic()))
            except queue.Empty:
                missing = [one for one, count in self._asked.items() if count and not self._answers[one]]
                raise AssertionError(f"no answer to {missing[:10]} within {WAIT_S} s") from None
            assert line is not None, f"the process ended: {self._stderr!r}"
            self._take(line)

    def _take(self, line: bytes) -> None:
        assert len(line) <= 1_000_000, f"a line of {len(line)} bytes"
        message = json.loads(line)
        assert message["jsonrpc"] == "2.0", line
        if "method" in message:
            return
        assert ("result" in message) != ("error" in message), line
        if "error" in message:
            found = [word for word in self.forbidden if word in json.dumps(message)]
            assert not found, f"{found} in {line[:500]!r}"
        if message["id"] is not None:
            self._answers[message["id"]] += 1
            match message:
                case {"id": str(own)} if own.startswith("own-"):
                    self._results[message["id"]] = message
                case {"result": {"sessionId": str(session_id)}}:
                    self._opened.append(session_id)

    def _read_out(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put(None)

    def _read_err(self) -> None:
        assert self._process.stderr is not None
        self._stderr += self._process.stderr.read()


class HostileClientV2(HostileClient):
    """A process under attack in version 2 of the protocol."""

    arguments = ("acp", "--experimental-v2")
    hello = {"protocolVersion": 2, "info": INFO}  # noqa: RUF012 - the base class declares it as a Mapping
    login = "auth/login"
    forbidden = (*FORBIDDEN, "Internal error")

    def _check_answer(self, answer: Any) -> None:
        assert answer["messageId"]


def named(line: bytes) -> tuple[int | str | None, bool]:
    """The id that an answer to this line may have, and whether it must be answered."""
    try:
        message = json.loads(line)
    except (ValueError, RecursionError):
        return None, False
    if not isinstance(message, dict):
        return None, False
    request_id = message.get("id")
    if isinstance(request_id, str):
        request_id = re.sub("[\ud800-\udfff]", "\ufffd", request_id)
        if len(request_id) > 1000:
            return None, False
    if isinstance(request_id, bool) or not isinstance(request_id, int | str):
        return None, False
    return request_id, isinstance(message.get("method"), str) and line.count(b"[") <= 200
