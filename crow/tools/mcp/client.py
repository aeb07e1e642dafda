"""All tools of one session behind one MCP client: the built-in server in this process, the others beside it.

Strategy: `open_toolbox` enters the built-in client in the session's task and gives every external server a task of its
own; none is waited for, and closing waits for none longer than half a second. Names lead to servers: built-in ones
are plain, external ones carry their server's prefix, so that nothing can stand in for a built-in tool. Beyond a bound,
external tools are found by words. Looking at a call asks no server.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path

import anyio
import anyio.to_thread
from mcp.client import Client
from mcp.shared.exceptions import MCPError

from crow.domain.entries import Announcement
from crow.domain.errors import ArgumentError
from crow.domain.messages import Part, ToolCall, ToolSpec
from crow.domain.rendering import in_title
from crow.tools import (
    McpServer,
    OnOutput,
    Outcome,
    PlannedCall,
    Ports,
    ServerPrompt,
    ServerStatus,
    SkillInfo,
    Workspace,
    builtin,
)
from crow.tools.builtin.task import outcome_of_task, task_of
from crow.tools.builtin.tool import ToolContext, check, parse, parse_foreign, with_expectation
from crow.tools.jobs import Jobs
from crow.tools.mcp.connection import OnChange, ServerConnection
from crow.tools.mcp.listing import ExternalTool, prefixes
from crow.tools.process import HiddenKeys, KeySource
from crow.tools.skills import FoundSkill, find_skills

__all__ = [
    "CALL_TOOL",
    "FIND_TOOLS",
    "McpToolbox",
    "ToolSettings",
    "call_within",
    "found_text",
    "open_toolbox",
    "query_of",
]

CLOSE_S = 0.5
OFFERED_CHARS = 200_000
BUILTIN_NAMES = frozenset(spec.name for spec in builtin.SPECS)


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolSettings:
    """What the configuration says about tools.

    A server has `start_timeout_s` to answer, a call of its tools `call_timeout_s`. More external tools than `offered`
    are found by `find_tools`. `skill_folders` are the user's own. No process that tools start gets the `keys`.
    """

    start_timeout_s: float = 10.0
    call_timeout_s: float = 600.0
    offered: int = 100
    skill_folders: tuple[Path, ...] = ()
    fetches_private: bool = False
    keys: KeySource = HiddenKeys


class McpToolbox:
    """The :class:`crow.tools.Toolbox` of a session. Made by :func:`open_toolbox`."""

    def __init__(
        self,
        around: ToolContext,
        ports: Ports,
        client: Client,
        connections: Sequence[ServerConnection],
        settings: ToolSettings,
    ) -> None:
        self._around = around
        self._ports = ports
        self._client = client
        self._connections = tuple(connections)
        self._settings = settings

    def specs(self) -> tuple[ToolSpec, ...]:
        """See :meth:`crow.tools.Toolbox.specs`; only of servers that are ready."""
        absent = {"skill"} if not self._around.skills else set()
        if self._ports.delegate is None:
            absent.add("task")
        own = tuple(spec for spec in builtin.SPECS if spec.name not in absent)
        external = self._external()
        count = fitting(external, self._settings.offered)
        finding = (FIND_TOOLS, CALL_TOOL) if count < len(external) else ()
        return (*own, *finding, *(tool.spec for tool in external[:count]))

    def servers(self) -> tuple[ServerStatus, ...]:
        """See :meth:`crow.tools.Toolbox.servers`."""
        return tuple(connection.status for connection in self._connections)

    def skills(self) -> tuple[SkillInfo, ...]:
        """See :meth:`crow.tools.Toolbox.skills`."""
        return tuple(found.skill for found in self._around.skills)

    def prompts(self) -> tuple[ServerPrompt, ...]:
        """See :class:`crow.tools.ServerPrompts`."""
        ready = (connection for connection in self._connections if connection.status.state == "ready")
        return tuple(prompt for connection in ready for prompt in connection.shelf.listed)

    async def prompt(self, name: str) -> ServerPrompt | None:
        """See :class:`crow.tools.ServerPrompts`."""
        for connection in self._connections:
            if name.startswith(f"{connection.prefix}:"):
                return next((one for one in await connection.prompts() if one.name == name), None)
        return None

    async def fill(self, prompt: ServerPrompt, arguments: Mapping[str, str]) -> tuple[Part, ...]:
        """See :class:`crow.tools.ServerPrompts`."""
        connection = next(one for one in self._connections if prompt.name.startswith(f"{one.prefix}:"))
        return await connection.fill(prompt, arguments)

    async def wait_ready(self, timeout_s: float, *, beside: Callable[[], None] | None = None) -> None:
        """Get ready for a turn: look for skills, start failed servers again, and wait at most `timeout_s` until every
        server that ever worked is ready or has failed. `beside` is called in the thread that looks for skills."""
        self._around.skills = await anyio.to_thread.run_sync(self._look, beside)
        revived = [connection for connection in self._connections if connection.revive()]
        awaited = [connection for connection in self._connections if connection.was_ready or connection not in revived]
        if not all(connection.settled.is_set() for connection in awaited):
            with anyio.move_on_after(timeout_s):
                for connection in awaited:
                    await connection.settled.wait()

    def _look(self, beside: Callable[[], None] | None) -> tuple[FoundSkill, ...]:
        if beside is not None:
            beside()
        return skills_around(self._settings, self._around.workspace)

    async def restart(self, name: str | None = None) -> tuple[str, ...]:
        """See :meth:`crow.tools.Toolbox.restart`; returns when they are ready or have failed."""
        chosen = [
            connection
            for connection in self._connections
            if connection.name == name or (name is None and connection.status.state != "ready")
        ]
        for connection in chosen:
            connection.restart()
        for connection in chosen:
            await connection.settled.wait()
        return tuple(connection.name for connection in chosen)

    async def offer(self, call: ToolCall) -> PlannedCall:
        """See :meth:`crow.tools.Toolbox.offer`."""
        if call.name in BUILTIN_NAMES:
            return await builtin.offer(call, self._around)
        if call.name == FIND_TOOLS.name:
            return found_offer(call)
        if call.name == CALL_TOOL.name:
            return await self._offer_within(call)
        found = await self._find(call.name)
        title = in_title(call.name) if found is None else f"{found[0].name}: {in_title(found[1].title)}"
        return PlannedCall(
            announcement=Announcement(title=title),
            access="external",
            fault=self._fault(call, found),
            is_read_only=found is not None and found[1].is_read_only,
        )

    async def run(
        self, call: ToolCall, call_id: str, on_output: OnOutput, *, judged: PlannedCall | None = None
    ) -> Outcome:
        """See :meth:`crow.tools.Toolbox.run`."""
        if call.name == "task" and self._ports.delegate is not None:
            return await self._delegate(call, call_id, on_output)
        if call.name in BUILTIN_NAMES:
            return await self._run_builtin(call, call_id, on_output, judged)
        try:
            if call.name == FIND_TOOLS.name:
                return Outcome(text=found_text(query_of(call), [tool.spec for tool in self._external()]))
            if call.name == CALL_TOOL.name:
                call = call_within(call)
        except ArgumentError as error:
            return Outcome(text=str(error), is_error=True)
        found = await self._find(call.name)
        fault = self._fault(call, found)
        if found is None or fault is not None:
            return Outcome(text=fault or "", is_error=True)
        connection, tool = found
        return await connection.call(tool, parse_foreign(call.name, call.arguments), on_output, call_id)

    async def _run_builtin(
        self, call: ToolCall, call_id: str, on_output: OnOutput, judged: PlannedCall | None
    ) -> Outcome:
        async def progressed(progress: float, total: float | None, message: str | None) -> None:  # noqa: ARG001
            await on_output(message or "")

        try:
            arguments = builtin.arguments_of(call)
        except ArgumentError as error:
            return Outcome(text=str(error), is_error=True)
        try:
            result = await self._client.call_tool(
                call.name, arguments, progress_callback=progressed, meta=builtin.meta_for(call_id, judged)
            )
        except MCPError as error:
            if isinstance(error.__cause__, Exception):
                raise error.__cause__ from None  # a bug of ours, which MCP has wrapped
            raise
        return builtin.from_result(result)

    async def _delegate(self, call: ToolCall, call_id: str, on_output: OnOutput) -> Outcome:
        """Run a sub-agent in the caller's task, so that it has ended whenever the call has."""
        assert self._ports.delegate is not None
        try:
            task = task_of(builtin.arguments_of(call))
            return outcome_of_task(await self._ports.delegate.delegate(call_id, task, self, on_output))
        except ArgumentError as error:
            return Outcome(text=str(error), is_error=True)

    async def _offer_within(self, call: ToolCall) -> PlannedCall:
        """The offer of the tool that `call_tool` is to call, under that tool's name."""
        try:
            inner = call_within(call)
        except ArgumentError as error:
            return PlannedCall(announcement=Announcement(title=call.name), access="external", fault=str(error))
        return replace(await self.offer(inner), tool=inner.name)

    def _external(self) -> tuple[ExternalTool, ...]:
        ready = (connection for connection in self._connections if connection.status.state == "ready")
        return tuple(tool for connection in ready for tool in connection.tools)

    async def _find(self, name: str) -> tuple[ServerConnection, ExternalTool] | None:
        """The server and tool of a name; one whose server is still starting is waited for, one whose server has failed
        starts it again."""
        for connection in self._connections:
            if name.startswith(f"{connection.prefix}__"):
                await connection.available()
                for tool in connection.tools:
                    if tool.spec.name == name:
                        return connection, tool
        return None

    def _fault(self, call: ToolCall, found: tuple[ServerConnection, ExternalTool] | None) -> str | None:
        if found is None:
            return self._unknown(call.name)
        if call.fault is not None:
            return with_expectation(call.fault, found[1].spec)
        if found[0].status.state == "failed":
            return f"MCP server {found[0].name} is not available: {found[0].status.detail}"
        try:
            parse(call.name, call.arguments)
        except ArgumentError as error:
            return with_expectation(f"{error}.", found[1].spec)
        try:
            parse_foreign(call.name, call.arguments)
        except ArgumentError as error:
            return str(error)
        return None

    def _unknown(self, name: str) -> str:
        for connection in self._connections:
            if name.startswith(f"{connection.prefix}__") and connection.status.state == "failed":
                return f'No tool "{name}": MCP server {connection.name} is not available: {connection.status.detail}'
        names = [spec.name for spec in self.specs()]
        near = difflib.get_close_matches(name, names, n=1)
        hint = f" Did you mean {near[0]}?" if near else ""
        return f'No tool "{name}".{hint} There are: {", ".join(names)}.'


