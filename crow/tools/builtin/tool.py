"""The code that all built-in tools share: how a tool is defined, what context it gets, and how its arguments are
checked."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias
from urllib.parse import unquote

from crow.domain.entries import Announcement, CallKind, Diff, Location
from crow.domain.errors import ArgumentError
from crow.domain.messages import MAX_DEPTH, ToolCall, ToolSpec, is_too_deep
from crow.domain.text import describe
from crow.tools import (
    NOTHING_EXCLUDED,
    Access,
    AgentKind,
    ExcludedPaths,
    OnOutput,
    Outcome,
    PlannedCall,
    Ports,
    Protection,
    SkillInfo,
    Touched,
    Workspace,
)
from crow.tools.builtin.checks import Checks
from crow.tools.builtin.output import OutputFiles
from crow.tools.builtin.seen_files import SeenFiles
from crow.tools.disk import shared_inode
from crow.tools.jobs import Jobs
from crow.tools.limits import FairLimiter
from crow.tools.process import HiddenKeys, KeySource

Arguments: TypeAlias = Mapping[str, Any]
"""The arguments of a call, checked against the tool's schema. Optional arguments may be absent."""

_SHOWN_CHARS = 81  # with an ellipsis
_TOO_DEEP = f"the arguments are nested too deeply; expected at most {MAX_DEPTH} levels"


_OWN_FILE = "belongs to crow itself and cannot be read; use recall for this session, and ask the user about settings"
_OUT_OF_BOUNDS = "is outside the workspace, which tools cannot leave here"


@dataclass(frozen=True, slots=True)
class Builtin:
    """A built-in tool."""

    spec: ToolSpec
    """The tool as the model sees it."""
    kind: CallKind
    """The kind of each of its calls, including invalid ones."""
    access: Access
    """The access of each of its calls, including invalid ones."""
    plan: Callable[[ToolContext, Arguments], Awaitable[PlannedCall]]
    """Describes a call and finds errors in it without changing anything. May raise
    :class:`~crow.domain.errors.ArgumentError`; its message goes to the model, with the tool's name in front."""
    run: Callable[[ToolInvocation, Arguments], Awaitable[Outcome]]
    """Executes a call. May raise the same error as `plan`."""
    limiter: FairLimiter | None = None
    """Limits how many calls run at once."""


def tool_spec(name: str, description: str, /, *, required: str = "", **properties: Mapping[str, Any]) -> ToolSpec:
    """Return a tool as it is offered to the model. `required` has the names of the required properties, separated by
    spaces."""
    schema: dict[str, Any] = {"type": "object", "properties": properties}
    if required:
        schema["required"] = required.split()
    return ToolSpec(name=name, description=description, input_schema=schema)


def argument(kind: str, description: str = "", /, **bounds: object) -> dict[str, Any]:
    """Return the JSON Schema of an argument. An argument whose name says everything needs no description."""
    return {"type": kind, **bounds, **({"description": description} if description else {})}


