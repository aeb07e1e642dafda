"""All tools of one session: the built-in ones and those of external MCP servers.

The SDK of MCP takes 400 ms to import, but the first request to a model needs only the specs of the built-in tools.
Therefore a thread imports the SDK. If there are external servers, the import starts at once. Otherwise it runs while
the model thinks.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import anyio
import anyio.to_thread

from crow import tools
from crow.domain.entries import Announcement
from crow.domain.errors import ArgumentError
from crow.domain.messages import Part, ToolCall, ToolSpec
from crow.domain.rendering import in_title
from crow.tools import builtin
from crow.tools.agents import find_agents
from crow.tools.builtin.checks import Checks
from crow.tools.builtin.seen_files import SeenFiles
from crow.tools.builtin.session import task_outcome, task_spec, task_to_run
from crow.tools.builtin.shell import shell_spec
from crow.tools.builtin.task_changes import describe_changes, new_layer, settle_task
from crow.tools.builtin.tool import ToolContext, ToolInvocation, argument, check, parse, parse_foreign, tool_spec
from crow.tools.builtin.understand import ignored_note, understood
from crow.tools.isolated import isolated_context, isolated_plan
from crow.tools.jobs import Jobs
from crow.tools.mcp.deferred import (
    CALL_TOOL,
    FIND_TOOLS,
    definition,
    find_spec,
    find_tools,
    full_name,
    inner_call,
    query_of,
    understood_inner,
)
from crow.tools.mcp.logins import LoginFolder
from crow.tools.mcp.masking import masked_outcome, masked_output, masked_part, masked_plan
from crow.tools.mcp.names import checked_uri, prefixes
from crow.tools.process import HiddenKeys, KeySource
from crow.tools.servers import LoginAsker, McpServer, ServerPrompt
from crow.tools.skills import find_skills

if TYPE_CHECKING:
    from crow.tools.builtin.server import BuiltinClient
    from crow.tools.mcp.listing import ExternalTool
    from crow.tools.mcp.server import ExternalServer

_CLOSE_S = 0.5
"""Servers and commands have this many seconds to end when the session ends."""
_FAULT_CHARS = 4_000
"""The definition of a tool in an error message is cut to this length."""
_BUILTIN_SPECS = {spec.name: spec for spec in builtin.SPECS}
_BUILTIN_NAMES = frozenset(_BUILTIN_SPECS)

_LIST_RESOURCES = tool_spec(
    "list_resources",
    "List what MCP servers offer to read, such as documents and records: URIs, and templates of URIs whose variables "
    "you fill in. Read one with read_resource.",
    server=argument("string", "Only the resources of this server."),
    query=argument("string", "Words that the URI, name or description must contain.", maxLength=300),
    template=argument("string", "A template of the server: list values for one of its variables instead."),
    variable=argument("string", "The variable of the template."),
    value=argument("string", "The beginning of the value.", maxLength=300),
)
_READ_RESOURCE = tool_spec(
    "read_resource",
    "Read a resource of an MCP server.",
    required="server uri",
    server=argument("string", "The server, as list_resources names it."),
    uri=argument("string", "The URI of the resource, without variables."),
)
_RESOURCE_TOOLS = {spec.name: spec for spec in (_LIST_RESOURCES, _READ_RESOURCE)}
"""The tools that list and read resources. The model gets them while at least one server has resources."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolSettings:
    """The user's settings for tools."""

    start_timeout_s: float = 10.0
    """A server must start within this time."""
    call_timeout_s: float = 600.0
    """A call of a server's tool must end within this time."""
    offered: int = 100
    """The maximum number of external tools that are sent to the model."""
    offered_tokens: int = 2_000
    """If the external tools together take more tokens than this, or there are more of them than `offered`, the model
    finds them with `find_tools`."""
    always_offered: tuple[str, ...] = ()
    """Globs that match the names of external tools that are sent in any case, up to `offered` tools."""
    skill_folders: tuple[Path, ...] = ()
    """The user's own folders of skills."""
    agent_folders: tuple[Path, ...] = ()
    """The user's own folders of subagents."""
    server_places: tuple[Path, ...] = ()
    """A server without a sandbox starts in a directory of its own, which crow makes below one of these. Only the user
    can write there."""
    fetches_private: bool = False
    """The tool `fetch` may connect to private addresses."""
    checks: Mapping[str, str] = field(default_factory=dict)
    """Commands that check changes, by globs of the files that they are for."""
    keys: KeySource = HiddenKeys
    """Processes that tools start do not get these keys, and results do not show them."""
    login_folder: Path | None = None
    """The directory of the logins to servers. If None, crow does not log in."""
    on_secrets: Callable[[Iterable[str]], None] | None = None
    """Called with the tokens and secrets of each login that crow reads or makes, so that others can mask them."""
    asker: LoginAsker | None = None
    """Asks the user to log in, even if there is a login already. If it is None, the editor asks the user, but only if
    there is no valid login."""


