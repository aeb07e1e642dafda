"""The sessions that are open in this process, and the store that they come from.

Strategy: one dict; a session is opened, closed and deleted under a lock of its own, so that requests about one id that
come at once follow each other. Each session runs as a task of the server's group, whoever opened it. What a client is
told first about a session (commands, usage, title) leaves right behind the response that made it known. Knows the
protocol's updates; not its methods.
"""

from __future__ import annotations

import asyncio
import datetime
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import anyio
import anyio.abc
import anyio.to_thread
from acp.connection import Connection

from crow.agent import new_session_id
from crow.agent.commands import COMMANDS
from crow.agent.session import Session
from crow.domain.errors import ArgumentError, CrowError, NoSuchSession, StoreError, StoreUnavailable
from crow.domain.events import NoticeShown, OptionsChanged
from crow.domain.messages import JsonObject
from crow.frontend.client import SessionClient
from crow.frontend.options import config_options, mode_state
from crow.frontend.params import ClientCapabilities, mcp_servers_from
from crow.frontend.server import ServerDependencies
from crow.frontend.updates import usage
from crow.frontend.workspace import EditorWorkspace
from crow.store import NewSession, SessionChanges, SessionRow, Store, Tail

if TYPE_CHECKING:
    from crow.agent import Adapters
    from crow.agent.templates import Template
    from crow.frontend.server import ClientConnection
    from crow.tools import McpServer, ServerPrompt

__all__ = [
    "NULLABLE",
    "IdleTimer",
    "OpenRequest",
    "OpenSession",
    "OpenSessions",
    "alias_named",
    "entry_named",
    "opening_from",
    "session_info",
    "wants_archived",
    "with_users_own",
]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenSession:
    """A session that is open in this process, and the editor as it sees it."""

    session: Session
    client: SessionClient


