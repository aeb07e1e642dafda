"""Opens the models, tools, workspaces and databases that the settings describe.

No other module chooses adapters. The packages openai and mcp take 700 ms to import, but `initialize` and `session/new`
do not need them. So the functions that open models and tools import these packages when they are called.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeAlias
from urllib.parse import urlsplit

import anyio.to_thread
from pydantic import SecretStr

from crow.agent.hooks import Hook
from crow.domain.errors import ArgumentError, ConfigError
from crow.domain.protected_names import ProtectedNames
from crow.export.links import PageLinks
from crow.export.redact import Redactor, redactor
from crow.llm import EndpointMemory, Model
from crow.llm.dialect import Dialect
from crow.llm.endpoint import Endpoint, EndpointTimeouts
from crow.llm.listing import Offered
from crow.llm.offline import OfflineModel
from crow.log import mask_in_log
from crow.programs import Programs
from crow.runtime import forbid_inspection, wipe_environment
from crow.settings import OFFLINE, Loaded, Settings, Target, names_offered, target_of
from crow.settings.credentials import CredentialSettings, read_credential
from crow.settings.endpoints import messages_url_at, preset_at, run_key_command
from crow.settings.load import Paths
from crow.settings.servers import expand_variables
from crow.settings.values import DatabaseSettings, McpServerSettings, static_part
from crow.store import Store
from crow.store.sqlite.store import SqliteStore
from crow.tools import Ports, Workspace
from crow.tools.mcp.logins import Account, Login, LoginFolder
from crow.tools.process import HiddenKeys
from crow.tools.process import orphans_ended as orphans_ended  # exported again for the server and the checks
from crow.tools.sandbox import Confiner
from crow.tools.servers import (
    THE_WORKSPACE,
    HttpServer,
    LoginAsker,
    McpServer,
    OAuthOptions,
    ServerOptions,
    ServerReport,
    StdioServer,
)
from crow.tools.workspace import DiskWorkspace

if TYPE_CHECKING:  # imported later, because `initialize` is answered without them
    from crow.mirror import Mirror
    from crow.store.admin import Admin
    from crow.store.postgres.store import PostgresStore
    from crow.telemetry.live import Collector
    from crow.tools.mcp.client import McpToolbox, ToolSettings
    from crow.tools.network.credentials import Credential


class ReplaceableModel(Model, Protocol):
    """A model that is replaced when the settings change."""

    async def retire(self) -> None:
        """Close the connections as soon as no request uses them. A running turn may go on with the model."""
        ...


class EndpointModel(ReplaceableModel, Protocol):
    """A model at an endpoint that can list all its models."""

    async def models(self) -> Sequence[Offered]:
        """Return all models that the endpoint lists. :raises ModelError: the list cannot be read."""
        ...


_LoadedSource: TypeAlias = Callable[[], Loaded]
"""A function that returns the current settings. The user may change the settings while a session is open."""


def prepare_prompts(programs: Path, settings: Settings) -> None:
    """Import the packages that the first request to the default model needs. This function blocks.

    If commands are to be confined, a second thread looks for a working sandbox at the same time. `programs` is the
    ledger of places from which crow takes no programs.
    """
    confines = settings.sandbox.enabled != "off"
    if confines:
        from crow.tools.sandbox.confiner import choose_sandbox

        threading.Thread(target=choose_sandbox, args=(Programs(programs),), daemon=True).start()
    import crow.agent.sessions.runner
    import crow.llm.client
    import crow.tools.mcp.client  # noqa: F401
    from crow.llm.wires import wire_named

    default = next(iter(names_offered(settings)), OFFLINE)
    if default != OFFLINE:
        wire_named(target_of(default, settings).wires[0])


def prepare_calls() -> None:
    """Import the packages that the first tool call needs. This function blocks."""
    from crow.tools.mcp.client import import_sdk

    import_sdk()


async def open_model(
    target: Target, memory: EndpointMemory | None, on_key: Callable[[str], None] = lambda _: None
) -> EndpointModel:
    """Open a model at an endpoint. `memory` holds facts about the endpoint that crow learned earlier.

    If the settings name a command that prints the key, crow runs the command and calls `on_key` with the key.

    :raises ConfigError: the command that prints the key fails.
    """
    from crow.llm.client import EndpointClient

    command = target.endpoint.api_key_command if target.endpoint.api_key is None else None
    key = await anyio.to_thread.run_sync(run_key_command, command) if command else None
    if key is not None:
        on_key(key)
    endpoint = endpoint_of(target, key=key)
    learned = {} if memory is None else await memory.learned(endpoint.base_url, endpoint.model)
    return EndpointClient(endpoint, memory=memory, learned=learned)


def offline_model(settings: Settings) -> OfflineModel:
    """Return the built-in offline model."""
    return OfflineModel(context_window=settings.model.with_name(OFFLINE).context_window)


def endpoint_of(target: Target, *, key: str | None = None) -> Endpoint:
    """Return the endpoint that `target` describes. `key` is the key that the endpoint's `api_key_command` printed.
    Until that command has run, the returned endpoint has the placeholder key "pending"."""
    settings, options, preset = target.endpoint, target.options, preset_at(target.base_url)
    if key is None and settings.api_key is not None:
        key = settings.api_key.get_secret_value()
    if key is None and settings.api_key_command:
        key = "pending"
    return Endpoint(
        base_url=target.base_url,
        messages_url=messages_url_at(target.base_url),
        model=target.model,
        api_key=key,
        key_hint=target.key_hint,
        needs_key=target.needs_key,
        headers=tuple(settings.headers.items()),
        context_window=options.context_window,
        max_output_tokens=options.max_output_tokens,
        input_price=options.input_price,
        cached_price=options.cached_price,
        cache_write_price=options.cache_write_price,
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
            takes_files=target.takes_files,
            marks_failures=True,
            wires=target.wires,
        ),
        proxy=settings.proxy,
        ca_file=settings.ca_file,
    )


def open_toolbox(
    loaded: _LoadedSource,
    workspace: Workspace,
    ports: Ports,
    servers: Sequence[McpServer],
    *,
    on_change: Callable[[], Awaitable[None]] | None = None,
) -> AbstractAsyncContextManager[McpToolbox]:
    """Return a context manager that opens the built-in tools and the tools of `servers`. The session's own task must
    both enter and exit the context manager."""
    from crow.tools.mcp.client import open_toolbox

    return open_toolbox(workspace, ports, servers, _tool_settings(loaded), on_change=on_change)


def open_scratch_toolbox(cwd: Path, ports: Ports) -> AbstractAsyncContextManager[McpToolbox]:
    """Return a context manager that opens the built-in tools for a scratch directory, which they cannot leave."""
    from crow.tools.mcp.client import open_toolbox

    return open_toolbox(scratch_workspace(cwd), ports, ())


def scratch_workspace(cwd: Path) -> Workspace:
    """Return a scratch directory as a workspace, which tools cannot leave."""
    return DiskWorkspace(cwd, is_bounded=True)


def _tool_settings(loaded: _LoadedSource, asker: LoginAsker | None = None) -> ToolSettings:
    """Return the part of the settings that concerns tools."""
    from crow.tools.mcp.client import ToolSettings

    limits = loaded().settings.limits
    runtime = filter(os.path.isabs, [os.environ.get("XDG_RUNTIME_DIR", "")])
    return ToolSettings(
        start_timeout_s=limits.mcp_start_timeout_s,
        call_timeout_s=limits.mcp_call_timeout_s,
        offered=limits.offered_tools,
        offered_tokens=limits.offered_tool_tokens,
        always_offered=limits.always_offered,
        skill_folders=(loaded().paths.config_file.parent / "skills",),
        agent_folders=(loaded().paths.config_file.parent / "agents",),
        server_places=(loaded().paths.cache_dir / "servers", *map(Path, runtime)),
        fetches_private=loaded().settings.permissions.fetch_private,
        checks=loaded().settings.checks,
        keys=lambda: hidden_keys(loaded()),
        login_folder=_login_folder(loaded().paths),
        on_secrets=mask_in_log,
        asker=asker,
    )


def open_workspace(
    loaded: _LoadedSource,
    cwd: str,
    directories: Sequence[str],
    *,
    is_bounded: bool = False,
    on_secret: Callable[[str], object] = lambda _secret: None,
) -> Workspace:
    """Open the workspace on disk. Tools cannot write crow's own files, and commands cannot read the keys. `on_secret`
    gets each secret that crow reads later.

    If `is_bounded` is true, tools cannot leave the workspace. Commands then see no directories below `serve.roots`
    except those of the workspace.
    """
    paths = loaded().paths
    config = paths.config_file.parent
    programs = Programs(paths.programs)
    programs.distrust((cwd, *directories))  # tools can write there, even if nothing confines commands
    return DiskWorkspace(
        cwd,
        directories,
        keys=lambda: hidden_keys(loaded()),
        own=(paths.config_file, *_database_files(paths), paths.log_file, paths.layers, *_server_files(loaded())),
        own_folders=_own_folders(loaded(), cwd),
        own_readable=(config / "skills", config / "agents", config / "commands"),
        names=protected_names(loaded()),
        confiner=_open_confiner(loaded(), cwd, directories, is_bounded=is_bounded, on_secret=on_secret),
        is_bounded=is_bounded,
        programs=programs,
        keeps_ignored=loaded().settings.permissions.keep_ignored,
    )


def protected_names(loaded: Loaded) -> ProtectedNames:
    """Return the names of protected files: those that crow knows, with the user's changes."""
    permissions = loaded.settings.permissions
    return _protected_names(tuple(permissions.protect), tuple(permissions.unprotect))