@asynccontextmanager
async def open_toolbox(
    workspace: tools.Workspace,
    ports: tools.Ports,
    servers: Sequence[McpServer],
    settings: ToolSettings | None = None,
    *,
    on_change: Callable[[], Awaitable[None]] | None = None,
) -> AsyncIterator[McpToolbox]:
    """Open the tools of a session. Enter and leave this context in the session's task. Leaving takes less than a
    second.

    The servers start in the background. `McpToolbox.servers` returns their states. `on_change` is called when a server
    is ready, has failed, or has changed its tools or prompts.
    """
    settings = settings or ToolSettings()
    logins = LoginFolder(settings.login_folder, settings.on_secrets) if settings.login_folder is not None else None
    if logins is not None:
        settings = replace(settings, keys=partial(keys_with_tokens, settings.keys, logins))
    external = await _external_servers(workspace, ports, servers, settings, on_change, logins) if servers else ()
    context = ToolContext(
        workspace=workspace,
        jobs=Jobs(workspace, settings.keys),
        seen_files=SeenFiles(ports.in_context),
        fetches_private=settings.fetches_private,
        checks=Checks(settings.checks),
        keys=settings.keys,
    )
    context.skills, context.agents = await anyio.to_thread.run_sync(_load_files, settings, workspace, ports)
    failure: Exception | None = None
    own = _BuiltinServer(context, ports)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(own.serve)
        tasks.start_soon(context.jobs.watch)
        for server in external:
            tasks.start_soon(server.connection.serve)
        try:
            yield McpToolbox(context, ports, own, external, settings)
        except Exception as error:  # noqa: BLE001 - raised below, outside the task group that would wrap it
            failure = error
        finally:
            own.stop()
            for server in external:
                server.connection.stop()
            tasks.start_soon(context.jobs.close)
            tasks.start_soon(anyio.to_thread.run_sync, context.outputs.remove)
            tasks.cancel_scope.deadline = anyio.current_time() + _CLOSE_S
    if failure is not None:
        raise failure


async def _external_servers(
    workspace: tools.Workspace,
    ports: tools.Ports,
    servers: Sequence[McpServer],
    settings: ToolSettings,
    on_change: Callable[[], Awaitable[None]] | None,
    logins: LoginFolder | None,
) -> Sequence[ExternalServer]:
    """Return the external servers, which have not started yet: `serve` of a server's connection starts it."""
    await anyio.to_thread.run_sync(import_sdk)
    from crow.tools.mcp.connection import ServerConnection, ServerSetup
    from crow.tools.mcp.server import ExternalServer

    setups = [
        ServerSetup(
            server=server,
            prefix=prefix,
            workspace=workspace,
            keys=settings.keys,
            start_timeout_s=server.options.start_timeout_s or settings.start_timeout_s,
            call_timeout_s=server.options.call_timeout_s or settings.call_timeout_s,
            on_change=on_change,
            elicitation=ports.elicitation,
            sampler=ports.sampler,
            places=settings.server_places,
            logins=logins,
            asker=settings.asker,
        )
        for server, prefix in zip(servers, prefixes([server.name for server in servers]), strict=True)
    ]
    return [ExternalServer(ServerConnection(setup)) for setup in setups]


