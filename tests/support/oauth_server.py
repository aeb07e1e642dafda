"""An MCP server on loopback that asks for OAuth, with its authorization server, and a browser that logs in there."""

from __future__ import annotations

import base64
import hashlib
import json
import queue
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlencode, urlsplit

Answer = tuple[int, dict[str, str], bytes]


class OAuthServer:
    """The state of both servers. A test changes `metadata`, `resource` and `answers` to make them misbehave.

    `answers` maps a path to a function of the form's or query's values that replaces the usual answer.
    """

    def __init__(self, port: int) -> None:
        self.base = f"http://127.0.0.1:{port}"
        self.url = f"{self.base}/mcp"
        self.lock = threading.Lock()
        self.metadata: dict[str, Any] = {
            "issuer": self.base,
            "authorization_endpoint": f"{self.base}/authorize",
            "token_endpoint": f"{self.base}/token",
            "registration_endpoint": f"{self.base}/register",
            "revocation_endpoint": f"{self.base}/revoke",
            "code_challenge_methods_supported": ["S256"],
            "token_endpoint_auth_methods_supported": ["none"],
        }
        self.resource: dict[str, Any] = {"resource": self.url, "authorization_servers": [self.base]}
        self.answers: dict[str, Callable[[Mapping[str, str]], Answer]] = {}
        self.valid: dict[str, str] = {}
        """Maps each valid access token to its scope."""
        self.refresh_tokens: set[str] = set()
        self.tool_scope = ""
        self.expires_in: int | None = 3600
        self.gives_refresh = True
        self.seen: list[str] = []
        """The paths of the requests to the authorization server."""
        self.forms: list[dict[str, str]] = []
        self.authorizations: list[str | None] = []
        """The Authorization headers that reached the MCP server."""
        self.events: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        """What the stream of the older SSE transport sends; None ends it."""
        self._codes: dict[str, dict[str, str]] = {}
        self._count = 0

    def next(self, kind: str) -> str:
        """A new token or code."""
        with self.lock:
            self._count += 1
            return f"{kind}-secret-{self._count:04}"

    def expire(self) -> None:
        """Make all access tokens invalid."""
        self.valid.clear()

    # The authorization server

    def answer(self, path: str, values: Mapping[str, str]) -> Answer:
        """The answer of the authorization server."""
        self.seen.append(path)
        if path in self.answers:
            return self.answers[path](values)
        match path:
            case "/.well-known/oauth-protected-resource/mcp":
                return as_json(self.resource)
            case "/.well-known/oauth-authorization-server":
                return as_json(self.metadata)
            case "/register":
                return as_json({"client_id": self.next("client"), "redirect_uris": [values["redirect_uri"]]}, 201)
            case "/authorize":
                code = self.next("code")
                self._codes[code] = dict(values)
                back = {"code": code, "state": values["state"], "iss": self.base}
                return 302, {"Location": f"{values['redirect_uri']}?{urlencode(back)}"}, b""
            case "/token":
                self.forms.append(dict(values))
                return self._token(values)
            case "/revoke":
                self.forms.append(dict(values))
                self.valid.pop(values["token"], None)
                self.refresh_tokens.discard(values["token"])
                return as_json({})
        return 404, {}, b""

    def _token(self, values: Mapping[str, str]) -> Answer:
        scope = ""
        if values["grant_type"] == "refresh_token":
            with self.lock:
                if values["refresh_token"] not in self.refresh_tokens:
                    return as_json({"error": "invalid_grant"}, 400)
                self.refresh_tokens.remove(values["refresh_token"])
        else:
            asked = self._codes.pop(values["code"])
            digest = hashlib.sha256(values["code_verifier"].encode()).digest()
            if base64.urlsafe_b64encode(digest).decode().rstrip("=") != asked["code_challenge"]:
                return as_json({"error": "invalid_grant"}, 400)
            scope = asked.get("scope", "")
        token = self.next("access")
        self.valid[token] = scope
        given: dict[str, Any] = {"access_token": token, "token_type": "Bearer"}
        if self.expires_in is not None:
            given["expires_in"] = self.expires_in
        if self.gives_refresh:
            given["refresh_token"] = self.next("refresh")
            self.refresh_tokens.add(given["refresh_token"])
        return as_json(given)

    # The MCP server

    def call(self, authorization: str | None, message: Mapping[str, Any]) -> Answer:
        """The answer of the MCP server."""
        self.authorizations.append(authorization)
        token = (authorization or "").removeprefix("Bearer ")
        where = f'resource_metadata="{self.base}/.well-known/oauth-protected-resource/mcp"'
        if token not in self.valid:
            return 401, {"WWW-Authenticate": f"Bearer {where}"}, b""
        if message["method"] == "tools/call" and self.tool_scope not in self.valid[token]:
            challenge = f'Bearer error="insufficient_scope", scope="{self.tool_scope}", {where}'
            return 403, {"WWW-Authenticate": challenge}, b""
        result: dict[str, Any] = {"resultType": "complete", "ttlMs": 0, "cacheScope": "private"}
        match message["method"]:
            case "server/discover":
                result |= {"supportedVersions": ["2026-07-28"], "capabilities": {"tools": {}}}
                result["serverInfo"] = {"name": "locked", "version": "1"}
            case "initialize":
                result |= {"protocolVersion": "2025-06-18", "capabilities": {"tools": {}}}
                result["serverInfo"] = {"name": "locked", "version": "1"}
            case "tools/list":
                result["tools"] = [{"name": "whoami", "inputSchema": {"type": "object"}}]
            case "tools/call":
                result["content"] = [{"type": "text", "text": f"you are {token}"}]
            case method:
                error = {"code": -32601, "message": method}
                return as_json({"jsonrpc": "2.0", "id": message.get("id"), "error": error}, 400)
        return as_json({"jsonrpc": "2.0", "id": message.get("id"), "result": result})