@dataclass(slots=True, kw_only=True)
class ToolContext:
    """State that the tools of a session share."""

    workspace: Workspace
    jobs: Jobs
    """The commands that run in the background."""
    seen_files: SeenFiles = field(default_factory=SeenFiles)
    """Remembers which lines of which files the model has read or written."""
    outputs: OutputFiles = field(default_factory=OutputFiles)
    """The files with the whole outputs of commands, for outputs that were shortened for the model."""
    skills: tuple[SkillInfo, ...] = ()
    """The skills that the model can load. Replaced before each turn."""
    agents: tuple[AgentKind, ...] = ()
    """The kinds of subagents that the model can start. Replaced before each turn."""
    fetches_private: bool = False
    """Whether `fetch` may reach private addresses."""
    checks: Checks = field(default_factory=lambda: Checks({}))
    """The user's checks, which run after edits."""
    keys: KeySource = HiddenKeys
    """The secrets that commands do not get."""
    is_isolated: bool = False
    """The workspace is the layer of a subagent."""

    def target(self, path: str) -> PathTarget:
        """Return the file or directory that `path` leads to. It may also be a `file:` URL. As in a shell, `~/` is the
        user's home directory, unless the working directory has a file named `~`.

        :raises ~crow.domain.errors.ArgumentError: `path` is empty, too long, or contains a NUL.
        """
        if path.startswith("file:///"):
            path = unquote(path.removeprefix("file://"))
        if (path == "~" or path.startswith("~/")) and not os.path.lexists(self.workspace.cwd / "~"):
            path = os.path.expanduser(path)
        resolved = self.workspace.resolve(path)
        given, cwd = os.path.normpath(self.workspace.cwd / path), str(self.workspace.cwd)
        names = (given, given[len(cwd) + 1 :]) if given.startswith(cwd + os.sep) else (given,)
        target = replace(PathTarget.at(self.workspace, resolved), given_names=names)
        if self.outputs.contains(resolved):  # it holds the output of a command that the model ran
            target = replace(target, is_outside=False, is_out_of_bounds=False, read_protection="none")
        return target


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolInvocation:
    """The data that a tool gets in addition to the arguments of a call."""

    context: ToolContext
    ports: Ports
    """The parts of the session that tools may use."""
    call_id: str
    on_output: OnOutput
    """Shows the user a piece of output while the call runs."""
    planned: PlannedCall | None = None
    """The call as it was allowed. None if it was not planned."""

    @property
    def allowed_paths(self) -> tuple[str, ...]:
        """The files or directories that the call may touch. Empty if they are not known in advance."""
        return () if self.planned is None else self.planned.paths

    @property
    def excluded(self) -> ExcludedPaths:
        """The files that a search leaves out and that a confined command cannot read."""
        return NOTHING_EXCLUDED if self.planned is None else self.planned.excluded

    @classmethod
    def plain(cls, context: ToolContext, ports: Ports, call_id: str) -> ToolInvocation:
        """Return the invocation of a call that shows no output while it runs."""

        async def ignore(_output: str) -> None:
            pass

        return cls(context=context, ports=ports, call_id=call_id, on_output=ignore)

    def target(self, path: str) -> PathTarget:
        """Return the file or directory that `path` leads to.

        :raises ~crow.domain.errors.ArgumentError: a link has changed, so that `path` no longer leads to the file or
            directory that was allowed; or tools may never read the target, for example because it belongs to crow
            itself.
        """
        target = self.context.target(path)
        if self.allowed_paths and str(target.path) not in self.allowed_paths:
            raise ArgumentError(f"{path} now leads to {target.path}, which was not allowed; repeat the call to use it")
        if target.read_protection == "never":
            raise ArgumentError(target.refusal)
        return target


@dataclass(frozen=True, slots=True, kw_only=True)
class PathTarget:
    """A file or directory that a call names, with links resolved."""

    path: Path
    """The path with links resolved."""
    name: str
    """The path for messages: relative to the working directory if the file is inside that directory."""
    client_path: str
    """The path for the client. If the file is inside the working directory, it begins with the path that the client
    gave for that directory, even if that path is a link."""
    rule_names: tuple[str, ...]
    """The names by which permission rules can refer to the file."""
    is_outside: bool
    """Whether the file is outside the workspace."""
    given_names: tuple[str, ...] = ()
    """The path as the call gave it, before links were resolved: absolute and, inside the working directory, also
    relative. Only deny rules use these names."""
    read_protection: Protection = "none"
    """Whether the file may be read freely, only after asking the user, or never."""
    has_hard_links: bool = False
    """The file has several names."""
    is_out_of_bounds: bool = False
    """The file is outside the workspace, and no tool may leave it (see :meth:`crow.tools.Workspace.is_bounded`)."""

    @classmethod
    def at(cls, workspace: Workspace, path: Path) -> PathTarget:
        """Return the target at a resolved path."""
        name, whole = display_name(workspace, path), str(path)
        is_below = name != whole
        return cls(
            path=path,
            name=name,
            client_path=str(workspace.cwd / name) if is_below else whole,
            rule_names=(whole, name) if is_below else (whole,),
            is_outside=not workspace.contains(path),
            read_protection=workspace.read_protection(path),
            has_hard_links=shared_inode(path) is not None,
            is_out_of_bounds=workspace.is_bounded and not workspace.contains(path),
        )

    @property
    def refusal(self) -> str:
        """Why a target with the protection `never` cannot be used."""
        return f"{self.name} {_OUT_OF_BOUNDS if self.is_out_of_bounds else _OWN_FILE}"

    def plan(
        self, title: str, kind: CallKind, access: Access, *, line: int | None = None, diffs: tuple[Diff, ...] = ()
    ) -> PlannedCall:
        """Return the plan of a call that touches only this target."""
        location = Location(path=self.client_path, line=line)
        return PlannedCall(
            announcement=Announcement(title=title, kind=kind, locations=(location,), diffs=diffs),
            access=access,
            fault=self.refusal if self.read_protection == "never" else None,
            touched=Touched(
                is_outside=self.is_outside,
                is_protected=self.read_protection == "ask",
                rule_paths=self.rule_names,
                other_paths=tuple(name for name in self.given_names if name not in self.rule_names),
                has_hard_links=self.has_hard_links,
            ),
        )


