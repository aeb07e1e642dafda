"""The pinned ACP schema as a judge of single messages: each by its method, in the direction it was sent.

Strategy: what crow sends is judged strictly (no member that the schema does not name, at any depth; an update by its
own kind), what a client sends as the schema says. Responses are judged by the method of the request they answer, so a
judge remembers what was asked. Members of the unstable schema pass in responses only.
"""

from __future__ import annotations

import copy
import json
from functools import cache
from pathlib import Path
from typing import Any, Literal, TypeAlias

from jsonschema import Draft202012Validator

Side: TypeAlias = Literal["agent", "client"]

__all__ = ["Judge", "SchemaViolation", "Side", "check_update", "fault", "judge", "served_by"]

UNSTABLE = ("session/fork",)
"""Methods that crow serves though only the unstable schema has them."""
ROOT_KEYS = {"jsonrpc", "id", "method", "params", "result", "error"}


class SchemaViolation(Exception):
    """A message that the protocol does not allow."""


class Judge:
    """Checks every message of one connection in the order they were sent."""

    def __init__(self) -> None:
        self._asked: dict[tuple[Side, Any], str] = {}

    def check(self, sender: Side, message: Any) -> None:
        """:raises WireFault: what is wrong, and where."""
        receiver: Side = "client" if sender == "agent" else "agent"
        if not isinstance(message, dict):
            if sender == "client":
                return  # the agent's to answer
            raise fault(message, "no object")
        if message.get("jsonrpc") != "2.0":
            raise fault(message, 'jsonrpc is not "2.0"')
        if sender == "agent" and (unknown := message.keys() - ROOT_KEYS):
            raise fault(message, f"members at the root that are not JSON-RPC's: {sorted(unknown)}")
        if "method" in message:
            self._check_call(sender, receiver, message)
        else:
            self._check_response(sender, receiver, message)

    def unanswered(self) -> tuple[str, ...]:
        """The requests that wait for their answer, as `method (id)`."""
        return tuple(f"{method} ({number})" for (_, number), method in self._asked.items())

    def _check_call(self, sender: Side, receiver: Side, message: dict[str, Any]) -> None:
        method = message["method"]
        if not isinstance(method, str):
            raise fault(message, "method is no string")
        if "id" in message:
            if isinstance(message["id"], bool) or not isinstance(message["id"], int | str):
                raise fault(message, "a request's id is a number or a string")
            self._asked[sender, message["id"]] = method
        if method.startswith("_"):
            return
        kind = "Request" if "id" in message else "Notification"
        name = definition(receiver, method, kind)
        if name is None:
            raise fault(message, f"the {receiver} serves no {kind.lower()} of this name")
        if method == "session/update":
            params = message.get("params")
            if not isinstance(params, dict) or params.keys() != {"sessionId", "update"}:
                raise fault(message, "session/update has the members sessionId and update")
            if not isinstance(params["sessionId"], str):
                raise fault(message, "sessionId is no string")
            check_update(params["update"], message)
            return
        judge(name, message.get("params"), message, strict=sender == "agent")

    def _check_response(self, sender: Side, receiver: Side, message: dict[str, Any]) -> None:
        if "id" not in message or ("result" in message) == ("error" in message):
            raise fault(message, "neither a call nor a response: one of result and error, and an id")
        if "error" in message:
            judge("Error", message["error"], message, strict=sender == "agent")
            if message["id"] is not None:
                self._asked.pop((receiver, message["id"]), None)
            return
        method = self._asked.pop((receiver, message["id"]), None)
        if method is None:
            raise fault(message, "it answers nothing that was asked, or answers twice")
        name = None if method.startswith("_") else definition(sender, method, "Response")
        if name is not None:
            judge(name, message["result"], message, strict=sender == "agent")


def check_update(update: Any, message: Any = None) -> None:
    """One `session/update` payload by its kind, strictly. :raises WireFault: what is wrong."""
    variants = {
        variant["properties"]["sessionUpdate"]["const"]: index
        for index, variant in enumerate(schema("schema.json")["$defs"]["SessionUpdate"]["oneOf"])
    }
    kind = update.get("sessionUpdate") if isinstance(update, dict) else None
    if kind not in variants:
        raise fault(message or update, f"there is no update of kind {kind!r}")
    if is_plain_chunk(update):
        return
    errors = best(validator(f"SessionUpdate/oneOf/{variants[kind]}", strict=True), update)
    if errors:
        raise fault(message or update, errors)