def skills_around(settings: ToolSettings, workspace: Workspace) -> tuple[FoundSkill, ...]:
    """The skills of the user and of the workspace."""
    return find_skills(settings.skill_folders, workspace.cwd, workspace.contains)


def fitting(tools: Sequence[ExternalTool], most: int) -> int:
    """How many of the first tools are offered: at most so many, and not so heavy that they would fill a context."""
    weights = accumulate(tool.weight for tool in tools[:most])
    return sum(weight <= OFFERED_CHARS for weight in weights)


def found_offer(call: ToolCall) -> PlannedCall:
    """The offer of a search for tools."""
    try:
        title, fault = f"Find tools: {in_title(query_of(call))}", None
    except ArgumentError as error:
        title, fault = call.name, str(error)
    return PlannedCall(announcement=Announcement(title=title, kind="search"), access="none", fault=fault)


@asynccontextmanager
async def open_toolbox(
    workspace: Workspace,
    ports: Ports,
    servers: Sequence[McpServer],
    settings: ToolSettings | None = None,
    *,
    on_change: OnChange | None = None,
) -> AsyncIterator[McpToolbox]:
    """The tools of a session. Enter and leave it in the session's task; leaving takes less than a second.

    The servers start in the background; see `McpToolbox.servers` for how they fare and `on_change` to hear of it.
    """
    settings = settings or ToolSettings()
    names = prefixes([server.name for server in servers])
    connections = [
        ServerConnection(
            server,
            prefix=prefix,
            cwd=workspace.cwd,
            keys=settings.keys,
            start_timeout_s=settings.start_timeout_s,
            call_timeout_s=settings.call_timeout_s,
            on_change=on_change,
            asker=ports.asker,
        )
        for server, prefix in zip(servers, names, strict=True)
    ]
    around = ToolContext(
        workspace=workspace, jobs=Jobs(workspace), fetches_private=settings.fetches_private, keys=settings.keys
    )
    around.skills = await anyio.to_thread.run_sync(skills_around, settings, workspace)
    server = builtin.build_server(around, ports)
    failure: Exception | None = None
    async with Client(server, cache=None, raise_exceptions=True) as client:
        await client.list_tools()  # the client learns here that results need no validation
        async with anyio.create_task_group() as tasks:
            for connection in connections:
                tasks.start_soon(connection.serve)
            try:
                yield McpToolbox(around, ports, client, connections, settings)
            except Exception as error:  # noqa: BLE001 - raised below, outside the task groups that would wrap it
                failure = error
            finally:
                for connection in connections:
                    connection.stop()
                tasks.start_soon(around.jobs.close)
                tasks.cancel_scope.deadline = anyio.current_time() + CLOSE_S
    if failure is not None:
        raise failure


