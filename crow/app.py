"""The composition root: the only place that picks adapters and wires them.

Strategy: start-up imports what `initialize` needs and nothing else; the store is opened by the first session, and the
heavy packages (openai, mcp) are imported in a thread once nobody has asked for a while, or at the first prompt. Has no
logic of its own.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import threading
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING

import anyio

from crow import __version__
from crow.agent import Adapters, SessionSettings
from crow.agent.commands import COMMANDS
from crow.agent.compaction.budget import CompactionPolicy
from crow.domain.errors import AuthError, CrowError
from crow.log import start_logging
from crow.runtime import importing
from crow.settings import OFFLINE, Loaded, McpServerSettings, expanded, names_offered, target_of
from crow.settings.endpoints import Target

if TYPE_CHECKING:
    from crow.agent.compaction.hooks import Hooks, NamedHook
    from crow.agent.runner import WaitableToolbox
    from crow.agent.templates import Template
    from crow.frontend.server import ServerDependencies
    from crow.llm import EndpointMemory, Model, ModelInfo
    from crow.llm.chat_completions import ChatCompletions
    from crow.llm.endpoint import Endpoint
    from crow.llm.offline import OfflineModel
    from crow.store import Store
    from crow.store.sqlite.admin import SessionAdmin
    from crow.store.sqlite.store import SqliteStore
    from crow.tools import McpServer, Ports, Workspace
    from crow.tools.process import HiddenKeys
    from crow.trace.record import Recorder

__all__ = [
    "NOTHING_CONFIGURED",
    "endpoint_of",
    "hidden_keys",
    "open_model",
    "open_store",
    "serve",
    "server_from",
    "upkeep_of",
]

logger = logging.getLogger(__name__)

MODELS_WAIT_S = 10.0
MOST_MODELS = 200
"""More than that is no choice, and the list goes to the client with every change."""

NOTHING_CONFIGURED = (
    "Crow has no model to ask. Run `crow login`, or set OPENAI_API_KEY and CROW_MODEL (and OPENAI_BASE_URL for an "
    'endpoint other than OpenAI\'s), or [model] in {file}; CROW_MODEL="offline" is the built-in model that needs none '
    "of them."
)


async def open_store(loaded: Loaded) -> SqliteStore:
    """The user's database. :raises StoreError: it cannot be used."""
    from crow.store.sqlite.store import SqliteStore

    return await SqliteStore.open(loaded.paths.database)


def upkeep_of(store: SqliteStore) -> SessionAdmin:
    """What people do with the old sessions of an open store."""
    from crow.store.sqlite.admin import SessionAdmin

    return SessionAdmin(store)


async def serve(loaded: Loaded, reload: Callable[[], Loaded]) -> int:
    """Serve ACP on stdin and stdout until stdin ends; the exit code. `reload` gathers the settings anew."""
    with importing():
        # What opens a session, too: the request behind `initialize` does, and here the collector rests.
        import crow.store.sqlite.store
        import crow.tools.workspace  # noqa: F401
        from crow.frontend.agent import AcpAgent
        from crow.frontend.server import serve as serve_connection
        from crow.frontend.transport import StdioTransport, claim_stdio

    with claim_stdio() as (source, sink), recorder(loaded) as observe:
        wiring = Wiring(loaded, reload=reload, observe=observe)
        agent = AcpAgent(wiring.kit())
        await serve_connection(StdioTransport(source, sink, observe=observe), agent, agent.warm)
        await wiring.close()
    gc.freeze()  # else the interpreter's last collection walks all that was imported: 250 ms of an exit
    return 0


@contextmanager
def recorder(loaded: Loaded) -> Iterator[Recorder | None]:
    """What records the connection, where CROW_TRACE asks for it."""
    if loaded.paths.trace is None:
        yield None
        return
    from crow.trace.record import Recorder

    made = Recorder(loaded.paths.trace, loaded.settings.secrets())
    try:
        yield made
    finally:
        made.close()


