"""The built-in tools. The in-process MCP server that runs them is in :mod:`crow.tools.builtin.server`."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import replace
from typing import Any

from crow.domain.entries import Announcement
from crow.domain.errors import ArgumentError
from crow.domain.messages import ToolCall, ToolSpec
from crow.tools import PlannedCall
from crow.tools.builtin.apply_patch import APPLY_PATCH
from crow.tools.builtin.edit import EDIT_FILE
from crow.tools.builtin.fetch import FETCH
from crow.tools.builtin.files import READ_FILE, WRITE_FILE
from crow.tools.builtin.search import GREP, LIST_FILES
from crow.tools.builtin.session import RECALL, TASK, UPDATE_PLAN
from crow.tools.builtin.shell import SHELL, SHELL_KILL, SHELL_OUTPUT
from crow.tools.builtin.skill import SKILL
from crow.tools.builtin.tool import Builtin, ToolContext, check, describe_error, parse_call

__all__ = ["SPECS", "TOOLS", "arguments_of", "plan", "slot_for", "with_name"]

TOOLS: Mapping[str, Builtin] = {
    tool.spec.name: tool
    for tool in (
        *(READ_FILE, WRITE_FILE, EDIT_FILE, APPLY_PATCH, LIST_FILES, GREP, SHELL, SHELL_OUTPUT, SHELL_KILL, FETCH),
        *(UPDATE_PLAN, RECALL, SKILL, TASK),
    )
}

_UNSENT = frozenset({"minLength", "maxLength", "maxItems"})
"""Bounds that crow checks and does not send: they cost tokens in every request, and models keep to them anyway."""


def _sent(schema: Any) -> Any:
    """Return a JSON Schema as it is sent to the model."""
    if isinstance(schema, Mapping):
        return {name: _sent(part) for name, part in schema.items() if name not in _UNSENT}
    return schema


SPECS: tuple[ToolSpec, ...] = tuple(
    replace(tool.spec, input_schema=_sent(tool.spec.input_schema)) for tool in TOOLS.values()
)
"""The specs of the built-in tools, in the order in which the model gets them."""


async def plan(call: ToolCall, context: ToolContext) -> PlannedCall:
    """Plan a call of a built-in tool without running it. The result for an invalid call has a `fault`."""
    tool = TOOLS[call.name]
    try:
        planned = await tool.plan(context, arguments_of(call))
        return planned if planned.fault is None else replace(planned, fault=with_name(call.name, planned.fault))
    except (ArgumentError, OSError) as error:
        # the message for a call that could not be parsed, for example because of invalid JSON, already has the name
        fault = describe_error(error) if call.fault is not None else with_name(call.name, describe_error(error))
    announcement = Announcement(title=call.name, kind=tool.kind)
    return PlannedCall(announcement=announcement, access=tool.access, fault=fault, is_barrier=tool.access == "write")


def arguments_of(call: ToolCall) -> dict[str, Any]:
    """Return the checked arguments of a call. :raises ~crow.domain.errors.ArgumentError: an argument is missing or
    wrong."""
    spec = TOOLS[call.name].spec
    return check(call.name, spec.input_schema, parse_call(call, spec))


def slot_for(name: str, arguments: Mapping[str, Any], context: ToolContext) -> AbstractAsyncContextManager[None]:
    """Return a context manager that waits until a call may run. Background commands do not wait, because each session
    has its own limit for them."""
    limiter = TOOLS[name].limiter
    if limiter is None or arguments.get("background", False):
        return nullcontext()
    return limiter.slot(context.workspace)


def with_name(tool: str, message: str) -> str:
    """Return the message with the tool's name in front. Messages of `check` and `parse` already begin with the name,
    and stay unchanged."""
    return message if message.startswith(f"{tool}: ") else f"{tool}: {message}"