class OpenSessions:
    """`caps` are the client's, `models` the names offered; both may change while sessions are open, as may the user's
    settings: sessions that are opened later have those of then."""

    def __init__(self, kit: ServerDependencies) -> None:
        self.caps = ClientCapabilities()
        self.models: tuple[str, ...] = tuple(kit.models)
        self._kit = kit
        self._open: dict[str, OpenSession] = {}
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._store: Store | None = None
        self._adapters: Adapters | None = None
        self._opening_store = asyncio.Lock()
        self._is_warm = False

    def attach(self, connection: Connection, wire: ClientConnection, tasks: anyio.abc.TaskGroup) -> None:
        """See :class:`crow.frontend.server.Handler`."""
        self._connection, self._wire, self._tasks = connection, wire, tasks

    async def store(self) -> Store:
        """The store, opened by the first who asks. :raises StoreError: it cannot be used."""
        async with self._opening_store:
            if self._store is None:
                self._store = await self._kit.open_store()
                self._adapters = self._kit.adapters(self._store)
            return self._store

    def find(self, session_id: object) -> OpenSession | None:
        """The open session of this id."""
        return self._open.get(session_id) if isinstance(session_id, str) else None

    def named(self, session_id: str) -> Session:
        """The open session of this id. :raises NoSuchSession: there is none here, or it is being closed."""
        opened = self._open.get(session_id)
        if opened is None or opened.session.closing:
            raise NoSuchSession(session_id)
        return opened.session

    @asynccontextmanager
    async def settled(self, session_id: str) -> AsyncIterator[Session]:
        """The open session of this id, neither opened nor closed by another request in the block: what is changed in
        it is told before its end is. :raises NoSuchSession: as `named`."""
        async with self._lock(session_id):
            yield self.named(session_id)

    async def create(self, opening: OpenRequest, *, alias: str | None = None) -> OpenSession:
        """A session that is new. :raises ArgumentError: the alias is taken."""
        store = await self.store()
        row = await store.create_session(
            NewSession(
                id=new_session_id(),
                cwd=opening.cwd,
                model=opening.model or self._kit.model,
                mode=self._kit.mode,
                additional_directories=opening.directories,
                alias=alias,
                config=opening.config,
            )
        )
        return self._start(Tail(row=row, entries=()), opening)

    async def aliased(self, alias: str, opening: OpenRequest) -> OpenSession:
        """The session that has the alias, made if there is none."""
        store = await self.store()
        row = await store.named(alias)
        if row is None:
            try:
                return await self.create(opening, alias=alias)
            except ArgumentError:
                row = await store.named(alias)  # another process may have made it just now
                if row is None:
                    raise
        async with self.reopened(row.id, opening) as opened:
            return opened

    async def fork(self, session_id: str, opening: OpenRequest, *, entry: int | None) -> OpenSession:
        """A new session that goes on from another's entry (None: from where that stands)."""
        store = await self.store()
        async with self._lock(session_id):
            row = await store.fork_session(
                session_id,
                new_session_id(),
                entry=entry,
                cwd=opening.cwd,
                additional_directories=opening.directories,
            )
        return self._start(await store.open_session(row.id), opening)

    @asynccontextmanager
    async def reopened(self, session_id: str, opening: OpenRequest) -> AsyncIterator[OpenSession]:
        """Open a stored session here; one that is open here already and idle is opened anew, a busy one stays, and so
        does one whose last answer only memory has. When the block fails, what was not open before is closed again."""
        store = await self.store()
        async with self._lock(session_id):
            live = self._open.get(session_id)
            stays = live is not None and not await live.session.settle()
            if live is None or not (stays or live.session.busy):
                tail = await store.open_session(session_id)
                tail = Tail(row=await self._opened_row(store, tail.row, opening), entries=tail.entries)
            if live is not None and (stays or live.session.busy):  # perhaps only now
                yield live
                self._note_where_it_runs(live, opening)
                return
            opened = self._start(tail, opening)  # at once, so that a prompt behind this request finds it
            if live is not None:
                with anyio.CancelScope(shield=True):
                    await self._end(live)
            try:
                yield opened
            except BaseException:
                if live is None:
                    self._tasks.start_soon(self._end, opened)
                else:  # the client knows it
                    opened.client.open()
                raise

    def _note_where_it_runs(self, live: OpenSession, opening: OpenRequest) -> None:
        """Say, behind the response, that a running session cannot be taken to another directory."""
        cwd = live.session.branch.row.cwd
        if opening.cwd != cwd and live.session.busy:
            title = (
                f"This session runs a turn in {cwd} and goes on there. To work in {opening.cwd}, load it again when the"
                " turn has ended."
            )
            notice = NoticeShown(severity="warning", title=title)

            def tell() -> None:
                self._tasks.start_soon(live.client.publish, notice)

            self._wire.after_response(tell)

    async def close(self, session_id: str) -> None:
        """Cancel what runs in a session and let go of it. :raises NoSuchSession: it is not open here."""
        async with self._lock(session_id):
            self.named(session_id)
            await self._end(self._open[session_id])

    async def delete(self, session_id: str) -> None:
        """Close a session if it is open, and hide it for good; unknown ones are fine."""
        store = await self.store()
        async with self._lock(session_id):
            if session_id in self._open:
                await self._end(self._open[session_id])
            await store.delete_session(session_id)

    async def _end(self, opened: OpenSession) -> None:
        """Close a session; from then on its client hears no more of it."""
        session = opened.session
        await session.close()
        opened.client.end()
        if self._open.get(session.id) is opened:
            del self._open[session.id]

    def hurry(self) -> None:
        """The process ends: let nothing wait long for a database that another program holds."""
        if self._store is not None:
            self._store.hurry()

    async def close_all(self) -> None:
        """Close every session, then the store."""
        async with anyio.create_task_group() as tasks:
            for opened in self._open.values():
                tasks.start_soon(opened.session.close)
        if self._store is not None:
            await self._store.close()

    async def tidy(self) -> None:
        """Give back the memory that turns took, and remove what deleted sessions left. :raises StoreError:"""
        await anyio.to_thread.run_sync(self._kit.trim)
        if self._store is not None:
            await self._store.tidy()

    def warm(self) -> None:
        """Let every open session start what its first prompt will need, and those to come as soon as they are known."""
        self._is_warm = True
        for opened in self._open.values():
            opened.session.warm()

    def renew(self) -> None:
        """Take what the user has set since, if they have."""
        kit = self._kit.renewed()
        if kit is not None:
            self._kit = kit
            self._offer(tuple(kit.models))
            if self._is_warm:
                self._tasks.start_soon(self.offer_more_models)

    async def offer_more_models(self) -> None:
        """Ask the endpoint what it offers, and tell every open session's client."""
        more = await self._kit.more_models()
        self._offer(tuple(dict.fromkeys([*self.models, *more])))

    def _offer(self, models: tuple[str, ...]) -> None:
        if models != self.models:
            self.models = models
            for opened in tuple(self._open.values()):
                self._tasks.start_soon(opened.client.publish, OptionsChanged())

    def introduce(self, opened: OpenSession) -> None:
        """After the response of the running request has left: the client knows the session, so let updates pass, and
        first what it needs to draw: commands, usage, title."""

        def begin() -> None:
            self._tasks.start_soon(self._introduce, opened)

        self._wire.after_response(begin)

    def state(self, session: Session) -> dict[str, Any]:
        """What every answer that opens a session tells."""
        return {"modes": mode_state(session.branch.row.mode), "configOptions": self.options(session)}

    def options(self, session: Session) -> list[dict[str, Any]]:
        """The complete list of config options."""
        row = session.branch.row
        return config_options(
            mode=row.mode,
            model=row.model or self._kit.model,
            models=self.models,
            config={"auto_compact": self._kit.auto_compact, **row.config},
            booleans=self.caps.boolean_options,
        )

    async def _introduce(self, opened: OpenSession) -> None:
        client, session = opened.client, opened.session
        commands = self._commands(session)
        await client.send({"sessionUpdate": "available_commands_update", "availableCommands": commands})
        try:
            await client.send(usage(await session.measured()))
        except CrowError as error:
            logger.warning("The context could not be measured: %s", error)
        row = session.branch.row
        if row.title is not None:
            info = session_info(row)
            await client.send(
                {"sessionUpdate": "session_info_update", "title": info["title"], "updatedAt": info["updatedAt"]}
            )
        client.open()
        if self._is_warm:
            session.warm()

    def _commands(self, session: Session) -> list[dict[str, Any]]:
        assert self._adapters is not None, "the store is open"
        return command_list(self._adapters.templates(), session.prompts)

    def _lock(self, session_id: str) -> asyncio.Lock:
        lock = self._locks.get(session_id)
        if lock is None:
            lock = self._locks[session_id] = asyncio.Lock()
        return lock

    async def _opened_row(self, store: Store, row: SessionRow, opening: OpenRequest) -> SessionRow:
        """The row with what `opening` asks for; only in memory where nothing can be stored."""
        model = opening.model or row.model or self._kit.model
        if (row.cwd, row.additional_directories, row.model) == (opening.cwd, opening.directories, model):
            return row
        changes = SessionChanges(cwd=opening.cwd, additional_directories=opening.directories, model=model)
        try:
            return await store.update_session(row.id, changes)
        except StoreUnavailable as error:
            logger.warning("Session %s is opened in %s for this time only: %s", row.id, opening.cwd, error)
            return replace(row, cwd=opening.cwd, additional_directories=opening.directories, model=model)

    def _start(self, tail: Tail, opening: OpenRequest) -> OpenSession:
        assert self._adapters is not None, "the store is open"
        row = tail.row
        client = SessionClient(
            row.id,
            self._connection,
            self._wire,
            self.caps,
            row.cwd,
            lambda: self.options(opened.session),
            lambda: self._commands(opened.session),
            self._kit.timeouts,
        )
        workspace = self._kit.workspace(row.cwd, row.additional_directories)
        in_terminals = self._kit.editor_terminals and self.caps.terminals
        if self.caps.reads_files or self.caps.writes_files or in_terminals:
            answer_s = self._kit.timeouts.editor_s
            workspace = EditorWorkspace(
                workspace,
                row.id,
                client.request,
                self.caps,
                answer_s=answer_s,
                in_terminals=in_terminals,
                hidden=self._kit.hidden_variables() if in_terminals else (),
            )
        servers = with_users_own(self._kit.servers, opening.servers)
        session = Session(self._adapters, client, workspace, servers, tail)
        opened = OpenSession(session=session, client=client)
        self._open[row.id] = opened
        self._tasks.start_soon(self._host, opened)
        return opened

    async def _host(self, opened: OpenSession) -> None:
        try:
            await opened.session.run()
        except Exception:
            logger.exception("Session %s ended with a failure", opened.session.id)
            if self._open.get(opened.session.id) is opened:
                del self._open[opened.session.id]


