"""A client of the draft of protocol version 2 that checks every line, and what such a client knows of a session."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

from jsonschema_rs import Draft202012Validator

from acp_check.schema import Side, violation, words_of
from tests.support.acp_client import Call, CrowProcess

OPEN = ("other", "unknown")
"""The titles of variants for values that later versions may add."""

SCHEMA = Path(__file__).parents[2] / "schemas" / "acp" / "v2.json"


class SchemaV2:
    """Checks the messages of one connection against the pinned schema.

    An agent's messages are checked strictly: they may have no member and no variant that the schema does not name.
    """

    def __init__(self) -> None:
        self._requests: dict[tuple[Side, Any], str] = {}

    def check(self, sender: Side, message: dict[str, Any]) -> None:
        """Checks the next message. :raises Violation: the message is not allowed."""
        receiver: Side = "client" if sender == "agent" else "agent"
        if "method" in message:
            kind = "Request" if "id" in message else "Notification"
            if "id" in message:
                self._requests[sender, message["id"]] = message["method"]
            self._check(sender, receiver, message["method"], kind, message["params"], message)
            return
        method = self._requests.pop((receiver, message["id"]), None)
        if "error" in message:
            check("Error", message["error"], message=message)
        elif method is not None:
            self._check(sender, sender, method, "Response", message["result"], message)

    def _check(self, sender: Side, side: Side, method: str, kind: str, value: Any, message: Any) -> None:
        if sender == "client":
            return  # tests send invalid requests on purpose
        name = methods().get((side, method, kind)) or methods().get(("protocol", method, kind))
        if name is None:
            raise violation(message, f"the {side} has no {kind.lower()} {method}")
        check(name, value, message=message)


def check(name: str, value: Any, *, is_strict: bool = True, message: Any = None) -> None:
    """Checks a value against a definition of the schema. :raises Violation: it is not valid."""
    if isinstance(value, dict) and isinstance(value.get("sessionId"), str):
        value = value | {"sessionId": "id"}  # any string is a valid id
    if problem := errors_in(json.dumps(value), name, is_strict):
        raise violation(message or value, problem)


@lru_cache(maxsize=1_000)
def errors_in(text: str, name: str, is_strict: bool) -> str:
    """What is wrong with a value in JSON, or an empty string. Connections repeat many messages."""
    return "; ".join(words_of(validator(name, is_strict), json.loads(text)))


@cache
def definitions(is_strict: bool) -> dict[str, Any]:
    """The definitions of the schema; if `is_strict`, without room for members and variants of later versions."""
    found: dict[str, Any] = json.loads(SCHEMA.read_text("utf-8"))["$defs"]
    if is_strict:
        _close(found)
        found["ErrorData"] = {"additionalProperties": True}  # any value
    return found


@cache
def methods() -> dict[tuple[str, str, str], str]:
    """Maps (side, method, kind) to the name of a definition."""
    return {
        (body["x-side"], body["x-method"], kind): name
        for name, body in definitions(False).items()
        for kind in ("Request", "Response", "Notification")
        if "x-method" in body and name.endswith(kind)
    }


@cache
def validator(name: str, is_strict: bool) -> Draft202012Validator:
    """The validator of one definition."""
    root: dict[str, Any] = {"$defs": definitions(is_strict), "$ref": f"#/$defs/{name}"}
    return Draft202012Validator(root | {"unevaluatedProperties": False} if is_strict else root)


def _close(node: Any) -> None:
    """Forbids members and variants that are not named, except in the parts of an allOf."""
    if isinstance(node, list):
        for item in node:
            _close(item)
    if not isinstance(node, dict):
        return
    for key, value in list(node.items()):
        if key == "anyOf" and all(isinstance(variant, dict) for variant in value):
            value[:] = [variant for variant in value if variant.get("title") not in OPEN]
        _close(value)
        values = list(value.values()) if key == "properties" else [value] if key == "items" else []
        for described in values:
            if isinstance(described, dict) and {"$ref", "allOf", "anyOf", "oneOf", "properties"} & described.keys():
                described["unevaluatedProperties"] = False


class CrowProcessV2(CrowProcess):
    """A running `crow acp --experimental-v2`."""

    arguments = ("acp", "--experimental-v2")

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._schema_v2 = SchemaV2()

    def _rules(self) -> tuple[Any, ...]:
        return (self._schema_v2,) if self.checks_schema else ()

    async def initialize(self, **capabilities: Any) -> Any:
        """Agrees on version 2."""
        info = {"name": "t", "version": "0"}
        return await self.request("initialize", {"protocolVersion": 2, "info": info, "capabilities": capabilities})

    async def resume(self, session_id: str, cwd: Path, **params: Any) -> Any:
        """Resumes a session with a replay."""
        start = {"sessionId": session_id, "cwd": str(cwd), "replayFrom": {"type": "start"}}
        return await self.request("session/resume", start | params)

    async def say(self, session_id: str, text: str) -> dict[str, Any]:
        """Prompts, and waits for the state after the turn."""
        since = len(self.log)
        await self.prompt(session_id, text)
        return await self.idle(session_id, since=since)

    async def idle(self, session_id: str, *, since: int = 0) -> dict[str, Any]:
        """Waits until the session is idle. Returns the update."""
        index = await self.wait_for_update("state_update", state="idle", since=since)
        update: dict[str, Any] = self.log[index].message["params"]["update"]
        assert self.log[index].message["params"]["sessionId"] == session_id
        return update

    def states(self, session_id: str, *, since: int = 0) -> list[str]:
        """The states of the session, in order."""
        return [update["state"] for update in self.updates(session_id, "state_update", since=since)]

    def is_answered(self, call: Call) -> bool:
        """Whether a request has got its response."""
        return call.outcome.done()


class SessionView:
    """What a client knows of a session: messages, calls, plans and the other items of the history, in order."""

    def __init__(self, updates: Iterable[dict[str, Any]] = ()) -> None:
        self.items: dict[tuple[str, str], Any] = {}
        self.terminals: dict[str, bytes] = {}
        for update in updates:
            self.apply(update)

    def apply(self, update: dict[str, Any]) -> None:
        """Applies an update as the draft says: what is omitted stays, null clears, chunks are appended."""
        match update:
            case {"sessionUpdate": "user_message" | "agent_message" | "agent_thought" as kind, "messageId": message_id}:
                self.items[kind, message_id] = list(update["content"])
            case {"sessionUpdate": kind, "messageId": message_id, "content": content}:
                self.items.setdefault((kind.removesuffix("_chunk"), message_id), []).append(content)
            case {"sessionUpdate": "tool_call_update", "toolCallId": call_id}:
                fields = {key: value for key, value in update.items() if key not in ("sessionUpdate", "toolCallId")}
                call = self.items.setdefault(("call", call_id), {})
                call |= fields
                for key in [key for key, value in call.items() if value is None]:
                    del call[key]
            case {"sessionUpdate": "plan_update", "plan": plan}:
                self.items["plan", str(len(self.items))] = plan["entries"]
            case {"sessionUpdate": "compaction_update", "compactionId": compaction_id}:
                self.items["compaction", compaction_id] = update.get("summary")
            case {"sessionUpdate": "terminal_update", "terminalId": terminal_id, "output": output}:
                self.terminals[terminal_id] = base64.b64decode(output["data"])
            case {"sessionUpdate": "terminal_output_chunk", "terminalId": terminal_id, "data": data}:
                self.terminals[terminal_id] = self.terminals.get(terminal_id, b"") + base64.b64decode(data)
