"""The composition root: the code that connects the ACP server with settings, sessions and adapters."""

from __future__ import annotations

import asyncio
import gc
import importlib.metadata
import logging
import socket
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import anyio
import anyio.to_thread

from crow import adapters
from crow.agent.commands import COMMANDS
from crow.agent.compaction.budget import CompactionPolicy
from crow.agent.hook_answers import EVENTS, HookEvent
from crow.agent.hooks import Hooks, NamedHook
from crow.agent.instructions import INSTRUCTION_FILE
from crow.agent.permissions.rules import user_rules
from crow.agent.templates import Template, read_templates
from crow.agent.turns.adapters import Adapters, SessionSettings
from crow.domain.errors import AuthError, CrowError, lacks_memory
from crow.domain.receipts import without_files
from crow.export.redact import committed
from crow.frontend.agent import Negotiate
from crow.frontend.agent import serve as serve_connection
from crow.frontend.endpoints import AuthState, Credentials, Provider
from crow.frontend.host import ServerDependencies
from crow.llm import Model, ModelInfo, ThoughtLevel
from crow.log import start_logging
from crow.protocol.transport import StdioTransport, claim_stdio
from crow.runtime import free_large_blocks_at_once, importing, trim
from crow.settings import OFFLINE, Loaded, Target, edit_tool_of, fallback_of, names_offered, target_of
from crow.settings.endpoints import MAIN_PROVIDER, ApiType, Gateway, Gateways, provider_target
from crow.settings.load import tokens_in_headers
from crow.store import Store
from crow.tools import SandboxStatus, Workspace
from crow.trace.record import Recorder

if TYPE_CHECKING:  # only `store.mirror` needs it
    from crow.mirror import Mirror

logger = logging.getLogger(__name__)

_MODEL_LIST_TIMEOUT_S = 10.0
_MODELS_LISTED = 200
"""Crow offers at most this many models of an endpoint to a client. With each change of an option of a session, crow
sends the whole list again, and nobody would choose from a longer list."""


async def serve(loaded: Loaded, reload: Callable[[], Loaded], *, offers_v2: bool = False) -> int:
    """Serve ACP on stdin and stdout until stdin ends, and return the exit code. Crow calls `reload` to read the
    settings again.

    If `offers_v2` is true, a client may choose the draft of version 2 of the protocol instead of version 1.
    """
    negotiate: Negotiate | None = None
    with importing():
        # Imported here because it loads the protocol's SDK, which takes 300 ms and which no other command needs.
        from crow.protocol.connection import EditorConnection, check_parameters

        if offers_v2:
            from crow.frontend.v2 import VersionTwo  # only users who ask for version 2 wait for this import

            negotiate = VersionTwo

    adapters.protect_process(loaded)
    with claim_stdio() as (source, sink), recording(loaded) as recorder:
        wiring = Wiring(loaded, reload=reload, recorder=recorder)
        async with adapters.orphans_ended():
            connection = EditorConnection(StdioTransport(source, sink, observe=recorder))
            await serve_connection(connection, wiring.dependencies(), check=check_parameters, negotiate=negotiate)
        await wiring.close()
    gc.freeze()  # otherwise the last garbage collection visits all imported objects: 250 ms at exit
    return 0