class Wiring:
    """The adapters of one process, made when they are first needed. Without `reload` the settings stay as they are."""

    def __init__(
        self, loaded: Loaded, *, reload: Callable[[], Loaded] | None = None, observe: Recorder | None = None
    ) -> None:
        self._loaded = loaded
        self._settings = loaded.settings
        self._reload = reload
        self._observe = observe
        self._secrets = set(loaded.settings.secrets())
        self._of_sessions: SessionSettings | None = None
        self._store: Store | None = None
        self._models: dict[str, Model] = {}
        self._retired: list[Model] = []
        self._imports = Imports()
        self._hooks: Hooks | None = None
        # The configured models; those that the endpoint tells of come behind them.
        self._offered = list(names_offered(self._settings))

    def kit(self) -> ServerDependencies:
        """What the front end needs."""
        from crow.frontend.server import EditorTimeouts, ServerDependencies

        editor = self._settings.editor
        return ServerDependencies(
            version=__version__,
            open_store=self._open_store,
            adapters=self._adapters,
            workspace=self._workspace,
            check=lambda: self._check(self._default_model()),
            warm_up=self._imports.load,
            trim=trimmed,
            more_models=self._more_models,
            renewed=self._renewed,
            models=tuple(self._offered),
            model=self._default_model(),
            mode=self._settings.permissions.mode,
            auto_compact=self._settings.compaction.auto,
            editor_terminals=editor.terminals,
            hidden_variables=lambda: self._hidden_keys().names(),
            timeouts=EditorTimeouts(editor_s=editor.answer_timeout_s, user_s=editor.user_timeout_s),
            servers=tuple(
                server_from(name, server) for name, server in self._settings.mcp_servers.items() if server.enabled
            ),
            log_hint=f"Details are in {self._loaded.paths.log_file}.",
        )

    def _renewed(self) -> ServerDependencies | None:
        """What the front end needs now, if the user's file is another since: models and endpoints hold from the next
        prompt, as do rules and compaction; what only an opened session looks at, for those that are opened later."""
        if self._reload is None or not self._loaded.is_stale:
            return None
        loaded = self._reload()
        if loaded.problem is not None and self._loaded.problem is None:
            logger.warning("The settings stay as they were: %s", loaded.problem)
            self._loaded = replace(self._loaded, stamp=loaded.stamp)
            return None
        before, now = self._settings, loaded.settings
        self._loaded, self._settings, self._of_sessions = loaded, now, None
        self._mask(now.secrets())
        if (before.model, before.models, before.providers) != (now.model, now.models, now.providers):
            self._offered[:] = names_offered(now)
        if before != now:  # turns that run go on with what they have
            self._retired += self._models.values()
            self._models = {}
        return self.kit()

    def _mask(self, secrets: Iterable[str]) -> None:
        """New keys, and old ones too, must appear in no log and no recording."""
        self._secrets.update(secrets)
        start_logging(self._loaded.paths.log_file, self._settings.log.level, self._secrets)
        if self._observe is not None:
            self._observe.mask(self._secrets)

    def _default_model(self) -> str:
        """The model of new sessions; empty if none is set."""
        return next(iter(names_offered(self._settings)), "")

    def _templates(self) -> tuple[Template, ...]:
        """The user's own commands, as they are now."""
        from crow.agent.templates import read_templates

        taken = [spec.name for spec in COMMANDS]
        return read_templates(self._loaded.paths.config_file.parent / "commands", taken=taken)

    async def close(self) -> None:
        """Close the models' connections."""
        for model in (*self._retired, *self._models.values()):
            await model.close()

    async def _open_store(self) -> Store:
        self._store = await open_store(self._loaded)
        return self._store

    def _adapters(self, store: Store) -> Adapters:
        return Adapters(
            store=store,
            load=self._imports.load,
            model=self._model,
            info=self._info,
            open_toolbox=self._open_toolbox,
            default_model=self._default_model,
            models=self._offered,
            templates=self._templates,
            settings=self._session_settings,
            hooks=self._own_hooks,
        )

    def _session_settings(self) -> SessionSettings:
        if self._of_sessions is None:
            from crow.agent.permissions import user_rules

            limits, compaction = self._settings.limits, self._settings.compaction
            self._of_sessions = SessionSettings(
                steps_per_turn=limits.steps_per_turn,
                rules=user_rules(self._settings.permissions.allow, self._settings.permissions.deny),
                compaction=CompactionPolicy(
                    auto=compaction.auto,
                    threshold=compaction.threshold,
                    keep_tokens=compaction.keep_tokens,
                    target=compaction.target,
                    instruction=self._loaded.summary_prompt,
                    compact_model=compaction.compact_model or "",
                ),
            )
        return self._of_sessions

    def _own_hooks(self) -> Hooks:
        """The hooks of this process."""
        if self._hooks is None:
            from crow.agent.compaction.hooks import Hooks

            self._hooks = Hooks(find_hooks)
        return self._hooks

    def _hidden_keys(self) -> HiddenKeys:
        return hidden_keys(self._loaded)

    def _workspace(self, cwd: str, directories: Sequence[str]) -> Workspace:
        from crow.tools.workspace import DiskWorkspace

        paths = self._loaded.paths
        in_config = [paths.config_file.parent / name for name in ("skills", "commands")]
        return DiskWorkspace(
            cwd,
            directories,
            keys=self._hidden_keys,
            own=(paths.config_file, paths.database, paths.log_file, *in_config),
        )

    def _open_toolbox(
        self,
        workspace: Workspace,
        ports: Ports,
        servers: Sequence[McpServer],
        *,
        on_change: Callable[[], Awaitable[None]],
    ) -> AbstractAsyncContextManager[WaitableToolbox]:
        from crow.tools.mcp.client import ToolSettings, open_toolbox

        limits = self._settings.limits
        settings = ToolSettings(
            start_timeout_s=limits.mcp_start_timeout_s,
            call_timeout_s=limits.mcp_call_timeout_s,
            offered=limits.offered_tools,
            skill_folders=(self._loaded.paths.config_file.parent / "skills",),
            fetches_private=self._settings.permissions.fetch_private,
            keys=self._hidden_keys,
        )
        return open_toolbox(workspace, ports, servers, settings, on_change=on_change)

    def _check(self, name: str) -> None:
        """Whether a prompt could be answered. :raises AuthError: :raises ConfigError:"""
        if self._loaded.problem is not None:
            raise self._loaded.problem
        if not name and not self._has_endpoint():
            raise AuthError(NOTHING_CONFIGURED.format(file=self._loaded.paths.config_file))
        if name != OFFLINE:
            endpoint_of(target_of(name, self._settings)).check()

    def _has_endpoint(self) -> bool:
        """Whether the user named an endpoint, or has a key for the usual one."""
        return self._settings.model.api_key is not None or self._loaded.sources["model.base_url"] != "default"

    def _info(self, name: str) -> ModelInfo:
        """What is known of a model, without the packages that it needs to be asked."""
        if name in self._models:
            return self._models[name].info
        if name == OFFLINE:
            return self._offline().info
        return endpoint_of(target_of(name, self._settings)).info

    async def _model(self, name: str) -> Model:
        if name not in self._models:
            self._check(name)
            self._models[name] = await self._make_model(name)
        return self._models[name]

    async def _more_models(self) -> tuple[str, ...]:
        """What the default model's endpoint says it serves; nothing where it does not say so soon."""
        name = self._default_model()
        if name == OFFLINE or not (name or self._has_endpoint()):
            return ()
        try:
            with anyio.fail_after(MODELS_WAIT_S):
                model = await open_model(target_of(name, self._settings), self._store)
                try:
                    told = await model.models()
                finally:
                    await model.close()
        except (CrowError, TimeoutError) as error:
            logger.info("The endpoint's models are not known: %s", error)
            return ()
        names = [self._named_at(name, each.name) for each in told[:MOST_MODELS]]
        self._offered += [each for each in dict.fromkeys(names) if each and each not in self._offered]
        return tuple(self._offered)

    def _named_at(self, default: str, model: str) -> str:
        """How a model of the default's endpoint is called here; empty if nothing names it."""
        there = target_of(default, self._settings).base_url
        provider, _, _ = default.partition("/")
        for name in (model, f"{provider}/{model}"):
            target = target_of(name, self._settings)
            if (target.base_url, target.model) == (there, model):
                return name
        return ""

    async def _make_model(self, name: str) -> Model:
        if name == OFFLINE:
            return self._offline()
        return await open_model(target_of(name, self._settings), self._store)

    def _offline(self) -> OfflineModel:
        from crow.llm.offline import OfflineModel

        window = self._settings.model.named(OFFLINE).context_window
        return OfflineModel(context_window=window)


