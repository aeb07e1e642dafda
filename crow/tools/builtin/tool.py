"""What a built-in tool is: a spec, a way to look at a call, a way to run it.

Strategy: one frozen value per tool, made once. Looking announces a call and finds its faults without changing
anything; running reaches the world through the workspace and the session through the ports. What cannot be done is an
`ArgumentError` whose words go to the model as they are.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from crow.domain.entries import CallKind
from crow.domain.errors import ArgumentError
from crow.domain.messages import ToolSpec
from crow.tools import Access, Log, OnOutput, Outcome, Plan, PlannedCall, Workspace
from crow.tools.jobs import Jobs
from crow.tools.process import HiddenKeys, KeySource
from crow.tools.skills import FoundSkill
from crow.tools.workspace import SeenFiles

__all__ = [
    "Arguments",
    "Builtin",
    "ToolContext",
    "ToolInvocation",
    "check",
    "parse",
    "parse_foreign",
    "path_names",
    "shown_name",
    "shown_path",
    "system_words",
    "with_expectation",
]

Arguments: TypeAlias = Mapping[str, Any]
"""Checked against the tool's schema; optional ones may be absent."""


@dataclass(slots=True, kw_only=True)
class ToolContext:
    """What the tools of a session share: the world, and what they remember of it. `skills` may be found anew."""

    workspace: Workspace
    jobs: Jobs
    seen: SeenFiles = field(default_factory=SeenFiles)
    skills: tuple[FoundSkill, ...] = ()
    fetches_private: bool = False
    keys: KeySource = HiddenKeys


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolInvocation:
    """What a running call reaches: the world, the session, and whoever watches. `place` is the file or directory that
    it was allowed to touch, `allowed` its offer's `argument`; both are None if nobody judged it."""

    around: ToolContext
    log: Log
    plan: Plan
    call_id: str
    on_output: OnOutput
    place: str | None = None
    allowed: str | None = None

    @property
    def workspace(self) -> Workspace:
        """The files and processes."""
        return self.around.workspace

    def resolve(self, path: str) -> Path:
        """The place that `path` leads to. :raises ~crow.domain.errors.ArgumentError: not the one that was allowed."""
        resolved = self.workspace.resolve(path)
        if self.place is not None and str(resolved) != self.place:
            raise ArgumentError(
                f"{path} led elsewhere when this call was allowed; call it again if {resolved} is meant"
            )
        return resolved


@dataclass(frozen=True, slots=True, kw_only=True)
class Builtin:
    """A built-in tool. `kind`, `access` and `is_barrier` hold for every call of it, faulty ones too.

    `look` may leave a fault in its offer, or raise :class:`~crow.domain.errors.ArgumentError` with the same meaning.
    """

    spec: ToolSpec
    kind: CallKind
    access: Access
    look: Callable[[ToolContext, Arguments], Awaitable[PlannedCall]]
    run: Callable[[ToolInvocation, Arguments], Awaitable[Outcome]]
    is_barrier: bool = False


def system_words(tool: str, error: OSError) -> str:
    """What the operating system said, with the file it said it of; or what the editor said."""
    where = f": {error.filename}" if error.filename is not None else ""
    return f"{tool}: {error.strerror or str(error) or type(error).__name__}{where}"


def shown_path(workspace: Workspace, path: Path) -> str:
    """A resolved path as the client knows it: below the cwd that it gave, even if links lead there."""
    root = workspace.resolve(".")
    return str(workspace.cwd / path.relative_to(root)) if path.is_relative_to(root) else str(path)


def shown_name(workspace: Workspace, path: Path) -> str:
    """A resolved path for words and titles: relative to cwd where it lies below it."""
    root = workspace.resolve(".")
    return str(path.relative_to(root)) if path.is_relative_to(root) else str(path)


def path_names(workspace: Workspace, path: Path) -> tuple[str, ...]:
    """A resolved path as rules may name it: absolute, and below cwd also relative to it."""
    name = shown_name(workspace, path)
    return (str(path),) if name == str(path) else (str(path), name)


# FROM tools.builtin.arguments: Arguments of a built-in call, checked against the tool's schema.
#
# Strategy: the few keywords of JSON Schema that crow's own schemas use, and words that name the argument, show the
# value
# and say what is expected. Numbers and booleans written as text are taken, null stands for an absent optional
# argument:
# many models send both. Pure.


SHOWN_CHARS = 80


def parse(tool: str, text: str) -> dict[str, Any]:
    """The object in a call's JSON text. :raises ~crow.domain.errors.ArgumentError: it is none."""
    try:
        value = json.loads(text or "{}")
    except ValueError as error:
        raise ArgumentError(f"{tool}: the arguments are not valid JSON: {error}") from None
    except RecursionError:
        raise ArgumentError(f"{tool}: the arguments are nested too deeply") from None
    if not isinstance(value, dict):
        raise ArgumentError(f"{tool}: the arguments are {shown(value)}; expected a JSON object")
    return value