def display_name(workspace: Workspace, path: Path) -> str:
    """Return a resolved path as messages and titles show it. A path inside the working directory is shown relative to
    that directory."""
    root = workspace.resolve(".")
    return str(path.relative_to(root)) if path.is_relative_to(root) else str(path)


def session_call(title: str, kind: CallKind) -> PlannedCall:
    """Return the plan of a call that touches only the session."""
    return PlannedCall(announcement=Announcement(title=title, kind=kind), access="none")


def describe_error(error: ArgumentError | OSError) -> str:
    """Return the message for the model. For an OSError, the message says what the system or the editor reported, and
    about which file."""
    if isinstance(error, ArgumentError):
        return str(error)
    where = f": {error.filename}" if error.filename is not None else ""
    return f"{error.strerror or str(error) or type(error).__name__}{where}"


def parse(tool: str, text: str) -> dict[str, Any]:
    """Return the JSON object in a call's arguments. :raises ~crow.domain.errors.ArgumentError: the arguments are not a
    JSON object."""
    try:
        value = json.loads(text or "{}")
    except ValueError as error:
        raise ArgumentError(f"{tool}: the arguments are not valid JSON: {error}") from None
    except RecursionError:
        raise ArgumentError(f"{tool}: {_TOO_DEEP}") from None
    if is_too_deep(value):
        raise ArgumentError(f"{tool}: {_TOO_DEEP}")
    if not isinstance(value, dict):
        raise ArgumentError(f"{tool}: the arguments are {describe(value, _SHOWN_CHARS)}; expected a JSON object")
    return value


def parse_call(call: ToolCall, spec: ToolSpec) -> dict[str, Any]:
    """Return the arguments of a call, not checked against the schema.

    :raises ~crow.domain.errors.ArgumentError: the arguments are not a JSON object. The message says which arguments the
        tool takes.
    """
    if call.fault is not None:
        raise ArgumentError(_with_expectation(f"{call.fault.rstrip('.')}.", spec))
    try:
        return parse(call.name, call.arguments)
    except ArgumentError as error:
        raise ArgumentError(_with_expectation(f"{error}.", spec)) from None


def parse_foreign(call: ToolCall, spec: ToolSpec) -> dict[str, Any]:
    """Return the arguments of a call to an external tool. They are not checked against the tool's schema.

    :raises ~crow.domain.errors.ArgumentError: the arguments are not a JSON object, or not valid UTF-8.
    """
    value = parse_call(call, spec)
    _check_encodable(call.name, "the JSON text of the arguments", json.dumps(value, ensure_ascii=False))
    return value


def _with_expectation(fault: str, spec: ToolSpec) -> str:
    """Add the arguments that the tool takes to the error message for a call whose arguments cannot be read."""
    properties, required = spec.input_schema.get("properties"), spec.input_schema.get("required")
    if not isinstance(properties, Mapping) or not properties:
        return f"{fault} {spec.name} takes no arguments: {{}}."
    needed = required if isinstance(required, list | tuple) else ()
    names = ", ".join(
        f"{name} ({_describe_type(schema)}{'' if name in needed else ', optional'})"
        for name, schema in properties.items()
    )
    return f"{fault} Expected a JSON object with {names}."


def _describe_type(schema: object) -> str:
    kind = schema.get("type", "any value") if isinstance(schema, Mapping) else "any value"
    return " or ".join(map(str, kind)) if isinstance(kind, list) else str(kind)