def find_hooks(group: str) -> list[NamedHook]:
    """The functions that installed packages register in an entry point group."""
    from importlib.metadata import entry_points  # reads every installed package's metadata: only when it is needed

    return [(f"{point.name} ({point.value})", point.load) for point in entry_points(group=group)]


def server_from(name: str, settings: McpServerSettings) -> McpServer:
    """A server of the user's file."""
    from crow.tools import HttpServer, ServerOptions, StdioServer

    settings, problem = expanded(settings, os.environ)
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


def hidden_keys(loaded: Loaded) -> HiddenKeys:
    """What no process that tools start may see."""
    from crow.tools.process import HiddenKeys

    return HiddenKeys(variables=loaded.keys.variables, values=loaded.keys.values)


def trimmed() -> None:
    """See :func:`crow.runtime.trim`."""
    from crow.runtime import trim

    trim()


class Imports:
    """The heavy packages, imported once, in a thread of their own so that the protocol is served meanwhile."""

    def __init__(self) -> None:
        self._done: asyncio.Future[None] | None = None

    async def load(self) -> None:
        """Return when everything that a prompt needs is imported. :raises ImportError: a package is broken."""
        if self._done is None:
            self._done = asyncio.get_running_loop().create_future()
            # a daemon, so that an editor which closes at once need not wait for half a second of imports
            threading.Thread(target=self._run, args=(asyncio.get_running_loop(), self._done), daemon=True).start()
        await asyncio.shield(self._done)

    def _run(self, loop: asyncio.AbstractEventLoop, done: asyncio.Future[None]) -> None:
        failure: ImportError | None = None
        try:
            with importing():
                import crow.agent.runner
                import crow.llm.chat_completions
                import crow.llm.offline
                import crow.tools.mcp.client  # noqa: F401
                from crow.runtime import keep_little

            keep_little()
        except ImportError as error:
            failure = error

        def finish() -> None:
            if failure is None:
                done.set_result(None)
            else:
                done.set_exception(failure)

        with suppress(RuntimeError):  # the loop has ended: nobody waits
            loop.call_soon_threadsafe(finish)