@lru_cache(maxsize=4)
def _protected_names(added: tuple[str, ...], removed: tuple[str, ...]) -> ProtectedNames:
    """Return one set of names for all sessions with the same settings, because a set takes 20 kB."""
    return ProtectedNames(added, removed)


def _database_files(paths: Paths) -> tuple[Path, ...]:
    """Return the files of the database. They may be in a directory that also holds other files of the user."""
    return tuple(paths.database.with_name(f"{paths.database.name}{end}") for end in ("", "-wal", "-shm"))


def open_links(loaded: _LoadedSource) -> PageLinks:
    """Return the links to pages on this machine."""

    def url() -> str:
        settings = loaded().settings
        listen, scheme = settings.serve.listen, "https" if settings.serve.tls_cert else "http"
        return settings.share.url or ("" if "/" in listen else f"{scheme}://{listen}")

    return PageLinks(
        loaded().paths.links, url=url, redactor=lambda is_strict: export_redactor(loaded(), is_strict=is_strict)
    )


def export_redactor(loaded: Loaded, *, is_strict: bool) -> Redactor:
    """Return a function that masks secrets in exported text: the keys and tokens that crow knows and, if `is_strict` is
    true, also personal data and anything that looks like a secret."""
    known = (*loaded.settings.secrets(), *loaded.keys.values, *loaded.keys.others)
    return redactor(known, home=os.path.expanduser("~"), is_strict=is_strict)