# jsonschema is not used here: importing it takes 28 ms, and it would replace only `_is_in_bounds`. Types must be
# converted here anyway, because many models write numbers and booleans as text, and null for an absent argument. The
# error messages are written for models.
def check(tool: str, schema: Mapping[str, Any], given: Mapping[str, Any], *, where: str = "") -> dict[str, Any]:
    """Return the arguments, converted to the schema's types. Arguments that are null, or that the schema does not have,
    are left out. `where` is the path to a nested object.

    :raises ~crow.domain.errors.ArgumentError: an argument is missing, or does not fit the schema.
    """
    properties: Mapping[str, Any] = schema["properties"]
    unknown = [name for name in given if name not in properties]
    checked = {}
    for name, expected in properties.items():
        is_required = name in schema.get("required", ())
        if is_required and name not in given:
            instead = f", not {', '.join(unknown[:5])}" if unknown else ""
            raise ArgumentError(f"{tool}: {where}{name} is missing; expected {_describe_schema(expected)}{instead}")
        if is_required or given.get(name) is not None:
            checked[name] = _check_value(tool, where + name, expected, given[name])
    return checked


def _check_value(tool: str, where: str, schema: Mapping[str, Any], given: Any) -> Any:
    value = _convert(schema["type"], given)
    if value is None or not _is_in_bounds(schema, value):
        raise ArgumentError(f"{tool}: {where} is {describe(given, _SHOWN_CHARS)}; expected {_describe_schema(schema)}")
    match value:
        case str():
            _check_encodable(tool, where, value)
        case list():
            return [_check_value(tool, f"{where}[{at}]", schema["items"], item) for at, item in enumerate(value)]
        case dict():
            return check(tool, schema, value, where=f"{where}.")
    return value


def _convert(kind: str, value: Any) -> Any:
    """Convert `value` to the wanted type. Return None if that is not possible."""
    match kind, value:
        case ("string", str()) | ("array", list()) | ("object", dict()) | ("boolean", bool()):
            return value
        case "boolean", "true" | "True" | "false" | "False":
            return value in ("true", "True")
        case "integer", bool():
            return None
        case "integer", int():
            return value
        case "integer", float() if value.is_integer():
            return int(value)
        case "integer", str() if re.fullmatch(r"\s*-?\d{1,19}\s*", value):
            return int(value)
    return None


_BOUNDS = {"integer": ("minimum", "maximum"), "string": ("minLength", "maxLength"), "array": ("minItems", "maxItems")}


def _is_in_bounds(schema: Mapping[str, Any], value: Any) -> bool:
    if "enum" in schema:
        return value in schema["enum"]
    if schema["type"] not in _BOUNDS:
        return True
    low, high = _BOUNDS[schema["type"]]
    size = value if isinstance(value, int) else len(value)
    return bool(schema.get(low, size) <= size <= schema.get(high, size))


def _check_encodable(tool: str, where: str, text: str) -> None:
    """Check a text in the arguments. :raises ~crow.domain.errors.ArgumentError: the text cannot be encoded as UTF-8."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ArgumentError(
            f"{tool}: {where} holds half a surrogate pair, \\u{ord(text[error.start]):04x}, at character "
            f"{error.start}; expected text that UTF-8 can encode"
        ) from None


def _describe_schema(schema: Mapping[str, Any]) -> str:
    """Describe in words the values that a schema allows."""
    if "enum" in schema:
        return "one of " + ", ".join(schema["enum"])
    match schema["type"]:
        case "integer":
            start = f" from {schema['minimum']}" if "minimum" in schema else ""
            return "a whole number" + start + (f" to {schema['maximum']}" if "maximum" in schema else "")
        case "string":
            if "maxLength" in schema:
                return f"text of at most {schema['maxLength']:,} characters"
            return "text that is not empty" if schema.get("minLength") else "text"
        case "boolean":
            return "true or false"
        case "array":
            most = f"at most {schema['maxItems']} items, " if "maxItems" in schema else ""
            return f"a list ({most}each {_describe_schema(schema['items'])})"
    return "an object with " + ", ".join(schema["properties"])