class Wiring:
    """Builds the models and adapters of one process from the settings, and connects them. If `reload` is None, the
    settings never change."""

    def __init__(
        self, loaded: Loaded, *, reload: Callable[[], Loaded] | None = None, recorder: Recorder | None = None
    ) -> None:
        self.is_bounded: Callable[[], bool] = lambda: False
        """A function that returns whether the clients are remote users, who do not own this machine. If they are, tools
        cannot leave the workspace, and commands run only in a sandbox. A changed result applies to sessions that are
        opened later."""
        self._loaded = loaded
        self._settings = loaded.settings
        self._reload = reload
        self._recorder = recorder
        self._secrets = set(loaded.settings.secrets())
        self._printed_keys: tuple[str, ...] = ()
        self._session_settings: SessionSettings | None = None
        self._store: Store | None = None
        self._mirror: Mirror | None = None
        self._gateways = Gateways()
        self._is_rerouted = False
        """Whether the client has changed an endpoint since the last call of `_reload_if_changed`."""
        self._generation = 0
        """The number of times that the models have been retired."""
        self._models: dict[str, adapters.ReplaceableModel] = {}
        """The open models, by their names."""
        self._retired_models: list[adapters.ReplaceableModel] = []
        """Models that no new turn uses, although running turns may use them. The next turn closes their connections."""
        self._imports = BackgroundImport(partial(adapters.prepare_prompts, loaded.paths.programs, loaded.settings))
        self._call_imports = BackgroundImport(adapters.prepare_calls)
        self._hooks = Hooks(
            find_hooks,
            configured=lambda: adapters.configured_hooks(self._loaded),
            has_network=lambda: self._settings.sandbox.network,
        )
        # The names of the configured models, then those of the models that the endpoint lists. All sessions share this
        # list, so it is changed in place.
        self._names = list(self._offered())
        # The thought levels of the models that the endpoint lists.
        self._levels: Mapping[str, tuple[ThoughtLevel, ...] | None] = {}

    @property
    def store(self) -> Store:
        """The store, which the first request for a session opens."""
        assert self._store is not None, "a session was opened"
        return self._store

    def dependencies(self) -> ServerDependencies:
        """Return the objects and values that the front end needs."""
        editor = self._settings.editor
        return ServerDependencies(
            open_store=self._open_store,
            adapters=self.adapters,
            workspace=self._open_workspace,
            check_model=lambda: self._check(self._default_model()),
            import_rest=self._imports.run,
            import_for_calls=self._call_imports.run,
            trim=trim,
            more_models=self._more_models,
            reload=self._reload_if_changed,
            endpoints=self,
            models=tuple(self._names),
            model=self._default_model(),
            mode=self._settings.permissions.mode,
            auto_compact=self._settings.compaction.auto,
            editor_terminals=editor.terminals,
            hidden_variables=lambda: adapters.hidden_keys(self._loaded).names(),
            editor_timeout_s=editor.answer_timeout_s,
            user_timeout_s=editor.user_timeout_s,
            has_network=self._settings.sandbox.network,
            servers=adapters.configured_servers(self._loaded),
            log_hint=f"Details are in {self._loaded.paths.log_file}.",
        )

    def adapters(self, store: Store) -> Adapters:
        """Return the adapters that sessions need."""
        return Adapters(
            store=store,
            load=self._imports.run,
            model=self._model,
            info=self._info,
            open_toolbox=partial(adapters.open_toolbox, lambda: self._loaded),
            default_model=self._default_model,
            fallback=lambda name: fallback_of(name, self._settings),
            edit_tool=lambda name: edit_tool_of(name, self._settings),
            models=self._names,
            templates=self._templates,
            settings=self._settings_of_sessions,
            user_instructions=self._loaded.paths.config_file.parent / INSTRUCTION_FILE,
            hooks=self._hooks,
            links=adapters.open_links(lambda: self._loaded),
            node=(self._settings.serve.node or socket.gethostname()) if store.notifies else "",
        )

    async def close(self) -> None:
        """Close the connections to all models, and the mirror. Then wait until every import that has begun is done,
        because a process that exits while a thread imports can crash, for example in OpenSSL."""
        if self._mirror is not None:
            await anyio.to_thread.run_sync(self._mirror.close)
        for model in (*self._retired_models, *self._models.values()):
            await model.close()
        for imports in (self._imports, self._call_imports):
            await imports.settle()

    def _reload_if_changed(self) -> ServerDependencies | None:
        """Return new dependencies if the user's settings file or the client's choice of endpoints has changed.
        Otherwise return None.

        Changes to models, endpoints, rules and compaction apply from the next prompt. Changes to other settings apply
        to sessions that are opened later.
        """
        is_rerouted, self._is_rerouted = self._is_rerouted, False
        if self._reload is None or not self._loaded.is_stale:
            return self.dependencies() if is_rerouted else None
        loaded = self._reload()
        if loaded.problem is not None and self._loaded.problem is None:
            logger.warning("The previous settings stay in effect: %s", loaded.problem)
            self._loaded = replace(self._loaded, stamp=loaded.stamp)
            return self.dependencies() if is_rerouted else None
        before, now = self._settings, loaded.settings
        self._loaded, self._settings, self._session_settings = loaded, now, None
        self._add_printed_keys(*self._printed_keys)
        adapters.protect_process(self._loaded)  # the file may name more environment variables that hold keys
        self._mask(now.secrets())
        if (before.model, before.models, before.providers) != (now.model, now.models, now.providers):
            self._names[:] = self._offered()
        if before != now:
            self._retire_models()
        return self.dependencies()

    def _retire_models(self) -> None:
        """Set the open models aside, so that each model is opened again when it is next used. Running turns keep the
        old models."""
        self._retired_models += self._models.values()
        self._models, self._levels = {}, {}
        self._generation += 1

    def providers(self) -> tuple[Provider, ...]:
        """See :class:`crow.frontend.endpoints.Endpoints`."""
        found = self._gateways.current(self._settings).items()
        return tuple(Provider(id=id_, current=current, is_required=id_ == MAIN_PROVIDER) for id_, current in found)

    def set_provider(self, provider_id: str, api_type: ApiType, base_url: str, headers: Mapping[str, str]) -> None:
        """See :class:`crow.frontend.endpoints.Endpoints`."""
        gateway = Gateway(base_url=base_url, headers=headers, api_type=api_type)
        self._gateways.set(provider_id, gateway, self._settings)
        for token in tokens_in_headers(headers):
            self._note_key(token)
        self._mask(headers.values())
        self._reroute()

    def disable_provider(self, provider_id: str) -> None:
        """See :class:`crow.frontend.endpoints.Endpoints`."""
        self._gateways.disable(provider_id, self._settings)
        self._reroute()

    def _reroute(self) -> None:
        self._is_rerouted = True
        self._names[:] = self._offered()
        self._retire_models()

    def credentials(self) -> Credentials:
        """See :class:`crow.frontend.endpoints.Endpoints`."""
        name, settings = self._default_model(), self._settings
        default = self._target(name)
        accounts = {}
        for provider in (None, *settings.providers):
            target = provider_target(provider, settings)
            if not self._gateways.is_disabled(target):
                target = self._gateways.route(target)
                endpoint = adapters.endpoint_of(target)
                host = urlsplit(target.base_url).netloc
                if not target.needs_key:
                    accounts[f"{host} (set by the editor)"] = provider == default.provider
                elif endpoint.api_key is not None:
                    accounts[f"API key for {host}"] = provider == default.provider
        return Credentials(state=self._auth_state(name, default), accounts={} if name == OFFLINE else accounts)

    def _auth_state(self, name: str, default: Target) -> AuthState:
        if self._loaded.problem is not None:
            return "unknown"
        if name == OFFLINE:
            return "not_required"
        endpoint = adapters.endpoint_of(default)
        if endpoint.api_key is not None or (endpoint.headers and not endpoint.needs_key):
            return "authenticated"
        return "unauthenticated" if endpoint.needs_key and not endpoint.info.is_local else "not_required"

    def _note_key(self, key: str) -> None:
        """Hide a key that `api_key_command` printed or that the client set. It is hidden in the same way as the keys in
        the settings."""
        if key not in self._printed_keys:
            self._printed_keys += (key,)
            self._add_printed_keys(key)
            self._mask([key])

    def _note_secret(self, secret: str) -> None:
        """Hide a credential for a host, also in the results of tools. Child processes may have such a credential, but
        not a key."""
        keys = self._loaded.keys
        if secret not in keys.others:
            self._loaded = replace(self._loaded, keys=replace(keys, others=(*keys.others, secret)))
            self._mask([secret])

    def _add_printed_keys(self, *printed: str) -> None:
        keys = self._loaded.keys
        self._loaded = replace(self._loaded, keys=replace(keys, values=(*keys.values, *printed)))

    def _mask(self, secrets: Iterable[str]) -> None:
        """From now on, also mask these secrets in the log and in the recording. All earlier secrets stay masked."""
        self._secrets.update(secrets)
        start_logging(self._loaded.paths.log_file, self._settings.log.level, self._secrets)
        if self._recorder is not None:
            self._recorder.mask(self._secrets)

    def _default_model(self) -> str:
        """Return the name of the model for new sessions, or an empty string if no model is set."""
        return next(iter(self._offered()), "")

    def _offered(self) -> tuple[str, ...]:
        """Return the names of the configured models, except for those whose provider the client has disabled."""
        names = names_offered(self._settings)
        return tuple(name for name in names if not self._gateways.is_disabled(target_of(name, self._settings)))

    def _target(self, name: str) -> Target:
        """Return the endpoint of a model. :raises ConfigError: the client has disabled the model's provider."""
        return self._gateways.route(target_of(name, self._settings))

    def _templates(self) -> tuple[Template, ...]:
        """Return the user's own slash commands."""
        taken = [spec.name for spec in COMMANDS]
        return read_templates(self._loaded.paths.config_file.parent / "commands", taken=taken)

    def _open_workspace(self, cwd: str, directories: Sequence[str]) -> Workspace:
        return adapters.open_workspace(
            lambda: self._loaded, cwd, directories, is_bounded=self.is_bounded(), on_secret=self._note_secret
        )

    async def sandbox_status(self) -> SandboxStatus:
        """Return whether this machine has a working sandbox, and what the sandbox can do."""
        return await adapters.open_workspace(lambda: self._loaded, tempfile.gettempdir(), ()).sandbox_status()

    async def _open_store(self) -> Store:
        mirror = adapters.open_mirror(self._loaded, lambda: committed(self._secrets))
        store = await adapters.open_store(self._loaded, on_stored=None if mirror is None else mirror.note)
        self._store = adapters.traced(store, self._loaded)
        if mirror is not None:
            mirror.start()
            self._mirror = mirror
        return self._store

    def _settings_of_sessions(self) -> SessionSettings:
        if self._session_settings is None:
            permissions, compaction = self._settings.permissions, self._settings.compaction
            self._session_settings = SessionSettings(
                steps_per_turn=self._settings.limits.steps_per_turn,
                server_wait_s=self._settings.limits.mcp_wait_s,
                steps_set_by=self._loaded.sources.get(_STEPS, "").partition("flag ")[2] or _STEPS,
                cost_per_turn=self._settings.limits.cost_per_turn,
                cost_per_session=self._settings.limits.cost_per_session,
                title_model=self._settings.titles.model or "",
                checks=tuple(map(without_files, (*self._settings.receipts.checks, *self._settings.checks.values()))),
                shows_receipts=self._settings.receipts.show,
                rules=user_rules(permissions.allow, permissions.deny),
                compaction=CompactionPolicy(
                    auto=compaction.auto,
                    threshold=compaction.threshold,
                    window=compaction.window,
                    keep_tokens=compaction.keep_tokens,
                    target=compaction.target,
                    early=compaction.early or None,
                    instruction=self._loaded.summary_prompt,
                    compact_model=compaction.compact_model or "",
                ),
            )
        return self._session_settings

    def _check(self, name: str) -> None:
        """Check that the settings have everything that a prompt needs.

        :raises AuthError: crow has no key, or no endpoint.
        :raises ConfigError: the settings are not valid.
        """
        if self._loaded.problem is not None:
            raise self._loaded.problem
        if not name and not self._has_endpoint():
            raise AuthError(self._loaded.advice_on_models())
        if name != OFFLINE:
            adapters.endpoint_of(self._target(name)).check()

    def _has_endpoint(self) -> bool:
        """Return whether crow has an endpoint to use. It has one if the user or the client chose an endpoint, or if
        there is a key for the default endpoint."""
        if not self._target("").needs_key:
            return True
        return self._settings.model.api_key is not None or self._loaded.sources["model.base_url"] != "default"

    def _info(self, name: str) -> ModelInfo:
        """Return the known facts about a model, without importing the packages that the model needs."""
        if name in self._models:
            return self._models[name].info
        if name == OFFLINE:
            return adapters.offline_model(self._settings).info
        target = target_of(name, self._settings)
        info = adapters.endpoint_of(target if self._gateways.is_disabled(target) else self._target(name)).info
        return replace(info, thought_levels=self._levels.get(name or self._default_model()))

    async def _model(self, name: str) -> Model:
        while self._retired_models:
            await self._retired_models.pop().retire()
        while name not in self._models:
            self._check(name)
            if name == OFFLINE:
                self._models[name] = adapters.offline_model(self._settings)
                break
            generation = self._generation
            model = await adapters.open_model(self._target(name), self._store, self._note_key)
            if generation == self._generation and name not in self._models:
                self._models[name] = model
            else:  # meanwhile, the settings have changed, or another session has opened the model
                self._retired_models.append(model)
        return self._models[name]

    async def _more_models(self) -> tuple[str, ...]:
        """Return the names of the configured models and of the models that the endpoint of the default model lists. If
        that endpoint does not list its models in time, return no names."""
        name, generation = self._default_model(), self._generation
        if name == OFFLINE or not (name or self._has_endpoint()):
            return ()
        try:
            with anyio.fail_after(_MODEL_LIST_TIMEOUT_S):
                model = await adapters.open_model(self._target(name), self._store, self._note_key)
                try:
                    listed = await model.models()
                finally:
                    await model.close()
        except (CrowError, TimeoutError) as error:
            logger.info("The endpoint does not list its models: %s", error)
            return ()
        if generation != self._generation:  # the settings have changed: this may be another endpoint
            return ()
        names = {self._name_at(name, each.name): each for each in listed[:_MODELS_LISTED]}
        self._names += [each for each in names if each and each not in self._names]
        self._levels = {each: offered.thought_levels for each, offered in names.items() if each}
        return tuple(self._names)

    def _name_at(self, default: str, model: str) -> str:
        """Return the name with which users select `model` at the endpoint of the model `default`. Return an empty
        string if there is no such name."""
        base_url = target_of(default, self._settings).base_url
        for name in (model, f"{default.partition('/')[0]}/{model}"):
            target = target_of(name, self._settings)
            if (target.base_url, target.model) == (base_url, model):
                return name
        return ""