def _server_files(loaded: Loaded) -> tuple[Path, ...]:
    """Return the files of `crow serve` that tools and commands may neither read nor write, such as its TLS key."""
    settings = loaded.settings.serve
    names = (settings.tls_key, settings.tls_cert, settings.log_file)
    return tuple(loaded.paths.config_file.parent / name for name in names if name is not None)


def _open_confiner(
    loaded: Loaded,
    cwd: str,
    directories: Sequence[str],
    *,
    is_bounded: bool,
    on_secret: Callable[[str], object],
) -> Confiner | None:
    """Return the object that confines the commands of a workspace, or None if `sandbox.enabled` is off."""
    sandbox, paths = loaded.settings.sandbox, loaded.paths
    if sandbox.enabled == "off":
        return None

    # These imports take 10 ms, and `initialize` is answered without them.
    from crow.tools.network.credentials import Credentials
    from crow.tools.sandbox.confiner import KernelConfiner
    from crow.tools.sandbox.policy import SandboxOptions

    roots = [os.path.realpath(root) for root in (cwd, *directories)]
    files = (
        paths.config_file,
        paths.log_file,
        *_database_files(paths),
        *(() if paths.trace is None else (paths.trace,)),
    )
    options = SandboxOptions(
        enabled=sandbox.enabled,
        network=sandbox.network,
        readable=sandbox.readable,
        writable=sandbox.writable,
        sockets=sandbox.sockets,
        programs=Programs(paths.programs),
        own=(*files, paths.layers, *_server_files(loaded), *_own_folders(loaded, cwd)),
        masked=tuple(map(static_part, loaded.settings.serve.roots)) if is_bounded else (),
        caches=paths.cache_dir / "commands",
        layers=paths.layers,
        names=protected_names(loaded),
        credentials=Credentials(_configured_credentials(loaded, roots), on_secret),
    )
    return KernelConfiner([Path(cwd), *map(Path, directories)], options)