def keys_with_tokens(keys: KeySource, logins: LoginFolder) -> HiddenKeys:
    """Return the keys together with the tokens of MCP servers, because results must not show the tokens either."""
    found = keys()
    return replace(found, others=(*found.others, *logins.secrets)) if logins.secrets else found


def import_sdk() -> None:
    """Import the SDK of MCP and all modules of crow that use it. This call blocks the thread."""
    import crow.tools.builtin.server
    import crow.tools.mcp.server  # noqa: F401


class _BuiltinServer:
    """The in-process MCP server of the built-in tools, and its client. `serve` runs as a task, which waits
    until `start` is called."""

    def __init__(self, context: ToolContext, ports: tools.Ports) -> None:
        self._context = context
        self._ports = ports
        self._wanted = anyio.Event()
        """Set by `start`. A failed start replaces it, so that `serve` waits for the next `start`."""
        self._settled = anyio.Event()
        """Set when the server is ready or its start has failed. The next `start` after a failure replaces it."""
        self._stopped = anyio.Event()
        self._client: BuiltinClient | None = None
        """None until the server is ready."""
        self._failure: ImportError | MemoryError | OSError | None = None
        """Why the last start failed; None if it did not."""

    async def serve(self) -> None:
        """Wait for `start`, then serve until `stop`. If the import fails, the next call of a tool tries again."""
        while True:
            await self._wanted.wait()
            if self._stopped.is_set():
                return
            try:
                await anyio.to_thread.run_sync(import_sdk, abandon_on_cancel=True)
            except (ImportError, MemoryError, OSError) as error:  # for example, too many files are open
                self._failure = error
                self._wanted = anyio.Event()
                self._settled.set()
            else:
                break
        from crow.tools.builtin.server import BuiltinClient

        async with BuiltinClient.open(self._context, self._ports) as client:
            self._client = client
            self._settled.set()
            await self._stopped.wait()

    def start(self) -> None:
        """Start the server, unless that has happened already. If it has failed, try again."""
        if self._failure is not None:
            self._failure, self._settled = None, anyio.Event()
        self._wanted.set()

    def stop(self) -> None:
        """Let `serve` end."""
        self._stopped.set()
        self._wanted.set()

    async def call(
        self, call: ToolCall, call_id: str, on_output: tools.OnOutput, planned: tools.PlannedCall | None
    ) -> tools.Outcome:
        """Run a call. :raises ~crow.domain.errors.ArgumentError: the arguments are invalid."""
        arguments = builtin.arguments_of(call)
        self.start()
        await self._settled.wait()
        if self._client is None:
            return tools.Outcome(text=f"crow cannot import the MCP SDK: {self._failure}", is_error=True)
        # Wait in the caller's task: a cancelled turn ends all its waiting calls at once, so none of them starts.
        async with builtin.slot_for(call.name, arguments, self._context):
            return await self._client.call(call.name, arguments, call_id, on_output, planned)