def parse_foreign(tool: str, text: str) -> dict[str, Any]:
    """The object in the JSON text of a call whose schema is not known here, fit to be sent.

    :raises ~crow.domain.errors.ArgumentError: it is none, or UTF-8 cannot hold it.
    """
    value = parse(tool, text)
    check_encodable(tool, "the JSON text of the arguments", json.dumps(value, ensure_ascii=False))
    return value


def with_expectation(fault: str, spec: ToolSpec) -> str:
    """The fault of a call that could not be read, with what its tool takes."""
    properties, required = spec.input_schema.get("properties"), spec.input_schema.get("required")
    if not isinstance(properties, Mapping) or not properties:
        return f"{fault} {spec.name} takes no arguments: {{}}."
    needed = required if isinstance(required, list | tuple) else ()
    names = ", ".join(
        f"{name} ({kind_of(schema)}{'' if name in needed else ', optional'})" for name, schema in properties.items()
    )
    return f"{fault} Expected a JSON object with {names}."


def kind_of(schema: object) -> str:
    """What a property takes, in a word or two."""
    if not isinstance(schema, Mapping):
        return "any value"
    kind = schema.get("type", "any value")
    return " or ".join(map(str, kind)) if isinstance(kind, list) else str(kind)


def check(tool: str, schema: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments in the schema's types, absent ones left out.

    :raises ~crow.domain.errors.ArgumentError: one is missing, unknown or of another type.
    """
    return checked_object(tool, "", schema, given)


def checked_object(tool: str, where: str, schema: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    properties: Mapping[str, Any] = schema["properties"]
    required = schema.get("required", ())
    for name in given:
        if name not in properties:
            raise ArgumentError(f"{tool}: {where}{name} is no argument; expected {', '.join(properties)}")
    taken = {}
    for name, expected in properties.items():
        value = given.get(name)
        if value is None and name not in required:
            continue
        if name not in given:
            raise ArgumentError(f"{tool}: {where}{name} is missing; expected {words(expected)}")
        taken[name] = checked(tool, where + name, expected, value)
    return taken


def checked(tool: str, where: str, schema: Mapping[str, Any], value: Any) -> Any:
    taken = coerced(schema["type"], value)
    if taken is None or not fits(schema, taken):
        raise ArgumentError(f"{tool}: {where} is {shown(value)}; expected {words(schema)}")
    match taken:
        case str():
            check_encodable(tool, where, taken)
        case list():
            return [checked(tool, f"{where}[{index}]", schema["items"], item) for index, item in enumerate(taken)]
        case dict():
            return checked_object(tool, f"{where}.", schema, taken)
    return taken


def coerced(kind: str, value: Any) -> Any:
    """`value` as the wanted type, None if it is of another."""
    match kind, value:
        case ("string", str()) | ("array", list()) | ("object", dict()) | ("boolean", bool()):
            return value
        case "boolean", "true" | "True":
            return True
        case "boolean", "false" | "False":
            return False
        case "integer", bool():
            return None
        case "integer", int():
            return value
        case "integer", float() if value.is_integer():
            return int(value)
        case "integer", str() if value.strip().lstrip("-").isdecimal() and len(value) < 20:
            return int(value)
    return None


def fits(schema: Mapping[str, Any], value: Any) -> bool:
    if "enum" in schema:
        return value in schema["enum"]
    match value:
        case bool():
            return True
        case int():
            return bool(schema.get("minimum", value) <= value <= schema.get("maximum", value))
        case str():
            return bool(schema.get("minLength", 0) <= len(value) <= schema.get("maxLength", len(value)))
        case list():
            return bool(len(value) <= schema.get("maxItems", len(value)))
    return True


def check_encodable(tool: str, where: str, text: str) -> None:
    """:raises ~crow.domain.errors.ArgumentError: UTF-8 cannot hold the text."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ArgumentError(
            f"{tool}: {where} holds half a surrogate pair, \\u{ord(text[error.start]):04x}, at character "
            f"{error.start}; expected text that UTF-8 can hold"
        ) from None


def words(schema: Mapping[str, Any]) -> str:
    """What a schema expects, in words."""
    if "enum" in schema:
        return "one of " + ", ".join(schema["enum"])
    match schema["type"]:
        case "integer":
            limits = f" from {schema['minimum']}" if "minimum" in schema else ""
            return "a whole number" + limits + (f" to {schema['maximum']}" if "maximum" in schema else "")
        case "string":
            if "maxLength" in schema:
                return f"text of at most {schema['maxLength']:,} characters"
            return "text that is not empty" if schema.get("minLength") else "text"
        case "boolean":
            return "true or false"
        case "array":
            most = f"at most {schema['maxItems']} of them, " if "maxItems" in schema else ""
            return f"a list ({most}each {words(schema['items'])})"
    return "an object with " + ", ".join(schema["properties"])


def shown(value: Any) -> str:
    try:
        text = json.dumps(value, ensure_ascii=False).encode("utf-8", "replace").decode("utf-8")
    except RecursionError:
        return "nested too deeply to show"
    return text if len(text) <= SHOWN_CHARS else text[:SHOWN_CHARS] + "…"