def _configured_credentials(loaded: Loaded, roots: Sequence[str] = ()) -> tuple[Credential, ...]:
    """Return the credentials in the user's settings file. No program below `roots` is started to read them."""
    from crow.tools.network.credentials import Credential
    from crow.tools.network.hosts import parse_host

    folder = loaded.paths.config_file.parent

    def is_inside(path: Path) -> bool:
        return any(map(path.is_relative_to, roots))

    def read(host: str, settings: CredentialSettings) -> tuple[str, str]:
        return read_credential(host, settings, Programs(loaded.paths.programs).find("git"), is_inside)

    return tuple(
        Credential(
            host=parse_host(host, 443),
            read=partial(read, host, settings),
            header=settings.header,
            access=settings.access,
            ca_file=None if settings.ca_file is None else folder / os.path.expanduser(settings.ca_file),
        )
        for host, settings in loaded.settings.credentials.items()
    )


def try_credentials(loaded: Loaded) -> list[tuple[str, str, str]]:
    """Read each credential. For each, return the host, a description of its source and use, and the problem with it.
    The problem is empty if there is none."""
    found = []
    settings = loaded.settings.credentials.values()
    for each, credential in zip(settings, _configured_credentials(loaded), strict=True):
        words, problem = f'from {each.source}, in the header {each.header}; access is "{each.access}"', ""
        try:
            credential.read()
        except ConfigError as error:
            problem = str(error)
        found.append((str(credential.host), words, problem))
    return found


def own_folders(paths: Paths, cwd: str) -> tuple[Path, ...]:
    """Return the directories in which every file belongs to crow.

    A directory that contains the workspace is left out. The directory of the settings file is included only if it is
    named `crow` or is crow's data directory. Any other directory may also hold other files of the user.
    """
    config, workspace = paths.config_file.parent, Path(os.path.realpath(cwd))
    is_own = config.name == "crow" or config == paths.data_dir
    folders = (*((config,) if is_own else ()), paths.data_dir, paths.cache_dir, paths.log_file.parent)
    return tuple(folder for folder in folders if not workspace.is_relative_to(os.path.realpath(folder)))


def _own_folders(loaded: Loaded, cwd: str) -> tuple[Path, ...]:
    """Return the directories of `own_folders`, and the mirror's directory unless it contains the workspace."""
    mirror = _mirror_folder(loaded)
    found = own_folders(loaded.paths, cwd)
    holds_workspace = mirror is None or Path(os.path.realpath(cwd)).is_relative_to(os.path.realpath(mirror))
    return found if mirror is None or holds_workspace else (*found, mirror)


async def try_server(
    loaded: Loaded, server: McpServer, *, asker: LoginAsker | None = None, workspace: Workspace
) -> ServerReport:
    """Start one MCP server, ask it for all its tools, prompts and resources, and stop it. If the server needs a login,
    `asker` asks the user to log in."""
    from crow.tools.mcp.trial import try_server

    return await try_server(server, workspace, _tool_settings(lambda: loaded, asker))


def read_login(loaded: Loaded, server: HttpServer) -> Login | None:
    """Return the stored login to a server, or None if no login is stored. This function blocks.

    :raises CrowError: the stored login cannot be read, or the server's URL is not valid.
    """
    return LoginFolder(_login_folder(loaded.paths), mask_in_log).read(_account_of(server))


def remove_login(loaded: Loaded, server: HttpServer) -> None:
    """Remove the stored login to a server. This function blocks. :raises OSError: the file cannot be removed."""
    LoginFolder(_login_folder(loaded.paths)).remove(_account_of(server))


def _account_of(server: HttpServer) -> Account:
    from crow.tools.mcp.auth import account_of

    return account_of(server)


async def revoke_login(login: Login) -> bool:
    """Revoke the tokens of a login. See :func:`crow.tools.mcp.auth.revoke`."""
    from crow.tools.mcp.auth import revoke

    return await revoke(login)