def is_plain_chunk(update: dict[str, Any]) -> bool:
    """A chunk of plain text with a message id: by far the most frequent update, and plainly valid."""
    match update:
        case {
            "sessionUpdate": "user_message_chunk" | "agent_message_chunk" | "agent_thought_chunk",
            "content": {"type": "text", "text": str(), **others},
            "messageId": str(),
            **rest,
        }:
            return not others and not rest
        case _:
            return False


def judge(name: str, value: Any, message: Any, *, strict: bool) -> None:
    """`value` against `$defs/name`. :raises WireFault: what is wrong."""
    file = "schema.json" if has(name, "schema.json") else "schema.unstable.json"
    errors = best(validator(name, strict=strict, file=file), value)
    if errors and strict and name.endswith("Response") and has(name, "schema.unstable.json"):
        errors = best(validator(name, strict=True, file="schema.unstable.json"), value)
    if errors:
        raise fault(message, errors)


def definition(receiver: Side, method: str, kind: str) -> str | None:
    """The `$defs` name of a method served by `receiver`."""
    for file in ("schema.json", "schema.unstable.json"):
        name = methods(file).get((receiver, method, kind)) or methods(file).get(("protocol", method, kind))
        if name is not None:
            return name if has(name, "schema.json") or method in UNSTABLE else None
    return None


def best(checker: Draft202012Validator, value: Any) -> str:
    """All faults of `value` in words; empty when it is valid."""
    return "; ".join(f"{error.json_path}: {error.message[:300]}" for error in checker.iter_errors(value))


def fault(message: Any, words: str) -> SchemaViolation:
    """The error for `message`, which is shown shortened."""
    return SchemaViolation(f"{words}\n  in {json.dumps(message, ensure_ascii=False, default=str)[:2000]}")


def served_by(method: str) -> Side | None:
    """The side that serves `method`; None for methods of neither."""
    for file in ("schema.json", "schema.unstable.json"):
        for side, name, _ in methods(file):
            if name == method and side != "protocol":
                return "client" if side == "client" else "agent"
    return None


@cache
def schema(file: str) -> dict[str, Any]:
    """The pinned schema as it is."""
    packaged = Path(__file__).parent / file
    # In a source tree the schema stands where everybody looks for it; a wheel carries it here.
    found = packaged if packaged.exists() else Path(__file__).parents[2] / "schemas" / "acp" / "v1" / file
    value: dict[str, Any] = json.loads(found.read_text("utf-8"))
    return value


@cache
def methods(file: str) -> dict[tuple[str, str, str], str]:
    """(side, method, Request | Response | Notification) to the name in `$defs`."""
    kinds = ("Request", "Response", "Notification")
    return {
        (body["x-side"], body["x-method"], next(kind for kind in kinds if name.endswith(kind))): name
        for name, body in schema(file)["$defs"].items()
        if "x-method" in body
    }


def has(name: str, file: str) -> bool:
    """Whether the schema defines `name`."""
    return name in schema(file)["$defs"]


@cache
def validator(name: str, *, strict: bool, file: str = "schema.json") -> Draft202012Validator:
    """A validator of `$defs/name`; strict: members that the schema does not name are faults, at any depth."""
    definitions = strict_definitions(file) if strict else schema(file)["$defs"]
    root: dict[str, Any] = {"$defs": definitions, "$ref": f"#/$defs/{name}"}
    if strict:
        root["unevaluatedProperties"] = False
    return Draft202012Validator(root)


@cache
def strict_definitions(file: str) -> dict[str, Any]:
    """The definitions, closed where a value stands: at properties and items, not inside the parts of an allOf."""
    definitions: dict[str, Any] = copy.deepcopy(schema(file)["$defs"])
    close(definitions)
    return definitions


def close(node: Any) -> None:
    """Add `unevaluatedProperties: false` wherever `node` describes a whole value."""
    if isinstance(node, list):
        for item in node:
            close(item)
        return
    if not isinstance(node, dict):
        return
    for key, value in list(node.items()):
        close(value)
        whole = list(value.values()) if key == "properties" else [value] if key == "items" else []
        for position in whole:
            if isinstance(position, dict) and {"$ref", "allOf", "anyOf", "oneOf", "properties"} & position.keys():
                position["unevaluatedProperties"] = False