def command_list(templates: Sequence[Template], prompts: Sequence[ServerPrompt]) -> list[dict[str, Any]]:
    """The slash commands, the user's own and those of servers, as `available_commands_update` lists them."""
    listed = [(spec.name, spec.description, spec.hint) for spec in COMMANDS]
    listed += [(template.name, template.description, template.hint) for template in templates]
    if prompts:
        from crow.agent.templates import hint_of

        listed += [(prompt.name, f"{prompt.server}: {prompt.description}", hint_of(prompt)) for prompt in prompts]
    return [
        {"name": name, "description": description, **({"input": {"hint": hint}} if hint else {})}
        for name, description, hint in listed
    ]


# FROM frontend.opening: What a request that opens a session asks for: where it works, with which servers, and what
# `_meta` adds.
#
# Strategy: read from the raw parameters once, into one frozen value; what would make the session useless is an error
# that names the parameter, what `_meta` holds that crow does not know is left alone. Looks at directories, opens
# nothing.


NULLABLE = {"mcpServers": (), "additionalDirectories": ()}
"""Parameters for which null means their default; the SDK's models refuse it."""

MOST_DIRECTORIES = 100
MODEL_CHARS = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenRequest:
    """`model` None: as configured. `config` is what the session keeps of `_meta`."""

    cwd: str
    directories: tuple[str, ...]
    servers: tuple[McpServer, ...]
    model: str | None = None
    config: JsonObject = field(default_factory=dict)