def _login_folder(paths: Paths) -> Path:
    """Return the directory that holds the logins to MCP servers."""
    return paths.data_dir / "mcp-logins"


def hidden_keys(loaded: Loaded) -> HiddenKeys:
    """Return the keys to hide from child processes, and the secrets to hide in the results of tools."""
    keys = loaded.keys
    passed = loaded.settings.sandbox.pass_env
    kept = frozenset(each.token_env for each in loaded.settings.credentials.values() if each.token_env is not None)
    return HiddenKeys(variables=keys.variables, values=keys.values, others=keys.others, passed=passed, kept=kept)


def protect_process(loaded: Loaded) -> None:
    """Hide the keys from other processes of this user. Call this before any child process is started."""
    forbid_inspection()
    wipe_environment(hidden_keys(loaded).hides)


def configured_servers(loaded: Loaded) -> tuple[McpServer, ...]:
    """Return the enabled MCP servers in the user's settings file."""
    folder, servers = loaded.paths.config_file.parent, loaded.settings.mcp_servers
    return tuple(mcp_server(name, server, folder) for name, server in servers.items() if server.enabled)


def configured_hooks(loaded: Loaded) -> tuple[Hook, ...]:
    """Return the enabled hooks in the user's settings file, in the order of the file. The path of a hook's program may
    be relative to the directory of the file."""
    folder = loaded.paths.config_file.parent
    return tuple(
        Hook(
            name=settings.name or os.path.basename(command[0]),
            event=settings.event,
            command=(os.path.join(folder, command[0]) if os.path.dirname(command[0]) else command[0], *command[1:]),
            tools=settings.tools,
            does=settings.does,
            paths=settings.paths,
            workspaces=settings.workspaces,
            timeout_s=settings.timeout_s,
        )
        for settings in loaded.settings.hooks
        if settings.enabled and settings.event is not None and settings.command is not None
        for command in [tuple(map(os.path.expanduser, settings.command))]
    )


def mcp_server(name: str, settings: McpServerSettings, folder: Path) -> McpServer:
    """Return one MCP server from the user's settings file, with its environment variables filled in. The path of the
    server's command may be relative to `folder`."""
    settings, problem = expand_variables(settings, os.environ, workspace=THE_WORKSPACE)
    if settings.url is not None and settings.sandbox is not None:
        problem = "sandbox works only for servers with a command, but this server has a url; remove sandbox"
    if settings.oauth_client_secret is not None and (settings.oauth_client_id is None or settings.oauth_issuer is None):
        problem = (
            "oauth_client_secret needs oauth_client_id and oauth_issuer, because crow sends the secret only to that "
            "authorization server"
        )
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
        oauth = OAuthOptions(
            login=name,
            account=settings.oauth_account or "",
            client_id=settings.oauth_client_id or "",
            client_secret=settings.oauth_client_secret or "",
            client_metadata_url=settings.oauth_client_metadata_url or "",
            issuer=settings.oauth_issuer or "",
            redirect_port=settings.oauth_redirect_port or 0,
        )
        return HttpServer(
            name=name, url=settings.url, headers=headers, transport=settings.transport, options=options, oauth=oauth
        )
    command = settings.command or ""
    if os.path.dirname(command):
        command = os.path.join(folder, os.path.expanduser(command))
    env = tuple(settings.env.items())
    return StdioServer(
        name=name, command=command, args=settings.args, env=env, sandbox=settings.sandbox, options=options
    )


def is_empty(loaded: Loaded) -> bool:
    """Return whether the user has no database yet."""
    return loaded.settings.database.url is None and not loaded.paths.database.exists()


async def open_store(loaded: Loaded, *, on_stored: Callable[[str], object] | None = None) -> Store:
    """Open the user's database. The caller closes the returned store. `on_stored` is called with the id of a session
    after the store has stored entries of it or has deleted it, and must return at once.

    :raises StoreError: the database cannot be used.
    :raises ArgumentError: the URL of the database is not valid, or crow was installed without the driver for
        PostgreSQL.
    """
    database = loaded.settings.database
    store: SqliteStore | PostgresStore
    if database.url is None:
        days = loaded.settings.store.compress_after_days
        store = await SqliteStore.open(loaded.paths.database, compress_after_days=days)
    else:
        store = await _open_postgres(database)
    if on_stored is not None:
        store.on_stored = on_stored
    return store