@dataclass(frozen=True, eq=False)
class McpToolbox:
    """The :class:`crow.tools.Toolbox` of a session, made by :func:`open_toolbox`.

    Built-in tools have plain names. The names of external tools begin with the prefix of their server, so they cannot
    replace a built-in tool.
    """

    _context: ToolContext
    _ports: tools.Ports
    _own: _BuiltinServer
    _external: Sequence[ExternalServer]
    _settings: ToolSettings
    _only: frozenset[str] | None = None
    """The names of the tools that this toolbox is narrowed to."""

    def specs(self) -> tuple[ToolSpec, ...]:
        """See :meth:`crow.tools.Toolbox.specs`. Tools of servers that are not ready are left out."""
        absent = {"skill"} if not self._context.skills else set()
        if self._ports.subagents is None:
            absent.add("task")
        own = tuple(self._offered(spec) for spec in builtin.SPECS if spec.name not in absent)
        reading = _RESOURCE_TOOLS.values() if any(one.offers_resources for one in self._external) else ()
        plain = (spec for spec in (*own, *reading) if self._has(spec.name))
        sent, deferred = self._split()
        finding = (find_spec([tool.spec for tool in deferred]), CALL_TOOL) if deferred else ()
        return (*plain, *finding, *(tool.spec for tool in sent))

    def deferred(self) -> tuple[ToolSpec, ...]:
        """See :meth:`crow.tools.Toolbox.deferred`."""
        return tuple(tool.spec for tool in self._split()[1])

    @asynccontextmanager
    async def isolated(self, task_id: str) -> AsyncIterator[McpToolbox]:
        """See :meth:`crow.tools.Toolbox.isolated`. Tools of external servers are left out, because they would change
        the workspace itself instead of the layer."""
        layer = await new_layer(self._context.workspace.layers, task_id)
        context, ports = isolated_context(self._context, self._ports, layer)
        own, failure = _BuiltinServer(context, ports), None
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(own.serve)
            try:
                yield replace(self, _context=context, _ports=ports, _own=own, _external=())
            except Exception as error:  # noqa: BLE001 - raised below, as in `open_toolbox`
                failure = error
            finally:
                own.stop()
                layer.close()
        if failure is not None:
            raise failure

    async def changes_of(self, task_id: str) -> str:
        """See :meth:`crow.tools.Toolbox.changes_of`."""
        return await describe_changes(self._context.workspace, task_id)

    def narrowed(self, names: Collection[str]) -> McpToolbox:
        """See :meth:`crow.tools.Toolbox.narrowed`."""
        return replace(self, _only=frozenset(names))

    def _has(self, name: str) -> bool:
        return self._only is None or name in self._only

    def _split(self) -> tuple[list[ExternalTool], list[ExternalTool]]:
        """Return the external tools that are sent to the model, and those that it has to find with `find_tools`.

        If all tools together are small enough, all of them are sent, otherwise only those in `always_offered`. So the
        first request stays small however many tools there are.
        """
        always = self._settings.always_offered
        external = [tool for tool in self._external_tools() if self._has(tool.spec.name)]
        chosen = [tool for tool in external if any(fnmatchcase(tool.spec.name, glob) for glob in always)]
        sent = {tool.spec.name for tool in chosen[: self._settings.offered]}
        rest = [tool for tool in external if tool.spec.name not in sent]
        fits = sum(tool.tokens for tool in rest) <= self._settings.offered_tokens
        if fits and len(external) <= self._settings.offered:
            return external, []
        return [tool for tool in external if tool.spec.name in sent], rest

    def servers(self) -> tuple[tools.ServerStatus, ...]:
        """See :meth:`crow.tools.Toolbox.servers`."""
        return tuple(server.status for server in self._external)

    def skills(self) -> tuple[tools.SkillInfo, ...]:
        """See :meth:`crow.tools.Toolbox.skills`."""
        return self._context.skills

    def agents(self) -> tuple[tools.AgentKind, ...]:
        """See :meth:`crow.tools.Toolbox.agents`."""
        return self._context.agents

    def _offered(self, spec: ToolSpec) -> ToolSpec:
        """Return the spec of a built-in tool, as the model gets it."""
        if spec.name == "shell":
            return shell_spec(spec, self._context.workspace.credential_hosts)
        if spec.name != "task":
            return spec
        policy = self._ports.agents
        usable = [kind for kind in self._context.agents if not kind.problem]
        return task_spec(usable, lambda name: policy is not None and policy.has_model(name))

    def prompts(self) -> tuple[ServerPrompt, ...]:
        """See :class:`crow.tools.servers.ServerPrompts`."""
        return tuple(prompt for server in self._ready() for prompt in server.connection.offers.prompts)

    async def prompt(self, name: str) -> ServerPrompt | None:
        """See :class:`crow.tools.servers.ServerPrompts`."""
        server = self._server_of(name, ":")
        prompts = await server.list_prompts() if server is not None else ()
        return next((prompt for prompt in prompts if prompt.name == name), None)

    async def fill(self, prompt: ServerPrompt, arguments: Mapping[str, str]) -> tuple[Part, ...]:
        """See :class:`crow.tools.servers.ServerPrompts`."""
        server = self._server_of(prompt.name, ":")
        assert server is not None, "the prompt belongs to this toolbox"
        mask = self._settings.keys().mask
        return tuple(masked_part(part, mask) for part in await server.fill_prompt(prompt, arguments))

    async def wait_ready(self, timeout_s: float, *, beside: Callable[[], None] | None = None) -> None:
        """Get ready for a turn: find skills and agent files, and start failed servers again.

        Wait at most `timeout_s` for servers that are starting. Do not wait for a server that this call starts again
        and that has never been ready. `beside` is an additional function that is called in the thread that finds the
        files.
        """

        def load() -> tuple[tuple[tools.SkillInfo, ...], tuple[tools.AgentKind, ...]]:
            if beside is not None:
                beside()
            return _load_files(self._settings, self._context.workspace, self._ports)

        self._context.skills, self._context.agents = await anyio.to_thread.run_sync(load)
        revived = [server for server in self._external if server.connection.revive()]
        awaited = [server for server in self._external if server.connection.was_ready or server not in revived]
        with anyio.move_on_after(timeout_s):
            for server in awaited:
                await server.connection.listed()

    async def restart(self, name: str | None = None) -> tuple[str, ...]:
        """See :meth:`crow.tools.Toolbox.restart`. Return when the servers are ready or have failed."""
        chosen = [
            server
            for server in self._external
            if server.name == name or (name is None and server.status.state != "ready")
        ]
        for server in chosen:
            server.connection.restart()
        for server in chosen:
            await server.connection.settled.wait()
        return tuple(server.name for server in chosen)

    def prepare(self) -> None:
        """See :meth:`crow.tools.Toolbox.prepare`."""
        self._own.start()

    def understood(self, call: ToolCall) -> ToolCall:
        """See :meth:`crow.tools.Toolbox.understood`."""
        specs = {spec.name: spec for spec in self._external_specs()}
        if call.name == CALL_TOOL.name:
            return understood_inner(call, specs)
        own = {spec.name for spec in self.specs()}
        meant = understood(call, own, _BUILTIN_SPECS)
        return meant if meant.name in own else replace(meant, name=full_name(meant.name, specs))

    async def plan(self, call: ToolCall) -> tools.PlannedCall:
        """See :meth:`crow.tools.Toolbox.plan`."""
        plan = await self._plan(call)
        plan = isolated_plan(plan) if self._context.is_isolated else plan
        return masked_plan(plan, self._settings.keys().mask)

    async def run(
        self, call: ToolCall, call_id: str, on_output: tools.OnOutput, *, planned: tools.PlannedCall | None = None
    ) -> tools.Outcome:
        """See :meth:`crow.tools.Toolbox.run`."""
        mask = self._settings.keys().mask

        async def on_masked_output(text: str) -> None:
            await on_output(masked_output(text, mask))

        return masked_outcome(await self._run(call, call_id, on_masked_output, planned), mask)

    async def _plan(self, call: ToolCall) -> tools.PlannedCall:
        if call.name in _BUILTIN_NAMES:
            return await builtin.plan(call, self._context)
        try:
            if call.name == FIND_TOOLS.name:
                announcement = Announcement(title=f"Find tools: {in_title(query_of(call))}", kind="search")
                return tools.PlannedCall(announcement=announcement, access="none")
            if call.name == CALL_TOOL.name:
                inner = inner_call(call)
                plan = await self._plan(inner)
                coverage = replace(plan.coverage, rule_tool=inner.name, inner_arguments=inner.arguments)
                return replace(plan, coverage=coverage)
            if call.name in _RESOURCE_TOOLS and self._external:
                return await self._plan_reading(call)
        except ArgumentError as error:
            is_search = call.name in (FIND_TOOLS.name, _LIST_RESOURCES.name)
            announcement = Announcement(title=call.name, kind="search" if is_search else "other")
            return tools.PlannedCall(
                announcement=announcement, access="none" if is_search else "external", fault=str(error)
            )
        found = await self._find(call.name)
        unknown = Announcement(title=in_title(call.name))
        return tools.PlannedCall(
            announcement=unknown if found is None else found[0].announce(found[1].title),
            access="external",
            fault=self._fault(call, found),
            unknown_tool=call.name if found is None else "",
            coverage=tools.Coverage(
                is_read_only=found is not None and found[1].is_read_only,
                fingerprint="" if found is None else found[1].fingerprint,
                definition="" if found is None else found[1].definition,
            ),
        )

    async def _run(
        self, call: ToolCall, call_id: str, on_output: tools.OnOutput, planned: tools.PlannedCall | None
    ) -> tools.Outcome:
        try:
            if call.name == "task" and self._ports.subagents is not None:
                arguments = builtin.arguments_of(call)
                if arguments.get("changes"):
                    return await settle_task(ToolInvocation.plain(self._context, self._ports, call_id), arguments)
                # Run the subagent in the caller's task, so that it has always ended when the call ends.
                task = await task_to_run(self._context, arguments, planned)
                return task_outcome(await self._ports.subagents.delegate(call_id, task, self, on_output))
            if call.name in _BUILTIN_NAMES:
                outcome = await self._own.call(call, call_id, on_output, planned)
                note = ignored_note(call, _BUILTIN_SPECS[call.name])
                return replace(outcome, text=f"{outcome.text}\n{note}") if note else outcome
            if call.name == FIND_TOOLS.name:
                find = partial(find_tools, query_of(call), self.deferred() or self._external_specs())
                return tools.Outcome(text=await anyio.to_thread.run_sync(find))
            if call.name in _RESOURCE_TOOLS and self._external:
                return await self._read(call, call_id)
            if call.name == CALL_TOOL.name:
                call = inner_call(call)
        except ArgumentError as error:
            return tools.Outcome(text=str(error), is_error=True)
        found = await self._find(call.name)
        fault = self._fault(call, found)
        if found is None or fault is not None:
            return tools.Outcome(text=fault or "", is_error=True)
        server, tool = found
        if planned is not None and planned.coverage.fingerprint not in ("", tool.fingerprint):
            text = f"{call.name} was not called: its server changed the tool after the call was planned. Call it again."
            return tools.Outcome(text=text, is_error=True)
        return await server.call(tool, parse_foreign(call, tool.spec), on_output, call_id)

    async def _plan_reading(self, call: ToolCall) -> tools.PlannedCall:
        """Plan a call that lists or reads resources. Permission rules treat reading a resource as a call of the
        server's tool `read_resource`, although the server has no such tool.

        :raises ~crow.domain.errors.ArgumentError: the arguments are invalid, or there is no such server.
        """
        arguments = _resource_arguments(call)
        subject = arguments.get("uri") or arguments.get("template")
        if subject is None:
            self._readable(arguments.get("server"))
            announcement = Announcement(title="List resources", kind="search")
            return tools.PlannedCall(announcement=announcement, access="none")
        (server,) = self._readable(arguments["server"])
        return tools.PlannedCall(
            announcement=server.announce(subject, "read"),
            access="external",
            coverage=tools.Coverage(
                rule_tool=f"{server.prefix}__{_READ_RESOURCE.name}",
                narrower_arguments=(subject,),
                is_read_only=server.is_reading_read_only,
            ),
        )

    async def _read(self, call: ToolCall, call_id: str) -> tools.Outcome:
        """List or read resources. :raises ~crow.domain.errors.ArgumentError: see `_plan_reading`."""
        from crow.tools.mcp.resources import describe_resources

        arguments = _resource_arguments(call)
        readable = self._readable(arguments.get("server"))
        if "uri" in arguments:
            return await readable[0].read_resource(arguments["uri"], call_id)
        if "template" in arguments:
            return await readable[0].complete(arguments["template"], arguments["variable"], arguments.get("value", ""))
        listed = {server.prefix: server.connection.offers.resources for server in readable}
        return tools.Outcome(text=describe_resources(listed, arguments.get("query", "")))

    def _readable(self, name: str | None) -> list[ExternalServer]:
        """Return the server with this name. Without a name, return all servers that have resources.

        :raises ~crow.domain.errors.ArgumentError: there is no such server, or the user's settings do not let the model
            read its resources.
        """
        if name is None:
            return [server for server in self._external if server.offers_resources]
        for server in self._external:
            if name in (server.prefix, server.name):
                if not server.may_be_read:
                    raise ArgumentError(f"The user's settings do not let you read resources of {server.name}.")
                return [server]
        names = ", ".join(server.prefix for server in self._external if server.offers_resources)
        raise ArgumentError(f'No MCP server "{name}" has resources. Servers with resources: {names or "none"}.')

    def _ready(self) -> list[ExternalServer]:
        return [server for server in self._external if server.connection.is_ready]

    def _external_tools(self) -> tuple[ExternalTool, ...]:
        return tuple(tool for server in self._ready() for tool in server.connection.offers.tools)

    def _external_specs(self) -> list[ToolSpec]:
        return [tool.spec for tool in self._external_tools() if self._has(tool.spec.name)]

    def _server_of(self, name: str, separator: str) -> ExternalServer | None:
        """Return the server that has the tool or prompt with this name."""
        return next((one for one in self._external if name.startswith(f"{one.prefix}{separator}")), None)

    async def _find(self, name: str) -> tuple[ExternalServer, ExternalTool] | None:
        """Return the server that offers the tool with this name, and the tool itself; None if there is no such tool.
        Wait for a server that is starting, and restart a failed server."""
        server = self._server_of(name, "__")
        if server is None or not self._has(name):
            return None
        await server.connection.available()
        return next(((server, tool) for tool in server.connection.offers.tools if tool.spec.name == name), None)

    def _fault(self, call: ToolCall, found: tuple[ExternalServer, ExternalTool] | None) -> str | None:
        """Return why an external call cannot run, or None if it can."""
        if found is None:
            return self._describe_unknown(call.name)
        server, tool = found
        if call.fault is None and server.status.state == "failed":
            return f"MCP server {server.name} is not available: {server.status.detail}"
        try:
            parse_foreign(call, tool.spec)
        except ArgumentError as error:
            is_deferred = any(each.spec.name == call.name for each in self._split()[1])
            told = f"\n{definition(tool.spec)}"[:_FAULT_CHARS] if is_deferred else ""
            return f"{error}{told}"
        return None

    def _describe_unknown(self, name: str) -> str:
        server = self._server_of(name, "__")
        if server is not None and server.status.state == "failed":
            return f'No tool "{name}": MCP server {server.name} is not available: {server.status.detail}'
        return f'No tool "{name}".'