# FROM tools.finding: `find_tools` and `call_tool`: tools that are too many to be offered one by one.
#
# Strategy: offered only beyond a bound on external tools. What is found is told with its schema, and called by its
# name
# through `call_tool`, which stands for that tool in everything: looks, rules, permissions. Pure.


MOST_FOUND = 10
SCHEMA_CHARS = 4_000

FIND_TOOLS = ToolSpec(
    name="find_tools",
    description=(
        "Search the tools that are there but not offered by themselves, by words of their names and descriptions. "
        "call_tool calls them."
    ),
    input_schema={
        "type": "object",
        "properties": {
            "query": {
                "type": "string",
                "minLength": 1,
                "maxLength": 300,
                "description": "What the tool should do or be named.",
            }
        },
        "required": ["query"],
    },
)

CALL_TOOL = ToolSpec(
    name="call_tool",
    description="Call a tool that find_tools has found.",
    input_schema={
        "type": "object",
        "properties": {
            "name": {"type": "string", "description": "The tool's name, exactly."},
            "arguments": {"type": "object", "description": "Its arguments, as its schema says."},
        },
        "required": ["name"],
    },
)


def query_of(call: ToolCall) -> str:
    """What is looked for. :raises ~crow.domain.errors.ArgumentError: nothing."""
    if call.fault is not None:
        raise ArgumentError(call.fault)
    query: str = check(call.name, FIND_TOOLS.input_schema, parse(call.name, call.arguments))["query"]
    return query