_STEPS = "limits.steps_per_turn"


class BackgroundImport:
    """Runs the function `load` once in a thread. While `load` imports packages, the process can serve the protocol. If
    there was not enough memory, the next call of `run` tries again."""

    def __init__(self, load: Callable[[], None]) -> None:
        self._load = load
        self._done: Future[None] | None = None

    async def run(self) -> None:
        """Start the import if it has not begun, and wait until it is done.

        :raises ImportError: a package is broken. :raises CrowError: there is not enough memory.
        """
        done = self._done
        if done is None:
            done = self._done = Future()
            done.set_running_or_notify_cancel()  # a cancelled waiter must not cancel the import
            try:
                # A daemon thread, so that a failed start does not wait for half a second of imports.
                threading.Thread(target=self._run, args=(done,), daemon=True).start()
            except RuntimeError:  # the system gives no more threads
                self._done = None
                raise
        # Every prompt calls this method. After the import, `wrap_future` would only cost two rounds of the event loop.
        if done.done():
            done.result()
        else:
            await asyncio.wrap_future(done)

    async def settle(self) -> None:
        """If the import has begun, wait until it is done."""
        if self._done is not None:
            with suppress(Exception):
                await self.run()

    def _run(self, done: Future[None]) -> None:
        try:
            with importing():
                self._load()
            free_large_blocks_at_once()
        except Exception as error:  # noqa: BLE001  whatever it is, the waiting prompts must get it
            if lacks_memory(error):
                self._done = None
                error = CrowError("There is not enough memory to load crow's packages. Free some, or raise ulimit -v.")
            done.set_exception(error)
        else:
            done.set_result(None)


def find_hooks() -> dict[HookEvent, list[NamedHook]]:
    """Return the hooks that installed packages have registered as entry points in groups such as `crow.before_tool`."""
    points = importlib.metadata.entry_points()
    found = {event: points.select(group=f"crow.{event}") for event in EVENTS}
    return {
        event: [(f"{point.name} ({point.value})", point.load) for point in chosen] for event, chosen in found.items()
    }


@contextmanager
def recording(loaded: Loaded) -> Iterator[Recorder | None]:
    """Yield a recorder for the connection, or None if CROW_TRACE names no file."""
    if loaded.paths.trace is None:
        yield None
        return
    recorder = Recorder(loaded.paths.trace, loaded.settings.secrets())
    try:
        yield recorder
    finally:
        recorder.close()
