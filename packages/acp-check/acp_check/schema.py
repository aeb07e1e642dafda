"""Checks single messages against the pinned ACP schema."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, Literal, TypeAlias

from jsonschema_rs import Draft202012Validator

Side: TypeAlias = Literal["agent", "client"]

STABLE, UNSTABLE = "schema.json", "schema.unstable.json"

_SESSION_CONTENT: dict[str, Any] = {
    "type": "object",
    "properties": {
        "type": {"const": "session"},
        "sessionId": {"$ref": "#/$defs/SessionId"},
        "_meta": {"type": ["object", "null"]},
    },
    "required": ["type", "sessionId"],
}
"""The schema of `session`, a type of content of tool calls. It was written by hand from the proposal (RFD) for
subagent sessions, because no published package has it yet."""


class Violation(Exception):
    """The protocol does not allow a message."""


class SchemaChecker:
    """Checks the messages of one connection in the order in which they were sent.

    An agent's messages are checked strictly: they may contain no member that the schema does not name. A response is
    checked according to the method of its request.
    """

    def __init__(self) -> None:
        self._requests: dict[tuple[Side, Any], str] = {}

    def check(self, sender: Side, message: Any) -> None:
        """Check the next message. :raises Violation: the message is not allowed; the error says what is wrong and
        where."""
        if not isinstance(message, dict):
            if sender == "client":
                return  # allowed, because the agent answers such a message with an error
            raise violation(message, "not an object")
        if message.get("jsonrpc") != "2.0":
            raise violation(message, 'jsonrpc is not "2.0"')
        if sender == "agent" and (unknown := message.keys() - {"jsonrpc", "id", "method", "params", "result", "error"}):
            raise violation(message, f"members that JSON-RPC does not have: {sorted(unknown)}")
        receiver: Side = "client" if sender == "agent" else "agent"
        if "method" in message:
            self._check_call(sender, receiver, message)
        else:
            self._check_response(sender, receiver, message)

    def unanswered(self) -> tuple[str, ...]:
        """Return each unanswered request as `method (id)`."""
        return tuple(f"{method} ({request_id})" for (_, request_id), method in self._requests.items())

    def _check_call(self, sender: Side, receiver: Side, message: dict[str, Any]) -> None:
        method, params = message["method"], message.get("params")
        if not isinstance(method, str):
            raise violation(message, "method is not a string")
        if "id" in message:
            if isinstance(message["id"], bool) or not isinstance(message["id"], int | str):
                raise violation(message, "a request's id must be a number or a string")
            self._requests[sender, message["id"]] = method
        if method.startswith("_"):
            return
        kind = "Request" if "id" in message else "Notification"
        name = _definition(receiver, method, kind)
        if name is None:
            raise violation(message, f"the {receiver} has no {kind.lower()} with this name")
        if method != "session/update":
            validate(name, params, strict=sender == "agent", message=message)
        elif not isinstance(params, dict) or params.keys() - {"_meta"} != {"sessionId", "update"}:
            raise violation(message, "session/update must have the members sessionId and update")
        elif not isinstance(params["sessionId"], str):
            raise violation(message, "sessionId is not a string")
        elif not isinstance(params.get("_meta"), dict | None):
            raise violation(message, "_meta is not an object")
        else:
            check_update(params["update"], message)

    def _check_response(self, sender: Side, receiver: Side, message: dict[str, Any]) -> None:
        if "id" not in message or ("result" in message) == ("error" in message):
            raise violation(message, "a response must have an id, and either result or error")
        method = None if message["id"] is None else self._requests.pop((receiver, message["id"]), None)
        if "error" in message:
            validate("Error", message["error"], strict=sender == "agent", message=message)
            return
        if method is None:
            raise violation(message, "this response belongs to no open request")
        name = None if method.startswith("_") else _definition(sender, method, "Response")
        if name is not None:
            validate(name, message["result"], strict=sender == "agent", message=message)


def check_update(update: Any, message: Any = None) -> None:
    """Check the update of a `session/update` strictly, according to its kind. :raises Violation: the update is not
    valid."""
    kind = update.get("sessionUpdate") if isinstance(update, dict) else None
    file = STABLE if kind in _update_kinds(STABLE) else UNSTABLE
    if kind not in _update_kinds(file):
        raise violation(message or update, f"there is no update of kind {kind!r}")
    if _is_plain_chunk(update):
        return
    errors = _errors(f"SessionUpdate/oneOf/{_update_kinds(file)[kind]}", update, strict=True, file=file)
    if errors:
        raise violation(message or update, errors)


def validate(name: str, value: Any, *, strict: bool = True, message: Any = None) -> None:
    """Check `value`, a part of `message`, against the definition `name` of the schema.

    With `strict`, unknown members are not allowed, but a response may have members of the unstable schema.

    :raises Violation: `value` is not valid; the error quotes `message`.
    """
    is_stable = name in _definitions(STABLE)
    errors = _errors(name, value, strict=strict, file=STABLE if is_stable else UNSTABLE)
    if errors and is_stable and strict and name.endswith("Response") and name in _definitions(UNSTABLE):
        errors = _errors(name, value, strict=True, file=UNSTABLE)
    if errors:
        raise violation(message, errors)


def problems(name: str, value: Any, *, strict: bool = False) -> tuple[str, ...]:
    """Return the problems of `value` under the definition `name`, or () if `value` is valid. With `strict`, unknown
    members are problems too.

    A value is valid if the stable or the unstable schema allows it. `name` may be `SessionUpdate/KIND`.
    """
    found: tuple[str, ...] = ()
    for file in (STABLE, UNSTABLE):
        place = _place(name, file)
        if place is not None:
            errors = words_of(_validator(place, strict=strict, file=file), value)
            if not errors:
                return ()
            found = errors if not found or len(errors) < len(found) else found
    return found


def definition(receiver: Side, method: str, kind: str) -> str | None:
    """Return the name of the definition of the parameters or the result of a method that `receiver` serves.

    `kind` is Request, Response or Notification. Return None if neither the stable nor the unstable schema has a
    definition.
    """
    for methods in (_methods(STABLE), _methods(UNSTABLE)):
        name = methods.get((receiver, method, kind)) or methods.get(("protocol", method, kind))
        if name is not None:
            return name
    return None


def update_kinds() -> tuple[str, ...]:
    """Return the kinds of `session/update` in the stable and the unstable schema."""
    return tuple(dict.fromkeys((*_update_kinds(), *_update_kinds(UNSTABLE))))


def _place(name: str, file: str) -> str | None:
    """Return the path of the definition `name` in the schema `file`, or None if `file` does not have it."""
    base, _, kind = name.partition("/")
    if not kind:
        return name if name in _definitions(file) else None
    kinds = _update_kinds(file)
    return f"{base}/oneOf/{kinds[kind]}" if kind in kinds else None


def violation(message: Any, problem: str) -> Violation:
    """Return an error that quotes the beginning of `message`."""
    return Violation(f"{problem}\n  in {json.dumps(message, ensure_ascii=False, default=str)[:2000]}")


def is_served_by_client(method: str) -> bool:
    """Return whether the client serves `method`."""
    return any(served[:2] == ("client", method) for file in (STABLE, UNSTABLE) for served in _methods(file))


def _is_plain_chunk(update: dict[str, Any]) -> bool:
    """Return whether `update` is a chunk of plain text with a message id.

    These updates are the most frequent. They are always valid, so they need no check against the schema.
    """
    match update:
        case {
            "sessionUpdate": "user_message_chunk" | "agent_message_chunk" | "agent_thought_chunk",
            "content": {"type": "text", "text": str(), **others},
            "messageId": str(),
            **rest,
        }:
            return not others and not rest
    return False


def _errors(name: str, value: Any, *, strict: bool, file: str = STABLE) -> str:
    """Return everything that is wrong with `value`, or an empty string if it is valid."""
    if isinstance(value, dict) and isinstance(value.get("sessionId"), str):
        value = value | {"sessionId": "id"}  # any string is a valid id, so values that differ only in it need one check
    return _errors_in(json.dumps(value), name, strict=strict, file=file)


@lru_cache(maxsize=1_000)
def _errors_in(text: str, name: str, *, strict: bool, file: str) -> str:
    """Return the same as `_errors` for a value in JSON. Connections repeat many messages, and a check takes
    milliseconds."""
    return "; ".join(words_of(_validator(name, strict=strict, file=file), json.loads(text)))


def words_of(validator: Draft202012Validator, value: Any) -> tuple[str, ...]:
    """Return what is wrong with `value`, and where: `$.content[0]: "x" is not of type "integer"`."""
    try:
        errors = list(validator.iter_errors(value))
    except UnicodeEncodeError:  # half of a surrogate pair, which JSON allows
        text = json.dumps(value, ensure_ascii=False).encode("utf-8", "replace")
        errors = list(validator.iter_errors(json.loads(text)))
    return tuple(f"{_json_path(error.instance_path)}: {error.message[:300]}" for error in errors)


def _json_path(steps: Sequence[str | int]) -> str:
    return "$" + "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in steps)


def _definition(receiver: Side, method: str, kind: str) -> str | None:
    """Return the name of the definition of the parameters or the result of a method that `receiver` serves, or None."""
    for methods in (_methods(STABLE), _methods(UNSTABLE)):
        if name := methods.get((receiver, method, kind)) or methods.get(("protocol", method, kind)):
            return name
    return None


@cache
def _definitions(file: str, *, strict: bool = False) -> dict[str, Any]:
    """Return the definitions in `file`.

    If `strict`, unknown members are forbidden in every value, but not inside the parts of an allOf.
    """
    packaged = Path(__file__).parent / file  # exists only in a wheel
    path = packaged if packaged.exists() else Path(__file__).parents[3] / "schemas" / "acp" / "v1" / file
    definitions: dict[str, Any] = json.loads(path.read_text("utf-8"))["$defs"]
    definitions["ToolCallContent"]["oneOf"].append(_SESSION_CONTENT)
    if strict:
        _forbid_unknown(definitions)
    return definitions


@cache
def _methods(file: str) -> dict[tuple[str, str, str], str]:
    """Map (side, method, kind) to the name of the definition. The kind is Request, Response or Notification."""
    return {
        (body["x-side"], body["x-method"], kind): name
        for name, body in _definitions(file).items()
        for kind in ("Request", "Response", "Notification")
        if "x-method" in body and name.endswith(kind)
    }


@cache
def _update_kinds(file: str = STABLE) -> dict[str, int]:
    """Map each kind of update to its index in the schema's list of update types."""
    variants = _definitions(file)["SessionUpdate"]["oneOf"]
    return {variant["properties"]["sessionUpdate"]["const"]: index for index, variant in enumerate(variants)}


@cache
def _validator(name: str, *, strict: bool, file: str) -> Draft202012Validator:
    root: dict[str, Any] = {"$defs": _definitions(file, strict=strict), "$ref": f"#/$defs/{name}"}
    return Draft202012Validator(root | {"unevaluatedProperties": False} if strict else root)


def _forbid_unknown(node: Any) -> None:
    if isinstance(node, list):
        for item in node:
            _forbid_unknown(item)
    if not isinstance(node, dict):
        return
    for key, value in list(node.items()):
        _forbid_unknown(value)
        values = list(value.values()) if key == "properties" else [value] if key == "items" else []
        for described in values:
            if isinstance(described, dict) and {"$ref", "allOf", "anyOf", "oneOf", "properties"} & described.keys():
                described["unevaluatedProperties"] = False