def opening_from(params: Mapping[str, Any]) -> OpenRequest:
    """The opening that `params` of session/new, load or resume ask for.

    :raises ArgumentError: a directory, a server or a value of `_meta` that cannot be used.
    """
    given = params.get("additionalDirectories") or ()
    if not isinstance(given, list | tuple) or len(given) > MOST_DIRECTORIES:
        raise ArgumentError(f"additionalDirectories: expected a list of at most {MOST_DIRECTORIES} absolute paths.")
    meta = _object(params, "_meta")
    options = _object(_object(meta, "claudeCode"), "options")
    return OpenRequest(
        cwd=existing_directory("cwd", params["cwd"]),
        directories=tuple(existing_directory("additionalDirectories", path) for path in given),
        servers=mcp_servers_from(params.get("mcpServers")),
        model=_model("_meta.model", meta) or _model("_meta.claudeCode.options.model", options),
        config=_system_prompt(meta.get("systemPrompt")) | _most_turns(options.get("maxTurns")),
    )


def with_users_own(own: Sequence[McpServer], given: Sequence[McpServer]) -> tuple[McpServer, ...]:
    """The user's servers, then those of the editor that are not the same; of two with one name both stay, as the
    user's rules about a server of theirs must never hold for another."""
    known = {(server.name, address(server)) for server in own}
    return (*own, *(server for server in given if (server.name, address(server)) not in known))


def address(server: McpServer) -> tuple[str, ...]:
    """What tells whether two servers are the same one."""
    from crow.tools import StdioServer

    return (server.command, *server.args) if isinstance(server, StdioServer) else (server.url,)


def existing_directory(name: str, path: object) -> str:
    """`path`, if sessions can work there. :raises ArgumentError: relative, missing, or no directory."""
    if not isinstance(path, str):
        raise ArgumentError(f"{name}: expected an absolute path as a string.")
    if not Path(path).is_absolute():
        raise ArgumentError(f'{name} is "{path}"; expected an absolute path, such as "/home/me/project".')
    try:
        found = Path(path).is_dir()
    except (OSError, ValueError):  # too long, or with a NUL in it
        found = False
    if not found:
        raise ArgumentError(f'{name} is "{path}", which is not a directory that exists here.')
    return path


def session_info(row: SessionRow) -> dict[str, Any]:
    """A row as `session/list` shows it."""
    updated = datetime.datetime.fromtimestamp(row.updated_ms / 1000, datetime.UTC)
    info: dict[str, Any] = {
        "sessionId": row.id,
        "cwd": row.cwd,
        "updatedAt": updated.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
    }
    if row.title is not None:
        info["title"] = row.title
    if row.additional_directories:
        info["additionalDirectories"] = list(row.additional_directories)
    return info


def _system_prompt(given: object) -> dict[str, object]:
    """A text stands in for crow's own role; `{"append": text}` comes after everything else."""
    match given:
        case None:
            return {}
        case str():
            return {"system_prompt": given} if given.strip() else {}
        case {"append": str(text)}:
            return {"system_prompt_append": text} if text.strip() else {}
        case _:
            raise ArgumentError('_meta.systemPrompt: expected a text, or an object such as {"append": "Be brief."}.')