def as_json(value: object, status: int = 200) -> Answer:
    """A JSON answer."""
    return status, {"Content-Type": "application/json"}, json.dumps(value).encode()


class Handler(BaseHTTPRequestHandler):
    state: OAuthServer

    def do_GET(self) -> None:
        parts = urlsplit(self.path)
        if parts.path == "/sse":
            return self.stream()
        if parts.path == "/mcp":
            return self.reply((405, {}, b""))
        return self.reply(self.state.answer(parts.path, values_in(parts.query)))

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"] or 0)).decode()
        path = urlsplit(self.path).path
        if path == "/mcp":
            return self.reply(self.state.call(self.headers["Authorization"], json.loads(body)))
        if path == "/messages":
            message = json.loads(body)
            status, headers, answer = self.state.call(self.headers["Authorization"], message)
            if "id" in message and answer:
                self.state.events.put(answer)
            return self.reply((202 if answer else status, headers, b""))
        if self.headers["Content-Type"] == "application/json":
            return self.reply(self.state.answer(path, {"redirect_uri": json.loads(body)["redirect_uris"][0]}))
        return self.reply(self.state.answer(path, values_in(body)))

    def stream(self) -> None:
        """Speak the older SSE transport: answers of the MCP server come as events."""
        status, headers, body = self.state.call(self.headers["Authorization"], {"method": "tools/list"})
        if status != 200:
            return self.reply((status, headers, body))
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        self.wfile.write(b"event: endpoint\ndata: /messages\n\n")
        while (event := self.state.events.get()) is not None:
            self.wfile.write(b"event: message\ndata: " + event + b"\n\n")
        return None

    def reply(self, answer: Answer) -> None:
        status, headers, body = answer
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


def values_in(query: str) -> dict[str, str]:
    return {name: values[0] for name, values in parse_qs(query).items()}


@contextmanager
def oauth_server() -> Iterator[OAuthServer]:
    """Run both servers on one port."""

    class Own(Handler):
        pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Own) as server:
        Own.state = OAuthServer(server.server_port)
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield Own.state
        finally:
            server.shutdown()
            thread.join()


def visit(page: str) -> int:
    """Do what a browser does: open a page and follow its redirects. Return the last status. Blocks."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(page, timeout=60) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code