def open_mirror(loaded: Loaded, redact: Callable[[], Redactor]) -> Mirror | None:
    """Return the mirror if the settings ask for one, else None. The caller starts and closes the mirror. `redact`
    returns a function that masks secrets."""
    path = _mirror_folder(loaded)
    if path is None:
        return None
    from crow.mirror import Mirror, MirrorSource

    async def open_to_read() -> tuple[Store, Admin]:
        store = await open_store_to_read(loaded)
        return store, open_admin(store)

    url = loaded.settings.database.url
    parts = None if url is None else urlsplit(url.get_secret_value())
    place = str(loaded.paths.database) if parts is None else f"{parts.hostname}:{parts.port or 5432}{parts.path}"
    return Mirror(path, MirrorSource(open=open_to_read, database=place, redact=redact))


def _mirror_folder(loaded: Loaded) -> Path | None:
    """Return the directory of the setting `store.mirror`, or None if it is unset."""
    name = loaded.settings.store.mirror
    return None if name is None else loaded.paths.config_file.parent / os.path.expanduser(name)


def traced(store: Store, loaded: Loaded) -> Store:
    """Return the store, wrapped if the settings ask for traces."""
    if not loaded.settings.telemetry.enabled:
        return store
    from crow.telemetry.live import Sender, traced  # only users who ask for traces wait for this import

    def connect() -> Collector:
        from crow.telemetry.collector import OtlpCollector  # takes half a second, and is in an extra

        return OtlpCollector(loaded.settings.telemetry.endpoint or "")

    return traced(store, Sender(connect, trace_redactor(loaded)))


def trace_redactor(loaded: Loaded) -> Redactor | None:
    """Return a function that masks the content of traces, or None if traces have no content."""
    return export_redactor(loaded, is_strict=True) if loaded.settings.telemetry.content else None


async def open_store_to_read(loaded: Loaded) -> Store:
    """Open the user's database for reading. The database is neither created nor migrated. The caller closes the
    returned store. For errors, see `open_store`."""
    database = loaded.settings.database
    if database.url is None:
        return await SqliteStore.open_to_read(loaded.paths.database)
    return await _open_postgres(database, to_read=True)


async def open_store_at(loaded: Loaded, place: str | None, *, to_read: bool = False) -> Store:
    """Open the database at `place`, which is the URL of a PostgreSQL database or the path of a SQLite file. If `place`
    is None, open the user's own database. If `to_read` is true, the database is neither created nor migrated. The
    caller closes the returned store. For errors, see `open_store`."""
    if place is None:
        return await (open_store_to_read(loaded) if to_read else open_store(loaded))
    if "://" in place:
        database = DatabaseSettings.model_construct(url=SecretStr(place), direct_url=None)
        return await _open_postgres(database, to_read=to_read)
    path = await anyio.to_thread.run_sync(lambda: Path(place).expanduser().absolute())
    return await (SqliteStore.open_to_read(path) if to_read else SqliteStore.open(path))


async def _open_postgres(database: DatabaseSettings, *, to_read: bool = False) -> PostgresStore:
    try:
        from crow.store.postgres.store import PostgresStore
    except ModuleNotFoundError as error:
        if error.name != "asyncpg":
            raise
        raise ArgumentError(
            "Sessions are in PostgreSQL, but crow was installed without the driver for PostgreSQL. In a clone of "
            "crow, run: pipx install --force '.[postgres]'"
        ) from None
    assert database.url is not None, "the caller has checked it"
    direct = None if database.direct_url is None else database.direct_url.get_secret_value()
    return await PostgresStore.open(database.url.get_secret_value(), lock_url=direct, to_read=to_read)


def open_admin(store: Store) -> Admin:
    """Return the object that lists, exports, imports and deletes the sessions of an open store."""
    if isinstance(store, SqliteStore):
        from crow.store.sqlite.admin import SessionAdmin

        return SessionAdmin(store)
    from crow.store.postgres.admin import PostgresAdmin
    from crow.store.postgres.store import PostgresStore

    assert isinstance(store, PostgresStore), "no other store is opened here"
    return PostgresAdmin(store)