def _most_turns(given: object) -> dict[str, object]:
    if given is None:
        return {}
    if isinstance(given, bool) or not isinstance(given, int) or given < 1:
        raise ArgumentError("_meta.claudeCode.options.maxTurns: expected a whole number above 0.")
    return {"max_turns": given}


def _model(name: str, given: Mapping[str, Any]) -> str | None:
    value = given.get("model")
    if value is not None and (not isinstance(value, str) or len(value) > MODEL_CHARS):
        raise ArgumentError(f"{name}: expected the name of a model, of at most {MODEL_CHARS} characters.")
    return value or None


def _object(given: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = given.get(key)
    return value if isinstance(value, dict) else {}


# FROM frontend.crow_meta: What clients may say to crow alone, under `_meta.crow`, since the protocol has no word for
# it.
#
# Strategy: what is not said is None or false; what is said and cannot be used is an error that names it, as it would
# do
# something else than was asked. Decides nothing.


ALIAS_CHARS = 200


def alias_named(params: Mapping[str, Any]) -> str | None:
    """`alias`: the name of the session to open, or to make. :raises ArgumentError: no usable name."""
    alias = _said(params).get("alias")
    if alias is None:
        return None
    if not isinstance(alias, str) or not alias.strip() or len(alias) > ALIAS_CHARS or not alias.isprintable():
        raise ArgumentError(
            f'_meta.crow.alias: expected a name of 1 to {ALIAS_CHARS} characters, such as "cli:default".'
        )
    return alias


def entry_named(params: Mapping[str, Any]) -> int | None:
    """`entry`: the id of the entry to fork from. :raises ArgumentError: no whole number above 0."""
    entry = _said(params).get("entry")
    if entry is None:
        return None
    if not isinstance(entry, int) or isinstance(entry, bool) or not 0 < entry < 2**63:
        raise ArgumentError(f"_meta.crow.entry is {entry!r}; expected the id of an entry, a whole number above 0.")
    return entry


def wants_archived(params: Mapping[str, Any]) -> bool:
    """`archived`: list the archived sessions instead of the others."""
    return _said(params).get("archived") is True


def _said(params: Mapping[str, Any]) -> Mapping[str, Any]:
    meta = params.get("_meta")
    said = meta.get("crow") if isinstance(meta, dict) else None
    return said if isinstance(said, dict) else {}


# FROM agent.idle: When nothing runs: the moment to tidy the store.
#
# Strategy: turns are counted as they come and go; some seconds after the last of them has ended the store is tidied,
# and
# a turn that begins meanwhile stops that between two of its small steps: what is left gets done another time. Knows
# neither sessions nor what tidying is.


AFTER_S = 3.0
"""A user who reads an answer needs longer than this; one who types ahead is not disturbed."""


class IdleTimer:
    """Calls `tidy` when no turn has run for `after_s`. `run` is its task."""

    def __init__(self, tidy: Callable[[], Awaitable[None]], *, after_s: float = AFTER_S) -> None:
        self._tidy = tidy
        self._after_s = after_s
        self._turns = 0
        self._timer: asyncio.TimerHandle | None = None
        self._due = anyio.Event()
        self._tidying: anyio.CancelScope | None = None

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Around each turn."""
        self._turns += 1
        self._put_off()
        try:
            yield
        finally:
            self._turns -= 1
            self._plan(self._after_s)

    def tidy_soon(self) -> None:
        """There is something to tidy: as soon as no turn runs."""
        self._plan(0.0)

    def stop(self) -> None:
        """End a tidying that is under way; the store is about to close."""
        self._turns += 1
        self._put_off()

    async def run(self) -> None:
        """Tidy again and again, until cancelled."""
        while True:
            await self._due.wait()
            self._due = anyio.Event()
            if self._turns:  # one has begun in this very moment; its end plans anew
                continue
            with anyio.CancelScope() as self._tidying:
                try:
                    await self._tidy()
                except StoreError as error:
                    logger.warning("Nothing was tidied: %s", error)
            self._tidying = None

    def _plan(self, delay_s: float) -> None:
        self._put_off()
        self._timer = asyncio.get_running_loop().call_later(delay_s, self._begin)

    def _put_off(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._tidying is not None:
            self._tidying.cancel()

    def _begin(self) -> None:
        if not self._turns:  # else it is planned anew when they end
            self._due.set()