# FROM endpoints: From what a model name means to the endpoint that is asked: the one place where settings become an
# `Endpoint`.
#
# Strategy: a plain mapping of values, besides the key that a command prints, which is asked for when it is first
# needed.


_PENDING = "pending"
"""Stands for the key that a command will print, where only its presence matters."""


def endpoint_of(target: Target, *, key: str | None = None) -> Endpoint:
    """The endpoint; `key` is what its command has printed."""
    from crow.llm.dialect import Dialect
    from crow.llm.endpoint import Endpoint, EndpointTimeouts

    preset = target.preset
    if key is None and target.key is not None:
        key = target.key.get_secret_value()
    if key is None and target.key_command:
        key = _PENDING
    return Endpoint(
        base_url=target.base_url,
        model=target.model,
        api_key=key,
        key_hint=target.key_hint,
        headers=tuple(target.headers.items()),
        context_window=target.context_window,
        max_output_tokens=target.max_output_tokens,
        input_price=target.input_price,
        cached_price=target.cached_price,
        output_price=target.output_price,
        timeouts=EndpointTimeouts(
            connect_s=target.connect_timeout_s,
            first_byte_s=target.first_byte_timeout_s,
            idle_s=target.idle_timeout_s,
        ),
        extra_body=target.extra_body,
        thought_level=target.thought_level,
        dialect=Dialect(
            thinking=preset.thinking.value if preset is not None and preset.thinking is not None else "effort",
            limit_field=preset.limit_field.value
            if preset is not None and preset.limit_field is not None
            else "max_tokens",
            cache=preset.cache.value if preset is not None and preset.cache is not None else None,
            takes_images=target.takes_images,
        ),
        proxy=target.proxy,
        ca_file=target.ca_file,
    )


async def open_model(target: Target, memory: EndpointMemory | None) -> ChatCompletions:
    """The model, with what is known of it. :raises ~crow.domain.errors.ConfigError: its key command fails."""
    import anyio.to_thread

    from crow.llm.chat_completions import ChatCompletions
    from crow.settings.endpoints import key_from

    key = await anyio.to_thread.run_sync(key_from, target.key_command) if target.key_command else None
    endpoint = endpoint_of(target, key=key)
    learned = {} if memory is None else await memory.learned(endpoint.base_url, endpoint.model)
    return ChatCompletions(endpoint, memory=memory, learned=learned)
