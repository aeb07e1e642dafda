"""The scripts of the small agent: what it does in a prompt, until it ends or waits for the client."""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from acp_check.rules.turns import FLOOD_LINES, SPOKEN
from acp_check.run import EndpointLog
from tests.connection import Connection, Json

Script: TypeAlias = Generator[Any, Any, Any]

WAIT = object()
"""A script yields this to wait for the cancellation of its prompt."""

MIME_TYPES = {"image": "image/png", "audio": "audio/wav"}


@dataclass
class Disk:
    """What a process leaves for the next: for each session its updates, its directory, and the text of its prompts."""

    history: dict[str, list[Json]] = field(default_factory=dict)
    cwd: dict[str, str] = field(default_factory=dict)
    prompted: set[str] = field(default_factory=set)
    settings: dict[str, Json] = field(default_factory=dict)


@dataclass
class Prompt:
    """A running prompt."""

    number: Any
    session: str
    script: Script
    is_cancelled: bool = False
    is_waiting: bool = False


class Scripts(Connection):
    """The scripts, and the updates that they send."""

    def __init__(self, write: Callable[[bytes], None], disk: Disk, endpoint: EndpointLog, *broken: str) -> None:
        super().__init__(write, *broken)
        self._disk = disk
        self._endpoint = endpoint
        self._offered: Json = {}
        self._asked: dict[Any, Prompt] = {}
        self._numbers = 0
        self._prompts: dict[str, Prompt] = {}

    def _play_say(self, session: str, purpose: str) -> Script:
        message = self._next("m")
        thought = {"sessionUpdate": "agent_thought_chunk", "content": {"type": "text", "text": "Hm."}}
        self._update(session, **thought, messageId=message + "-thought")
        if self.breaks("message.roles"):
            message = self._disk.history[session][-1]["messageId"]
        if self.breaks("message.unique-ids"):
            message = "m-always"
        text = SPOKEN.replace("naïve", "naive") if self.breaks("prompt.text-shown") else SPOKEN
        pieces = [text[at : at + 9] for at in range(0, len(text), 9)]
        for number, piece in enumerate(pieces):
            self._say(session, piece, "m-between" if self.breaks("message.whole") and number == 1 else message)
        if self.slips("framing.numbers"):
            self._write(b'{"jsonrpc":"2.0","method":"_n","params":{"used":NaN}}\n')
        if self.slips("framing.unique-names"):
            self._write(b'{"jsonrpc":"2.0","jsonrpc":"2.0","method":"_twice"}\n')
        if self.slips("framing.no-surrogates"):
            self._write(b'{"jsonrpc":"2.0","method":"_half","params":{"text":"\\ud83d"}}\n')
        if self.slips("jsonrpc.method"):
            self._write(b'{"jsonrpc":"2.0","method":5}\n')
        if self.slips("jsonrpc.params"):
            self._write(b'{"jsonrpc":"2.0","method":"_list","params":[1]}\n')
        if self.slips("jsonrpc.known-request"):
            self._write(b'{"jsonrpc":"2.0","id":555555,"result":{}}\n')
        if self.slips("offered.methods"):
            self._notify("session/unheard", {"sessionId": session})
        if self.breaks("offered.extensions") and not self._offered:
            self._call("_ask_something", {}, None)
        if self.breaks("client.known-session"):
            self._call("fs/read_text_file", {"sessionId": "nobody", "path": "/a"}, None)
        currency = "dollars" if self.breaks("usage.currency") else "USD"
        self._update(
            session, sessionUpdate="usage_update", used=5, size=100, cost={"amount": 0.5, "currency": currency}
        )
        when = "soon" if self.breaks("info.times") else "2026-11-22T10:00:00Z"
        self._update(session, sessionUpdate="session_info_update", title="A title", updatedAt=when)
        for kind in MIME_TYPES:
            data = "not Base64!" if self.breaks("content.base64") else "AAAA"
            content = {"type": kind, "mimeType": MIME_TYPES[kind], "data": data}
            self._update(session, sessionUpdate="agent_message_chunk", content=content, messageId=self._next("m"))
        self._passing(session)
        return purpose, "end_turn"
        yield

    def _passing(self, session: str) -> None:
        """Updates that need a capability."""
        gates = self._offered.get("session") or {}
        if gates.get("notices") is not None or self.breaks("offered.notices"):
            self._update(session, sessionUpdate="notice", severity="info", title="Hello")
        if gates.get("compaction") is not None or self.breaks("offered.compaction"):
            compaction = {"compactionId": "c-1"}
            self._update(session, sessionUpdate="compaction_update", status="in_progress", **compaction)
            summary = {"type": "text", "text": "Short."}
            self._update(session, sessionUpdate="compaction_summary_chunk", content=summary, **compaction)
            self._update(session, sessionUpdate="compaction_update", status="completed", **compaction)
        if self.breaks("offered.plans"):
            self._update(session, sessionUpdate="plan_removed", id="p")
        if self.breaks("offered.subagents"):
            self._update(session, sessionUpdate="subagent_update", sessionId="child")
        if self.breaks("shape.update-kind"):
            self._update(session, sessionUpdate="agentMessageChunk", content={})

    def _play_hang(self, session: str, purpose: str) -> Script:
        self._endpoint.hung += 1
        if self.breaks("prompt.two-sessions"):
            self._say(session, SPOKEN, self._next("m"))
        self._say(session, "This never ends. ", self._next("m"))
        yield WAIT
        return purpose, "cancelled"

    def _play_flood(self, session: str, purpose: str) -> Script:
        lines = [f"line {number} {'-' * 60}\n" for number in range(FLOOD_LINES)]
        if self.breaks("prompt.slow-client"):
            del lines[100:200]
        self._say(session, "".join(lines), self._next("m"))
        return purpose, "end_turn"
        yield

    def _play_plan(self, session: str, purpose: str) -> Script:
        entries: list[Json] = [
            {"content": text, "priority": "medium", "status": "pending"} for text in ("Look", "Think", "Act")
        ]
        if self.breaks("plan.entries"):
            entries[0]["content"] = ""
        self._update(session, sessionUpdate="plan", entries=entries)
        first = entries[0] | {"status": "completed"}
        now = [first] if self.breaks("plan.whole") else [first, *entries[1:]]
        self._update(session, sessionUpdate="plan", entries=now)
        return purpose, "end_turn"
        yield

    def _play_tool(self, session: str, purpose: str) -> Script:
        call = "call-always" if self.breaks("tool.unique-ids") else self._next("call")
        if self.breaks("tool.id"):
            call = ""
        cwd = self._disk.cwd[session]
        path = "notes.txt" if self.breaks("tool.locations") else f"{cwd}/notes.txt"
        location: Json = {"path": path, "line": 0 if self.breaks("tool.lines") else 1}
        title = "" if self.breaks("tool.title") else "Write notes.txt"
        opened: Json = {"sessionUpdate": "tool_call", "toolCallId": call, "title": title, "kind": "edit"}
        opened |= {"status": "pending", "locations": [location]}
        if not self.breaks("tool.announced"):
            self._update(session, **opened)
        if self.breaks("tool.announced-once"):
            self._update(session, **opened)
        changed = {"sessionUpdate": "tool_call_update", "toolCallId": call}
        fs = self._offered.get("fs") or {}
        if fs.get("readTextFile") or self.breaks("offered.fs-read"):
            wanted: Json = {"sessionId": session, "path": f"{cwd}/acp-check.txt", "line": 1}
            if self.breaks("fs.read-path"):
                wanted["path"] = "acp-check.txt"
            if self.breaks("fs.read-line"):
                wanted["line"] = 0
            yield "fs/read_text_file", wanted
        if self.breaks("permission.waits"):
            self._call("session/request_permission", self._question(session, call), None)
            self._update(session, **changed, status="completed")
            return purpose, "end_turn"
        if self.breaks("permission.open-call"):
            self._update(session, **changed, status="failed")
        if self.breaks("jsonrpc.request-id-unique"):
            self._call("session/request_permission", self._question(session, call), None)
            self._numbers -= 1
        answer = yield "session/request_permission", self._question(session, call)
        outcome = (answer.get("result") or {}).get("outcome") or {}
        is_allowed = str(outcome.get("optionId")).startswith("yes")
        if not is_allowed:
            status = "completed" if self.breaks("permission.rejected") else "failed"
            self._update(session, **changed, status=status)
            self._record(session, opened | {"status": "failed"})
            return purpose, "end_turn"
        if not self.breaks("tool.in-progress"):
            self._update(session, **changed, status="in_progress")
        if fs.get("writeTextFile") or self.breaks("offered.fs-write"):
            target = "notes.txt" if self.breaks("fs.write-path") else f"{cwd}/notes.txt"
            yield "fs/write_text_file", {"sessionId": session, "path": target, "content": "notes"}
        if self._offered.get("terminal") or self.breaks("offered.terminal"):
            yield from self._use_terminal(session, changed, cwd)
        yield from self._elicit(session)
        diff = {"type": "diff", "path": f"{cwd}/notes.txt", "oldText": None, "newText": "notes"}
        if self.breaks("tool.diffs"):
            diff["path"] = "notes.txt"
        if not self.breaks("tool.final"):
            self._update(session, **changed, status="completed", content=[diff])
        if self.breaks("tool.ended"):
            self._update(session, **changed, status="in_progress")
            self._update(session, **changed, status="completed")
        if self.breaks("tool.terminals"):
            self._update(session, **changed, content=[{"type": "terminal", "terminalId": "nowhere"}])
        self._record(session, opened | {"status": "completed"})
        return purpose, "end_turn"

    def _question(self, session: str, call: str) -> Json:
        options = [
            {"optionId": "yes", "name": "Allow", "kind": "allow_once"},
            {"optionId": "no", "name": "Reject", "kind": "reject_once"},
        ]
        if self.breaks("permission.options"):
            options = []
        if self.breaks("permission.option-ids"):
            options.append({"optionId": "yes", "name": "Always", "kind": "allow_always"})
        return {"sessionId": session, "toolCall": {"toolCallId": call}, "options": options}

    def _use_terminal(self, session: str, changed: Json, cwd: str) -> Script:
        place = "." if self.breaks("terminal.cwd") else cwd
        answer = yield "terminal/create", {"sessionId": session, "command": "echo", "args": ["hi"], "cwd": place}
        if "result" not in answer:
            return
        terminal = answer["result"]["terminalId"]
        self._update(session, **changed, content=[{"type": "terminal", "terminalId": terminal}])
        used = {"sessionId": session, "terminalId": "terminal-99" if self.breaks("terminal.known") else terminal}
        yield "terminal/wait_for_exit", used
        yield "terminal/output", used
        yield "terminal/kill", used
        if not self.breaks("terminal.released"):
            yield "terminal/release", used
        if self.breaks("terminal.after-release"):
            yield "terminal/output", used

    def _elicit(self, session: str) -> Script:
        offered = self._offered.get("elicitation") or {}
        scope: Json = {} if self.breaks("elicitation.scope") else {"sessionId": session}
        if offered.get("form") is not None or self.breaks("offered.elicitation-form"):
            schema = {"type": "object", "properties": {"name": {"type": "string"}}}
            yield "elicitation/create", scope | {"mode": "form", "message": "Your name?", "requestedSchema": schema}
        if offered.get("url") is not None or self.breaks("offered.elicitation-url"):
            wanted = {"mode": "url", "message": "Log in", "url": "http://127.0.0.1/", "elicitationId": "e-1"}
            yield "elicitation/create", scope | wanted
            elicitation = "e-99" if self.breaks("elicitation.complete") else "e-1"
            self._notify("elicitation/complete", {"elicitationId": elicitation})

    def _record(self, session: str, body: Json) -> None:
        self._disk.history[session].append(body)

    def _next(self, what: str) -> str:
        self._disk.settings.setdefault("", {"count": 0})["count"] += 1
        return f"{what}-{self._disk.settings['']['count']}"

    def _say(self, session: str, text: str, message: str) -> None:
        body = {"sessionUpdate": "agent_message_chunk", "content": {"type": "text", "text": text}, "messageId": message}
        self._update(session, **body)
        if session in self._prompts or message != "m-late":
            self._record(session, body)

    def _update(self, session: str, **body: Any) -> None:
        if self.slips(f"shape.{body['sessionUpdate']}"):
            body["_meta"] = 5
        if body["sessionUpdate"] == "usage_update" and self.breaks("extensibility.meta"):
            body["_meta"] = "text"
        if body["sessionUpdate"] == "usage_update" and self.breaks("extensibility.no-custom-fields"):
            body["tokens"] = 5
        params: Json = {"sessionId": session, "update": body}
        if self.slips("shape.session/update"):
            params["sessionId"] = 5
        self._notify("session/update", params)

    def _call(self, method: str, params: Json, prompt: Prompt | None) -> None:
        self._numbers += 1
        number: Any = self._numbers
        if self.breaks("jsonrpc.request-id"):
            number = self._numbers + 0.5
        if prompt is not None:
            self._asked[number] = prompt
        if self.slips(f"shape.{method}"):
            params = params | {"_meta": 5}
        self._send({"jsonrpc": "2.0", "id": number, "method": method, "params": params})
