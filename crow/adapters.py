"""Opens the models, tools, workspaces and databases that the settings describe.

No other module chooses an adapter. openai and mcp take 700 ms to import, and `initialize` and `session/new` do not need
them. So the functions that need them import them when they are called.
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, Protocol, TypeAlias

import anyio.to_thread

from crow.llm import EndpointMemory, Model
from crow.llm.dialect import Dialect
from crow.llm.endpoint import Endpoint, EndpointTimeouts
from crow.llm.offline import OfflineModel
from crow.settings import OFFLINE, Loaded, Settings, Target
from crow.settings.endpoints import preset_at, run_key_command
from crow.settings.values import McpServerSettings, expand_variables
from crow.store.sqlite.store import SqliteStore as SqliteStore  # re-exported for maintenance commands
from crow.tools import HttpServer, McpServer, Ports, ServerOptions, StdioServer, Workspace
from crow.tools.process import HiddenKeys
from crow.tools.workspace import DiskWorkspace

if TYPE_CHECKING:
    from crow.llm.models import Offered
    from crow.tools.mcp.client import McpToolbox


class EndpointModel(Model, Protocol):
    """A model whose endpoint can list its models."""

    async def models(self) -> Sequence[Offered]:
        """All models of the endpoint. :raises ModelError:"""
        ...


LoadedSource: TypeAlias = Callable[[], Loaded]
"""Returns the current settings, because the user may change them while a session is open."""


def import_prompt_adapters() -> None:
    """Import the packages that are first needed by a prompt. Blocks."""
    import crow.agent.runner
    import crow.llm.chat_completions
    import crow.tools.mcp.client  # noqa: F401


async def open_model(target: Target, memory: EndpointMemory | None) -> EndpointModel:
    """Open an endpoint's model, with what `memory` knows about it. :raises ConfigError: its key command fails."""
    from crow.llm.chat_completions import ChatCompletions

    command = target.endpoint.api_key_command if target.endpoint.api_key is None else None
    key = await anyio.to_thread.run_sync(run_key_command, command) if command else None
    endpoint = endpoint_of(target, key=key)
    learned = {} if memory is None else await memory.learned(endpoint.base_url, endpoint.model)
    return ChatCompletions(endpoint, memory=memory, learned=learned)


def offline_model(settings: Settings) -> OfflineModel:
    """The built-in model."""
    return OfflineModel(context_window=settings.model.with_name(OFFLINE).context_window)


def endpoint_of(target: Target, *, key: str | None = None) -> Endpoint:
    """The endpoint of a target. `key` is the output of its key command, or "pending" until the command has run."""
    settings, options, preset = target.endpoint, target.options, preset_at(target.base_url)
    if key is None and settings.api_key is not None:
        key = settings.api_key.get_secret_value()
    if key is None and settings.api_key_command:
        key = "pending"
    return Endpoint(
        base_url=target.base_url,
        model=target.model,
        api_key=key,
        key_hint=target.key_hint,
        headers=tuple(settings.headers.items()),
        context_window=options.context_window,
        max_output_tokens=options.max_output_tokens,
        input_price=options.input_price,
        cached_price=options.cached_price,
        output_price=options.output_price,
        timeouts=EndpointTimeouts(
            connect_s=settings.connect_timeout_s or EndpointTimeouts().connect_s,
            first_byte_s=settings.first_byte_timeout_s or EndpointTimeouts().first_byte_s,
            idle_s=settings.idle_timeout_s or EndpointTimeouts().idle_s,
        ),
        extra_body={**settings.extra_body, **options.extra_body},
        thought_level=options.thought_level,
        dialect=Dialect(
            thinking=preset.thinking,
            limit_field=preset.limit_field,
            cache=preset.cache,
            takes_images=options.takes_images,
        ),
        proxy=settings.proxy,
        ca_file=settings.ca_file,
    )


def open_toolbox(
    loaded: LoadedSource,
    workspace: Workspace,
    ports: Ports,
    servers: Sequence[McpServer],
    *,
    on_change: Callable[[], Awaitable[None]] | None = None,
) -> AbstractAsyncContextManager[McpToolbox]:
    """Open the built-in tools and those of `servers`. Enter and leave the context manager in the session's task."""
    from crow.tools.mcp.client import ToolSettings, open_toolbox

    limits = loaded().settings.limits
    settings = ToolSettings(
        start_timeout_s=limits.mcp_start_timeout_s,
        call_timeout_s=limits.mcp_call_timeout_s,
        offered=limits.offered_tools,
        skill_folders=(loaded().paths.config_file.parent / "skills",),
        fetches_private=loaded().settings.permissions.fetch_private,
        keys=lambda: hidden_keys(loaded()),
    )
    return open_toolbox(workspace, ports, servers, settings, on_change=on_change)


def open_workspace(loaded: LoadedSource, cwd: str, directories: Sequence[str]) -> Workspace:
    """Open the workspace on disk. Tools cannot write crow's own files, and commands do not see the keys."""
    paths = loaded().paths
    config = paths.config_file.parent
    readable = (config / "skills", config / "commands")
    own = (paths.config_file, paths.database, paths.log_file, *readable)
    return DiskWorkspace(cwd, directories, keys=lambda: hidden_keys(loaded()), own=own, own_readable=readable)


def hidden_keys(loaded: Loaded) -> HiddenKeys:
    """The keys that no child process may get."""
    return HiddenKeys(variables=loaded.keys.variables, values=loaded.keys.values)


def configured_servers(settings: Settings) -> tuple[McpServer, ...]:
    """The enabled MCP servers of the user's file."""
    return tuple(mcp_server(name, server) for name, server in settings.mcp_servers.items() if server.enabled)


def mcp_server(name: str, settings: McpServerSettings) -> McpServer:
    """One MCP server of the user's file, with its variables replaced."""
    settings, problem = expand_variables(settings, os.environ)
    read_only = settings.read_only
    options = ServerOptions(
        allow=settings.allow_tools,
        deny=settings.deny_tools,
        read_only=read_only if isinstance(read_only, tuple) else ("*",) if read_only else (),
        start_timeout_s=settings.start_timeout_s,
        call_timeout_s=settings.call_timeout_s,
        problem=problem,
    )
    if settings.url is not None:
        headers = tuple(settings.headers.items())
        return HttpServer(name=name, url=settings.url, headers=headers, transport=settings.transport, options=options)
    env = tuple(settings.env.items())
    return StdioServer(name=name, command=settings.command or "", args=settings.args, env=env, options=options)


async def open_store(loaded: Loaded) -> SqliteStore:
    """Open the user's database. The caller closes it. :raises StoreError: it cannot be used."""
    return await SqliteStore.open(loaded.paths.database)