def _load_files(
    settings: ToolSettings, workspace: tools.Workspace, ports: tools.Ports
) -> tuple[tuple[tools.SkillInfo, ...], tuple[tools.AgentKind, ...]]:
    """Find the skills and the kinds of subagents that the user and the workspace have. This call blocks the thread."""

    def is_open(path: Path) -> bool:
        return workspace.contains(path) and workspace.read_protection(path) == "none"

    found = find_agents(settings.agent_folders, workspace.cwd, is_open)
    agents = tuple(kind for kind in found if ports.agents is None or ports.agents.may_offer(kind))
    return find_skills(settings.skill_folders, workspace.cwd, is_open), agents


def _resource_arguments(call: ToolCall) -> dict[str, str]:
    """Return the arguments of a call that lists or reads resources. :raises ~crow.domain.errors.ArgumentError: the
    arguments are invalid."""
    if call.fault is not None:
        raise ArgumentError(call.fault)
    spec = _RESOURCE_TOOLS[call.name]
    arguments: dict[str, str] = dict(check(call.name, spec.input_schema, parse(call.name, call.arguments)))
    try:
        if "uri" in arguments or "template" in arguments:
            checked_uri(arguments.get("uri", arguments.get("template")))
    except ArgumentError as error:
        raise ArgumentError(f"{call.name}: {error}") from None
    if "template" in arguments and not {"server", "variable"} <= arguments.keys():
        raise ArgumentError(f"{call.name}: if template is given, server and variable must be given too")
    if re.search(r"[{}]", arguments.get("uri", "")):
        raise ArgumentError(f"{call.name}: the uri is a template; fill in the variables between the braces")
    return arguments