def call_within(call: ToolCall) -> ToolCall:
    """The call that a `call_tool` call stands for. :raises ~crow.domain.errors.ArgumentError: it names none."""
    if call.fault is not None:
        raise ArgumentError(call.fault)
    given = parse(call.name, call.arguments)
    name, arguments = given.get("name"), given.get("arguments") or {}
    if not isinstance(name, str) or not name:
        raise ArgumentError("call_tool: name is missing; expected the name of a tool that find_tools has found")
    if "__" not in name:
        raise ArgumentError(f"call_tool: {name} is no tool of an MCP server; call it by itself")
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return ToolCall(id=call.id, name=name, arguments=text)


def found_text(query: str, specs: Sequence[ToolSpec]) -> str:
    """The tools that fit the query best, with their schemas."""
    words = [word for word in re.split(r"[^a-z0-9]+", query.lower()) if word]
    scored = [(fit(words, spec), -place, spec) for place, spec in enumerate(specs)]
    best = sorted((found for found in scored if found[0] > 0), key=lambda found: found[:2], reverse=True)
    if not best:
        servers = sorted({spec.name.partition("__")[0] for spec in specs})
        return f'None of {len(specs)} tools fits "{query}". They are of these servers: {", ".join(servers)}.'
    blocks = [
        f"{spec.name}: {spec.description}\n{json.dumps(spec.input_schema, ensure_ascii=False)[:SCHEMA_CHARS]}"
        for _, _, spec in best[:MOST_FOUND]
    ]
    more = f"\n[{len(best) - MOST_FOUND} more fit; narrow the query]" if len(best) > MOST_FOUND else ""
    return "\n\n".join(blocks) + more


def fit(words: Sequence[str], spec: ToolSpec) -> int:
    """How well a tool fits: a word in the name counts for more than one in the description."""
    name, description = spec.name.lower(), spec.description.lower()
    return sum(3 * (word in name) + (word in description) for word in words)
