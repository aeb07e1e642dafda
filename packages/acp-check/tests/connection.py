"""The messages of the small agent: it reads lines and writes messages, and can break the rules for both."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, TypeAlias

Json: TypeAlias = dict[str, Any]


class Connection(ABC):
    """Reads and writes JSON-RPC. `write` takes its output, `broken` are the ids of the rules that it breaks."""

    def __init__(self, write: Callable[[bytes], None], *broken: str) -> None:
        self.is_dead = False
        self._write = write
        self._broken = broken
        self._buffer = b""
        self._slipped: set[str] = set()

    @abstractmethod
    def _request(self, message: Json) -> None:
        """Answer a request."""

    @abstractmethod
    def _notification(self, method: str, params: Json) -> None:
        """Take a notification."""

    @abstractmethod
    def _response(self, message: Json) -> None:
        """Take the response to a request of the agent."""

    def breaks(self, *rules: str) -> bool:
        """Whether the agent breaks one of these rules."""
        return any(rule in self._broken for rule in rules)

    def slips(self, rule: str) -> bool:
        """Whether to break this rule now. True once."""
        if rule in self._slipped or not self.breaks(rule):
            return False
        self._slipped.add(rule)
        return True

    def feed(self, data: bytes) -> None:
        """Take bytes from stdin."""
        if self.is_dead:
            return
        if self.breaks("framing.reads-pieces") and not data.endswith(b"\n"):
            return
        self._buffer += data
        *lines, self._buffer = self._buffer.split(b"\n")
        for line in lines[:1] if self.breaks("framing.reads-several") else lines:
            if not self.is_dead:
                self._take(line)

    def _take(self, line: bytes) -> None:
        if not line.strip():
            self._die("framing.reads-blank-line")
            return
        if len(line) > 65536:
            self._die("framing.reads-long-lines")
        if line.startswith(b" ") and self.breaks("framing.reads-any-json"):
            return
        try:
            text = line.decode()
        except UnicodeDecodeError:
            self._die("framing.survives-bad-bytes")
            self._refuse(None, -32700, "Not UTF-8")
            return
        try:
            message = json.loads(text)
        except ValueError:
            self._die("jsonrpc.survives-parse-error")
            if not self.breaks("jsonrpc.parse-error"):
                self._refuse(0 if self.breaks("jsonrpc.parse-error-id") else None, -32700, "Parse error")
            return
        if not self.is_dead:
            self._dispatch(message)

    def _die(self, rule: str) -> None:
        self.is_dead = self.is_dead or self.breaks(rule)

    def _dispatch(self, message: Any) -> None:
        if isinstance(message, list):
            self._die("jsonrpc.survives-batch")
            if self.breaks("jsonrpc.batch"):
                for each in message:
                    self._dispatch(each)
            else:
                self._refuse(None, -32600, "No batches")
            return
        if not isinstance(message, dict) or not isinstance(message.get("method", ""), str):
            self._die("jsonrpc.survives-invalid-request")
            if not self.breaks("jsonrpc.invalid-request"):
                self._refuse(message.get("id") if isinstance(message, dict) else None, -32600, "Invalid request")
            return
        if "method" not in message:
            self._response(message)
        elif "id" in message:
            self._request(message)
        else:
            self._notification(message["method"], message.get("params") or {})

    def _notify(self, method: str, params: Json) -> None:
        self._send({"jsonrpc": "2.0", "method": method, "params": params})

    def _respond(self, number: Any, result: Json, method: str = "") -> None:
        if self.breaks(f"shape.{method}"):
            result = result | {"_meta": 5}
        message = {"jsonrpc": "2.0", "id": number, "result": result}
        if self.slips("jsonrpc.result-or-error"):
            message["error"] = None
        self._send(message)
        if method == "session/list" and self.breaks("jsonrpc.one-response"):
            self._send(message)

    def _refuse(self, number: Any, code: int, words: str) -> None:
        if self.breaks("jsonrpc.error-code") and code == -32602:
            code = -32500
        error: Json = {"code": code, "message": "" if self.breaks("jsonrpc.error-message") else words}
        if self.breaks("shape.error"):
            error["code"] = str(code)
        self._send({"jsonrpc": "2.0", "id": number, "error": error})

    def _send(self, message: Json) -> None:
        if self.is_dead:
            return
        if self.breaks("jsonrpc.version") and message.get("method") == "session/update":
            del message["jsonrpc"]
        if self.slips("jsonrpc.members"):
            message = message | {"extra": 1}
        line = json.dumps(message, ensure_ascii=False).encode()
        if self.breaks("framing.utf8"):
            line = line.replace("ï".encode(), b"\xef")
        if self.slips("framing.no-byte-order-mark"):
            line = b"\xef\xbb\xbf" + line
        self._write(line + (b"\r\n" if self.breaks("framing.no-carriage-return") else b"\n"))
