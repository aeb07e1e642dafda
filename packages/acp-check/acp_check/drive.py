"""Sends an agent all the messages that the check needs to apply the rules."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from acp_check.client import CheckClient, Clock, OutOfTime, SentRequest, TimeLimits
from acp_check.errors import AgentEnded
from acp_check.process import AgentIO
from acp_check.rules.settings import choices, options_of
from acp_check.run import EndpointLog, Run

_EVERYTHING: dict[str, Any] = {
    "fs": {"readTextFile": True, "writeTextFile": True},
    "terminal": True,
    "elicitation": {"form": {}, "url": {}},
    "session": {"configOptions": {"boolean": {}}, "notices": {}, "compaction": {}},
    "_meta": {"acp-check": True},
}
_CLIENT_INFO = {"name": "acp-check", "title": "ACP check", "version": "1"}
_NOWHERE = "acp-check-no-such-session"
_IMAGE = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
_AUDIO = "UklGRiQAAABXQVZFZm10IBAAAAABAAEAQB8AAEAfAAABAAgAZGF0YQAAAAA="
_WITHHELD = (
    ("session/load", "loadSession"),
    ("session/resume", "sessionCapabilities.resume"),
    ("session/list", "sessionCapabilities.list"),
    ("session/close", "sessionCapabilities.close"),
    ("session/delete", "sessionCapabilities.delete"),
    ("session/fork", "sessionCapabilities.fork"),
    ("logout", "auth.logout"),
)


@dataclass(kw_only=True)
class Drive:
    """A check of one agent."""

    start: Callable[[str], AgentIO]
    """Starts a new agent process for each connection. Its argument is the name of the connection."""
    workspace: Path
    endpoint: EndpointLog
    limits: TimeLimits = field(default_factory=TimeLimits)
    server: dict[str, Any] | None = None
    """The MCP server for new sessions, or None for no server."""
    trace: Callable[[bytes], None] | None = None
    """Gets each line of the recording."""
    report: Callable[[str], None] = lambda _: None
    """Gets the name of each part of the check, and messages for the user."""
    signalled: Callable[[], int] = lambda: 0
    """Returns the number of the last signal that arrived, or 0."""

    def run(self) -> Run:
        """Open all connections, one after another, and send the messages.

        :raises CheckStopped: a signal arrived.
        :raises AgentEnded: the agent ended before it answered the first `initialize`.
        """
        self._clock = Clock(self.limits, self.trace, self.signalled)
        self._clients: list[CheckClient] = []
        is_complete = False
        try:
            self._connect()
            is_complete = True
        except OutOfTime:
            self.report(f"The check ends early: it took more than {self.limits.total_s:g} s.")
        finally:
            for client in self._clients:
                client.close(at_once=True)
        connections = [client.connection for client in self._clients]
        return Run(connections=connections, endpoint=self.endpoint, is_complete=is_complete)

    def _connect(self) -> None:
        session, resumed = self._main()
        if not self._clients[0].initialized:
            return  # nothing else can be asked of this agent
        self._versions()
        self._bare()
        self._broken()
        if session is not None:
            self._load(session)
        if resumed is not None:
            self._resume(resumed)

    def _open(self, name: str) -> CheckClient:
        self.report(name)
        client = CheckClient(name, self.start(name), self._clock, self.endpoint, self.workspace)
        self._clients.append(client)
        return client

    def _initialize(self, client: CheckClient, purpose: str, offered: dict[str, Any], version: int = 1) -> bool:
        params = {"protocolVersion": version, "clientCapabilities": offered, "clientInfo": _CLIENT_INFO}
        client.offered = offered
        client.initialized = client.ask("initialize", params, purpose) or {}
        return bool(client.initialized)

    def _new(self, client: CheckClient, purpose: str, **more: Any) -> str | None:
        params = {"cwd": str(self.workspace), "mcpServers": []} | more
        result = client.ask("session/new", params, purpose)
        session = (result or {}).get("sessionId")
        if result is None or not isinstance(session, str):
            return None
        client.opened[session] = result
        return session

    def _prompt(
        self, client: CheckClient, session: str, word: str, purpose: str, *more: dict[str, Any], **members: Any
    ) -> SentRequest:
        text = f"acp-check:{word} This is a check of the protocol. ({purpose})"
        blocks = [{"type": "text", "text": text}, *more]
        return client.request("session/prompt", {"sessionId": session, "prompt": blocks} | members, purpose)

    def _finish(
        self, client: CheckClient, session: str, word: str, purpose: str, *more: dict[str, Any], **members: Any
    ) -> None:
        client.wait(self._prompt(client, session, word, purpose, *more, **members))

    def _main(self) -> tuple[str | None, str | None]:
        """Open the main connection, on which the client offers every capability, and make most of the checks there.

        Return two session ids: the session to load and the session to resume. An id is None if the agent cannot load
        or resume sessions, or if the session was not created.
        """
        client = self._open("main")
        if not self._initialize(client, "initialize", _EVERYTHING):
            client.close()
            initialize = client.connection.initialize
            if client.connection.died_after is not None and initialize is not None and not initialize.is_answered:
                raise AgentEnded(client.connection.exit.code if client.connection.exit else None)
            return None, None
        capabilities = client.initialized.get("agentCapabilities")
        capabilities = capabilities if isinstance(capabilities, dict) else {}
        servers = [self.server] if self.server is not None else []
        first = self._new(client, "new-with-server", mcpServers=servers)
        second = self._new(client, "new")
        third = self._new(client, "new-with-meta", _meta={"acp-check": {"any": ["content", 1, None]}})
        can_load, can_resume = _has(capabilities, "loadSession"), _has(capabilities, "sessionCapabilities.resume")
        if _has(capabilities, "sessionCapabilities.additionalDirectories"):
            self._new(client, "new-with-directories", additionalDirectories=[str(self.workspace.parent)])
        self._requests(client, first)
        self._unknown_sessions(client, capabilities)
        if first is not None:
            self._prompts(client, first, capabilities)
            self._cancels(client, first, second)
            self._lists(client, capabilities)
        if second is not None:
            self._settings(client, second)
            self._close(client, second, capabilities)
        if third is not None:
            self._deletes(client, third, capabilities)
            self._withheld(client, capabilities)
        if first is not None and _has(capabilities, "sessionCapabilities.fork"):
            client.ask("session/fork", {"sessionId": first, "cwd": str(self.workspace), "mcpServers": []}, "fork")
        client.close()
        return (first if can_load else None), (first if can_resume else None)

    def _requests(self, client: CheckClient, session: str | None) -> None:
        """Send requests with unusual ids, unknown methods and invalid params."""
        for purpose, request_id in (
            ("id-zero", 0),
            ("id-large", (1 << 53) - 1),
            ("id-string", "request-a"),
            ("id-number-string", "7"),
            ("id-unicode", "é漢字🐦\u2028"),
        ):
            client.ask("_acp_check/id", {}, purpose, request_id)
        client.ask("session/acp_check_unknown", {}, "unknown-method")
        client.ask("_acp_check/unknown", {}, "unknown-extension")
        for method in ("_acp_check/note", "session/acp_check_note"):
            client.notify(method, {}, "unknown-notification")
            client.barrier()
        client.send({"jsonrpc": "2.0", "id": 987654, "result": {}}, "unknown-response")
        client.barrier()
        client.ask("session/new", {"mcpServers": []}, "missing-params")
        client.ask("session/new", {"cwd": ["no", "text"], "mcpServers": []}, "wrong-params")
        if session is not None:
            client.ask("session/prompt", {"sessionId": session}, "missing-params")
            client.ask("session/prompt", {"sessionId": session, "prompt": "no array"}, "wrong-params")
        if client.initialized.get("authMethods"):
            client.ask("authenticate", {"methodId": "acp-check-no-such-method"}, "auth-unknown")

    def _unknown_sessions(self, client: CheckClient, capabilities: dict[str, Any]) -> None:
        client.wait(self._prompt(client, _NOWHERE, "say", "unknown-session"))
        opening = {"sessionId": _NOWHERE, "cwd": str(self.workspace), "mcpServers": []}
        if _has(capabilities, "loadSession"):
            client.ask("session/load", opening, "load-unknown")
        if _has(capabilities, "sessionCapabilities.resume"):
            client.ask("session/resume", opening, "resume-unknown")
        client.notify("session/cancel", {"sessionId": _NOWHERE}, "cancel-unknown")
        client.barrier()

    def _prompts(self, client: CheckClient, session: str, capabilities: dict[str, Any]) -> None:
        self._finish(client, session, "say", "prompt-say")
        client.settle()
        link = {"type": "resource_link", "uri": (self.workspace / "acp-check.txt").as_uri(), "name": "acp-check.txt"}
        self._finish(client, session, "say", "prompt-link", link)
        self._finish(client, session, "say", "prompt-with-meta", _meta={"acp-check": {"any": ["content", 1, None]}})
        self._finish(client, session, "tool", "prompt-tool")
        self._finish(client, session, "say", "prompt-again")
        if client.questions:
            client.answer = "reject"
            self._finish(client, session, "tool", "prompt-reject")
            client.answer = "fail"
            self._finish(client, session, "tool", "prompt-question-fails")
        client.answer, client.fails = "allow", True
        if client.called & {"fs/read_text_file", "fs/write_text_file"}:
            self._finish(client, session, "tool", "prompt-client-fails")
        client.fails = False
        self._finish(client, session, "plan", "prompt-plan")
        resource = {"uri": "file:///acp-check/notes.txt", "mimeType": "text/plain", "text": "notes"}
        for kind, capability, block in (
            ("image", "image", {"type": "image", "mimeType": "image/png", "data": _IMAGE}),
            ("audio", "audio", {"type": "audio", "mimeType": "audio/wav", "data": _AUDIO}),
            ("resource", "embeddedContext", {"type": "resource", "resource": resource}),
        ):
            if _has(capabilities, f"promptCapabilities.{capability}"):
                self._finish(client, session, "say", f"prompt-{kind}", block)
        if self.endpoint.requests:
            client.io.pause()
            flood = self._prompt(client, session, "flood", "prompt-slow")
            end = time.monotonic() + self.limits.slow_s
            client.pump(lambda: time.monotonic() >= end, self.limits.slow_s)
            client.io.resume()
            client.wait(flood)

    def _begin(self, client: CheckClient, session: str, word: str, purpose: str) -> SentRequest:
        """Send a prompt and wait until it has begun."""
        begun = client.watch(session)
        sent = self._prompt(client, session, word, purpose)
        client.pump(lambda: sent.response is not None or begun(), self._clock.answer_s())
        return sent

    def _cancels(self, client: CheckClient, session: str, other: str | None) -> None:
        hanging = self._begin(client, session, "hang", "prompt-cancel")
        if hanging.response is None:
            client.ask("_acp_check/while_prompt", {}, "while-prompt")
        waiting = [] if other is None else [self._prompt(client, other, "say", "prompt-other")]
        for _ in range(2):
            client.notify("session/cancel", {"sessionId": session})
        client.wait(hanging, *waiting)
        client.settle()
        self._finish(client, session, "say", "prompt-after-cancel")
        client.notify("session/cancel", {"sessionId": session}, "cancel-idle")
        client.barrier()
        self._finish(client, session, "say", "prompt-after-idle-cancel")
        if client.questions:
            client.answer = "hold"
            asked = client.questions
            held = self._prompt(client, session, "tool", "prompt-cancel-permission")
            client.pump(lambda: held.response is not None or client.questions > asked, self._clock.answer_s())
            client.settle()  # an agent that does not wait for the answer shows it now
            client.notify("session/cancel", {"sessionId": session})
            client.release_held()
            client.answer = "allow"
            client.wait(held)
            client.settle()
        hanging = self._begin(client, session, "hang", "prompt-cancel-request")
        request_id = next(each.message["id"] for each in client.connection.lines if each.line == hanging.line)
        client.notify("$/cancel_request", {"requestId": request_id})
        client.pump(lambda: hanging.response is not None, self.limits.optional_s)
        if hanging.response is None:  # agents may ignore $/cancel_request, but the prompt must end
            client.notify("session/cancel", {"sessionId": session})
        client.wait(hanging)
        client.settle()

    def _lists(self, client: CheckClient, capabilities: dict[str, Any]) -> None:
        if _has(capabilities, "sessionCapabilities.list"):
            client.ask("session/list", {}, "list")
            client.ask("session/list", {"cwd": str(self.workspace)}, "list-cwd")
            client.ask("session/list", {"cwd": str(self.workspace / "nothing" / "here")}, "list-empty")
            client.ask("session/list", {"cursor": "acp-check-no-such-cursor"}, "list-bad-cursor")

    def _settings(self, client: CheckClient, session: str) -> None:
        """Set each mode, change each option once, and then restore the earlier values."""
        opened = client.opened[session]
        modes = opened.get("modes")
        if isinstance(modes, dict):
            ids = [mode.get("id") for mode in options_of(modes.get("availableModes"))]
            for mode in [*ids, modes.get("currentModeId")]:
                client.ask("session/set_mode", {"sessionId": session, "modeId": mode}, "set-mode")
                client.barrier()
            client.ask("session/set_mode", {"sessionId": session, "modeId": "acp-check-none"}, "set-unknown-mode")
        selects = [option for option in options_of(opened.get("configOptions")) if len(choices(option)) > 1]
        for option in selects[:8]:
            before = option.get("currentValue")
            for value in (next((each for each in choices(option) if each != before), before), before):
                client.ask(
                    "session/set_config_option",
                    {"sessionId": session, "configId": option.get("id"), "value": value},
                    "set-option",
                )
        if selects:
            for purpose, name, value in (
                ("set-unknown-option", "acp-check-none", "on"),
                ("set-unknown-value", selects[0].get("id"), "acp-check-none"),
            ):
                params = {"sessionId": session, "configId": name, "value": value}
                client.ask("session/set_config_option", params, purpose)
        client.settle()

    def _close(self, client: CheckClient, session: str, capabilities: dict[str, Any]) -> None:
        if _has(capabilities, "sessionCapabilities.close"):
            hanging = self._begin(client, session, "hang", "prompt-close")
            closing = client.request("session/close", {"sessionId": session}, "close")
            client.wait(hanging, closing)

    def _deletes(self, client: CheckClient, session: str, capabilities: dict[str, Any]) -> None:
        if _has(capabilities, "sessionCapabilities.delete"):
            self._finish(client, session, "say", "prompt-before-delete")
            client.ask("session/delete", {"sessionId": session}, "delete")
            if _has(capabilities, "sessionCapabilities.list"):
                client.ask("session/list", {"cwd": str(self.workspace)}, "list-after-delete")
            client.ask("session/delete", {"sessionId": session}, "delete-again")
            client.ask("session/delete", {"sessionId": _NOWHERE}, "delete-unknown")

    def _withheld(self, client: CheckClient, capabilities: dict[str, Any]) -> None:
        missing = [method for method, capability in _WITHHELD if not _has(capabilities, capability)]
        session = self._new(client, "") if missing else None
        for method in missing if session is not None else ():
            opening: dict[str, Any] = {"sessionId": session, "cwd": str(self.workspace), "mcpServers": []}
            client.ask(method, {} if method in ("session/list", "logout") else opening, "unadvertised")

    def _versions(self) -> None:
        """Open connections that ask for protocol versions that no agent supports."""
        for name, version, purpose, offered in (
            ("newer", 65535, "initialize-newer", {"acpCheckFuture": {"any": True}}),
            ("older", 0, "initialize-zero", {}),
        ):
            client = self._open(name)
            self._initialize(client, purpose, offered, version)
            client.close()

    def _bare(self) -> None:
        """Open a connection on which the client offers no capability, and close it during a prompt."""
        client = self._open("bare")
        client.ask("initialize", {"protocolVersion": 1}, "initialize-minimal")
        session = self._new(client, "new")
        if session is not None:
            self._finish(client, session, "say", "prompt-say")
            self._finish(client, session, "tool", "prompt-tool")
            self._begin(client, session, "hang", "prompt-left")
        client.close()

    def _broken(self) -> None:
        """Send unusual and broken lines. If the agent exits after a line, it is started again for the next line."""
        client: CheckClient | None = None
        for number, line in enumerate(self._lines(), 1):
            if client is None or client.has_ended:
                if client is not None:
                    client.close()
                client = self._open("broken" if number == 1 else f"broken-{number}")
                self._initialize(client, "", {})
            line(client)
            client.barrier()
        if client is not None:
            client.close()

    def _lines(self) -> Iterator[Callable[[CheckClient], object]]:
        unknown = "_acp_check/line"
        spaced = b'  { "params" : { } ,\t"method":"_acp\\u005fcheck/line" , "id" : 31 ,"jsonrpc" : "2.0" }  '
        yield lambda client: client.wait(client.request(unknown, {}, "in-pieces", cut=20))
        yield self._at_once
        yield lambda client: client.wait(client.request_bytes(spaced, 31, "spaced"))
        yield lambda client: client.ask(unknown, {"text": "x" * (1 << 20)}, "long-line")
        yield lambda client: client.send_bytes(b"", "blank-line")
        yield lambda client: client.send_bytes(b'{"jsonrpc": "2.0", "id": 32, "method": ', "broken-json")
        yield lambda client: client.send({"jsonrpc": "2.0", "id": 33, "method": 5}, "bad-method")
        yield lambda client: client.send("a text", "not-an-object")
        calls: list[dict[str, Any]] = [
            {"jsonrpc": "2.0", "id": number, "method": unknown, "params": {}} for number in (34, 35)
        ]
        yield lambda client: client.send(calls, "batch")
        yield lambda client: client.send_bytes(b'{"jsonrpc": "2.0", "method": "_\xff\xfe"}', "bad-bytes")

    def _at_once(self, client: CheckClient) -> None:
        with client.single_write():
            pending = [client.request("_acp_check/line", {}, "at-once") for _ in range(3)]
        client.wait(*pending)

    def _load(self, session: str) -> None:
        client = self._open("load")
        if self._initialize(client, "", _EVERYTHING):
            params = {"sessionId": session, "cwd": str(self.workspace), "mcpServers": []}
            if client.ask("session/load", params, "load") is not None:
                client.settle()
                self._finish(client, session, "say", "prompt-after-load")
        client.close()

    def _resume(self, session: str) -> None:
        client = self._open("resume")
        if self._initialize(client, "", _EVERYTHING):
            params = {"sessionId": session, "cwd": str(self.workspace), "mcpServers": []}
            if client.ask("session/resume", params, "resume") is not None:
                client.settle()
                self._finish(client, session, "say", "prompt-after-resume")
        client.close()


def _has(capabilities: dict[str, Any], path: str) -> bool:
    value: Any = capabilities
    for name in path.split("."):
        value = value.get(name) if isinstance(value, dict) else None
    return value is not None and value is not False
