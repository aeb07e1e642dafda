"""Shows a principal of `crow serve` only the sessions that it owns and those that are shared with it.

Every method first asks what the principal may do with the session. If the session is hidden from the principal, the
method continues with an id that no session has. So a hidden session causes the same statements and the same error as an
unknown id.
"""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from functools import wraps
from typing import Any, TypeVar, cast

from crow.domain.entries import CallRef, Entry, NewEntry, PromptName
from crow.domain.errors import ArgumentError, NoSuchSession
from crow.domain.messages import JsonObject, Part
from crow.store import (
    Access,
    Directory,
    Hit,
    NewSession,
    ScanResult,
    Scope,
    SessionChanges,
    SessionPage,
    SessionRow,
    Share,
    Store,
    Tail,
    TurnStart,
)
from crow.store.watching import News, Watcher

# ruff: noqa: ARG002  # some parameters, such as `seen_by`, are for callers that see everything

_T = TypeVar("_T")
_M = TypeVar("_M", bound=Callable[..., Any])

_NO_SESSION = "/hidden"
"""An id that no session has. Crow never makes an id with a slash, and imports refuse such an id."""

_NO_ENTRY = 2**62

_RANKS: Mapping[Access, int] = {"read": 1, "write": 2, "own": 3}

_MOST_KNOWN = 1_000

_PRINCIPAL = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@+-]{0,63}")

_SHARED_CHANGES = frozenset({"title", "title_by_user", "model", "mode", "config", "metadata", "calibration"})
"""Columns that a principal with the access `write` may change. Only the owner may change the other columns."""


def check_principal(name: str) -> str:
    """Check and return the name of a principal. The name is also used as the name of a directory.

    :raises ArgumentError: the name is not valid.
    """
    if not _PRINCIPAL.fullmatch(name):
        raise ArgumentError(
            f"Principal {name!r}: expected 1 to 64 of the characters a-z, A-Z, 0-9 and . _ @ + -, beginning with a "
            'letter or digit, such as "ann" or "ann@example.org".'
        )
    return name


def _needs(need: Access, method: _M) -> _M:
    """Return a method that requires the access `need` to a session and then calls `method` of the inner store."""

    @wraps(method)
    async def checked(store: PrincipalStore, session_id: str, *args: Any, **options: Any) -> Any:
        call = getattr(store.inner, method.__name__)
        return await store.guarded(session_id, need, lambda one: call(one, *args, **options))

    return cast(_M, checked)


def _same(method: _M) -> _M:
    """Return a method that calls `method` of the inner store without a check, for methods that concern no session."""

    @wraps(method)
    async def passed(store: PrincipalStore, *args: Any, **options: Any) -> Any:
        return await getattr(store.inner, method.__name__)(*args, **options)

    return cast(_M, passed)


def _refused(method: _M) -> _M:
    """Return a replacement for `method` that always raises an error, because no principal may manage tokens."""

    @wraps(method)
    async def refused(*_: object, **__: object) -> None:
        raise ArgumentError('Tokens are managed on the server: run "crow serve token" there.')

    return cast(_M, refused)


class PrincipalStore(Store, Watcher):
    """A :class:`~crow.store.Store` as one principal sees it. Closing it does not close the store behind it."""

    def __init__(self, inner: Store, principal: str | None, *, home: str | None = None) -> None:
        self.inner = inner
        self.principal = principal
        """If it is None, the store hides nothing, apart from what `home` hides."""
        self.home = home
        """The id of the session, if the store is for one open session. Everybody who may prompt in the session can make
        its agent read this store. So while the session is shared, this store shows only the session and its
        subagents."""
        self._family = set() if home is None else {home}
        # The sessions that the principal is known to own. An owner never changes.
        self._own: dict[str, None] = {}
        # The sessions whose turns were claimed through this store. `disown` gives up only these turns: it is not async,
        # so it cannot ask what the principal may do.
        self._turns: set[str] = set()

    # Methods that need no code of their own: they only check the access, check nothing, or always refuse.

    enqueue = _needs("write", Store.enqueue)
    named_prompt = _needs("write", Store.named_prompt)
    replace_queued = _needs("write", Store.replace_queued)
    queued = _needs("read", Store.queued)
    unstored_end = _needs("read", Store.unstored_end)
    drop_prompt = _needs("write", Store.drop_prompt)
    cancel_turn = _needs("write", Store.cancel_turn)
    renew_lease = _needs("write", Store.renew_lease)
    save_draft = _needs("write", Store.save_draft)
    moves = _needs("read", Store.moves)
    outline = _needs("read", Store.outline)
    usage_by_model = _needs("read", Store.usage_by_model)
    share_session = _needs("own", Store.share_session)
    learned = _same(Store.learned)
    learn = _same(Store.learn)
    tidy = _same(Store.tidy)
    add_token = _refused(Store.add_token)
    token = _refused(Store.token)
    tokens = _refused(Store.tokens)
    note_token_use = _refused(Store.note_token_use)
    revoke_token = _refused(Store.revoke_token)

    @property
    def warning(self) -> str:
        return self.inner.warning

    @property
    def notifies(self) -> bool:
        return self.inner.notifies

    async def access(self, session_id: str) -> Access | None:
        """Return what the principal may do with a session, or None if the session is unknown or hidden."""
        if session_id in self._family:
            return "own"
        if await self._confined_to() is not None:
            return "own" if await self._is_in_family(session_id) else None
        if self.principal is None or session_id in self._own:
            return "own"
        found = await self.inner.access_of(session_id, self.principal)
        if found == "own":
            self._remember(session_id)
        return found

    async def require(self, session_id: str, need: Access) -> Access:
        """Check that the principal has at least the access `need` to a session. Return the principal's access.

        :raises ~crow.domain.errors.NoSuchSession: the session is unknown or hidden.
        :raises ~crow.domain.errors.ArgumentError: the session is shared with an access that is less than `need`.
        """
        access = await self.access(session_id)
        if access is None:
            raise NoSuchSession(session_id)
        _check(session_id, access, need)
        return access

    async def create_session(self, new: NewSession) -> SessionRow:
        if new.conversation is not None or new.leaf is not None:
            raise ArgumentError("Use fork_session to make a session in an existing conversation.")
        new = replace(new, principal=self.principal)
        if new.parent_id is None:
            await self._refuse_if_shared()
            row = await self.inner.create_session(new)
            self._remember(row.id)
            return row
        parent = new.parent_id
        row = await self.guarded(
            parent, "write", lambda _: self.inner.create_session(new), missing=lambda: self.inner.session(_NO_SESSION)
        )
        if parent in self._family:
            self._family.add(row.id)
        return self._shown(row)

    async def fork_session(
        self,
        session_id: str,
        new_id: str,
        *,
        entry: int | None,
        cwd: str,
        additional_directories: tuple[str, ...],
        metadata: JsonObject | None = None,
        principal: str | None = None,  # ignored: the fork belongs to this principal
    ) -> SessionRow:
        await self._refuse_if_shared()
        chosen = entry if entry is None or await self._sees([entry]) else _NO_ENTRY
        try:
            row = await self.guarded(
                session_id,
                "read",
                lambda one: self.inner.fork_session(
                    one,
                    new_id,
                    entry=chosen,
                    cwd=cwd,
                    additional_directories=additional_directories,
                    metadata=metadata,
                    principal=self.principal,
                ),
            )
        except ArgumentError as error:
            raise ArgumentError(str(error).replace(str(_NO_ENTRY), str(entry))) from None
        self._remember(row.id)
        return row

    async def session_by_alias(
        self,
        alias: str,
        *,
        principal: str | None = None,  # ignored: a principal sees only its own aliases
    ) -> SessionRow | None:
        row = await self.inner.session_by_alias(alias, principal=self.principal)
        home = await self._confined_to()
        return row if row is None or home in (None, row.id) else None

    async def move_alias(self, session_id: str, to: str) -> None:
        await self._refuse_if_shared()
        target = to if await self._may(to, "own") else _NO_SESSION
        try:
            await self.guarded(session_id, "own", lambda one: self.inner.move_alias(one, target))
        except NoSuchSession as error:
            raise NoSuchSession(to if error.session_id == _NO_SESSION else error.session_id) from None

    async def session(self, session_id: str) -> SessionRow:
        return self._shown(await self.guarded(session_id, "read", self.inner.session))

    async def sessions(
        self,
        *,
        cwd: str | None = None,
        cursor: str | None = None,
        limit: int = 50,
        archived: bool | None = False,
        seen_by: str | None = None,  # ignored: it is always this principal
    ) -> SessionPage:
        page = await self.inner.sessions(cwd=cwd, cursor=cursor, limit=limit, archived=archived, seen_by=self.principal)
        if await self._confined_to() is not None:
            return SessionPage(rows=(), cursor=None)
        return replace(page, rows=tuple(map(self._shown, page.rows)))

    async def subagents(self, session_id: str) -> tuple[SessionRow, ...]:
        rows = await self.guarded(session_id, "read", self.inner.subagents)
        return tuple(map(self._shown, rows))

    async def directories(
        self,
        *,
        limit: int = 200,
        seen_by: str | None = None,  # ignored: it is always this principal
    ) -> tuple[Directory, ...]:
        if await self._confined_to() is not None:
            return ()
        return await self.inner.directories(limit=limit, seen_by=self.principal)

    async def is_known_directory(
        self,
        paths: Sequence[str],
        *,
        principal: str | None = None,  # ignored: it is always this principal
    ) -> bool:
        return await self.inner.is_known_directory(paths, principal=self.principal)

    async def update_session(self, session_id: str, changes: SessionChanges) -> SessionRow:
        if "archived" in changes or changes.get("alias") is not None:
            await self._refuse_if_shared()
        need: Access = "write" if changes.keys() <= _SHARED_CHANGES else "own"
        return self._shown(await self.guarded(session_id, need, lambda one: self.inner.update_session(one, changes)))

    async def merge_metadata(self, session_id: str, patch: JsonObject) -> SessionRow:
        return self._shown(await self.guarded(session_id, "write", lambda one: self.inner.merge_metadata(one, patch)))

    async def delete_session(self, session_id: str) -> None:
        await self.guarded(session_id, "own", self.inner.delete_session)
        self._own.pop(session_id, None)

    async def open_session(self, session_id: str) -> Tail:
        tail = await self.guarded(session_id, "read", self.inner.open_session)
        return replace(tail, row=self._shown(tail.row))

    async def tail(self, session_id: str) -> Tail:
        tail = await self.guarded(session_id, "read", self.inner.tail)
        return replace(tail, row=self._shown(tail.row))

    async def history(
        self, session_id: str, *, result_bytes: Callable[[int], int | None] | None = None
    ) -> AsyncIterator[Sequence[Entry]]:
        one = session_id if await self._may(session_id, "read") else _NO_SESSION
        # A reader may stop early. Then the inner generator must end immediately.
        source = cast(AsyncGenerator[Sequence[Entry], None], self.inner.history(one, result_bytes=result_bytes))
        try:
            async with aclosing(source) as batches:
                async for batch in batches:
                    yield batch
        except NoSuchSession:
            self._own.pop(session_id, None)
            raise NoSuchSession(session_id) from None

    async def watch(self, session_id: str, *, after: int = 0) -> AsyncGenerator[News, None]:
        one = session_id if await self._may(session_id, "read") else _NO_SESSION
        try:
            async with aclosing(cast(Watcher, self.inner).watch(one, after=after)) as found:
                async for news in found:
                    await self.require(session_id, "read")  # the share may have ended
                    yield replace(news, row=self._shown(news.row))
        except NoSuchSession:
            self._own.pop(session_id, None)
            raise NoSuchSession(session_id) from None

    async def entry(self, entry_id: int, *, session_id: str | None = None) -> Entry | None:
        if session_id is not None:
            return await self.guarded(session_id, "read", lambda one: self.inner.entry(entry_id, session_id=one))
        return await self.inner.entry(entry_id) if await self._sees([entry_id]) else None

    async def result(self, session_id: str, call: CallRef) -> Entry | None:
        found = await self.guarded(session_id, "read", lambda one: self.inner.result(one, call))
        return found if found is not None and await self._sees([found.id]) else None

    async def take_turn(
        self,
        session_id: str,
        message_id: str | None,
        *,
        leaf: int | None,
        parts: Sequence[Part] | None = None,
        cut: int | None = None,
        name: PromptName | None = None,
        command_id: str = "",
    ) -> TurnStart:
        start = await self.guarded(
            session_id,
            "write",
            lambda one: self.inner.take_turn(
                one, message_id, leaf=leaf, parts=parts, cut=cut, name=name, command_id=command_id
            ),
        )
        self._turns.add(session_id)
        return start

    async def append(
        self,
        session_id: str,
        *,
        leaf: int | None,
        turn: int,
        entries: Sequence[NewEntry],
        release: bool = False,
        changes: SessionChanges | None = None,
    ) -> tuple[Entry, ...]:
        need: Access = "write" if changes is None or changes.keys() <= _SHARED_CHANGES else "own"
        stored = await self.guarded(
            session_id,
            need,
            lambda one: self.inner.append(one, leaf=leaf, turn=turn, entries=entries, release=release, changes=changes),
        )
        if release:
            self._turns.discard(session_id)
        return stored

    def disown(self, session_id: str, *, leaf: int | None, turn: int, end: Sequence[NewEntry]) -> None:
        if session_id in self._turns:
            self._turns.discard(session_id)
            self.inner.disown(session_id, leaf=leaf, turn=turn, end=end)

    async def move_leaf(self, session_id: str, *, leaf: int | None, to: int | None, reason: str) -> None:
        target = to if to is None or await self._sees([to]) else _NO_ENTRY
        try:
            await self.guarded(
                session_id, "write", lambda one: self.inner.move_leaf(one, leaf=leaf, to=target, reason=reason)
            )
        except ArgumentError as error:
            raise ArgumentError(str(error).replace(str(_NO_ENTRY), str(to))) from None

    async def count_messages(self, session_ids: Sequence[str]) -> Mapping[str, int]:
        seen = [one for one in session_ids if await self._may(one, "read")]
        return {**dict.fromkeys(session_ids, 0), **await self.inner.count_messages(seen)}

    async def compacted(self, session_ids: Sequence[str]) -> frozenset[str]:
        return await self.inner.compacted([one for one in session_ids if await self._may(one, "read")])

    async def entries_beyond(self, leaf: int | None, to: int | None, kinds: Collection[str]) -> tuple[Entry, ...]:
        if not await self._sees([one for one in (leaf, to) if one is not None]):
            return ()
        return await self.inner.entries_beyond(leaf, to, kinds)

    async def file_changes(self, leaf: int | None, to: int | None) -> tuple[Entry, ...]:
        if not await self._sees([one for one in (leaf, to) if one is not None]):
            return ()
        return await self.inner.file_changes(leaf, to)

    async def search(
        self,
        query: str,
        *,
        session_id: str | None = None,
        scope: Scope | None = None,
        limit: int = 20,
        seen_by: str | None = None,  # ignored: it is always this principal
    ) -> tuple[Hit, ...]:
        if session_id is None:
            home = await self._confined_to()
            seen_by = self.principal if home is None else None
            return await self.inner.search(query, session_id=home, scope=scope, limit=limit, seen_by=seen_by)
        return await self.guarded(
            session_id, "read", lambda one: self.inner.search(query, session_id=one, scope=scope, limit=limit)
        )

    async def scan(
        self,
        query: str,
        *,
        session_id: str,
        scope: Scope | None = None,
        limit: int = 20,
        without: Collection[str] = frozenset(),
    ) -> ScanResult:
        return await self.guarded(
            session_id,
            "read",
            lambda one: self.inner.scan(query, session_id=one, scope=scope, limit=limit, without=without),
        )

    async def access_of(self, session_id: str, principal: str) -> Access | None:
        """Return what a principal may do with a session. Only the owner of the session may ask about other principals.
        If anybody else asks about another principal, return None."""
        own = await self.access(session_id)
        if principal == self.principal:
            return own
        return await self.inner.access_of(session_id, principal) if own == "own" else None

    async def sees_entries(
        self, entries: Sequence[int], *, principal: str | None, session_id: str | None = None
    ) -> bool:
        if principal != self.principal or (session_id is not None and not await self._may(session_id, "read")):
            return False
        return await self._sees(entries, session_id)

    async def shares(self, session_id: str) -> tuple[Share, ...]:
        """Return a session's shares. A principal that does not own the session sees only the share with itself."""
        found = await self.guarded(session_id, "read", self.inner.shares)
        is_own = await self.access(session_id) == "own"
        return tuple(share for share in found if is_own or share.principal == self.principal)

    def hurry(self) -> None:
        """Do nothing. A principal that disconnects does not end the process."""

    async def close(self) -> None:
        """Do nothing. Whoever has opened the inner store closes it."""

    async def guarded(
        self,
        session_id: str,
        need: Access,
        call: Callable[[str], Awaitable[_T]],
        *,
        missing: Callable[[], Awaitable[object]] | None = None,
    ) -> _T:
        """Call `call` with the session's id, and return its result. If the session is hidden and `missing` is given,
        call `missing` instead, which raises `NoSuchSession`. If the session is hidden and `missing` is None, call
        `call` with an id that no session has."""
        access = await self.access(session_id)
        if access is not None:
            _check(session_id, access, need)
        try:
            if access is None and missing is not None:
                return cast(_T, await missing())
            return await call(session_id if access is not None else _NO_SESSION)
        except NoSuchSession as error:
            if error.session_id == session_id:
                self._own.pop(session_id, None)
            raise (NoSuchSession(session_id) if access is None else error) from None

    async def _may(self, session_id: str, need: Access) -> bool:
        """Return whether the principal sees the session.

        :raises ArgumentError: the principal sees the session, but has less access than `need`.
        """
        access = await self.access(session_id)
        if access is not None:
            _check(session_id, access, need)
        return access is not None

    async def _sees(self, entries: Sequence[int], session_id: str | None = None) -> bool:
        home = await self._confined_to()
        if not entries or (self.principal is None and home is None):
            return True
        principal, session_id = (self.principal, session_id) if home is None else (None, session_id or home)
        return await self.inner.sees_entries(entries, principal=principal, session_id=session_id)

    async def _confined_to(self) -> str | None:
        """Return `home` while that session is shared, otherwise None."""
        return self.home if self.home is not None and await self.inner.shares(self.home) else None

    async def _refuse_if_shared(self) -> None:
        if await self._confined_to() is not None:
            raise ArgumentError(
                "This command is not available while the session is shared, because everybody who may prompt in the "
                "session could run it. If you own the session, use your client instead (session/new, session/fork, "
                "session/archive)."
            )

    async def _is_in_family(self, session_id: str) -> bool:
        """Return whether a session is `home`, or a subagent below `home` at any depth."""
        above: str | None = session_id
        passed = set[str | None]()  # in an imported file, two sessions may be each other's parents
        while above not in self._family:
            if above is None or above in passed:
                return False
            passed.add(above)
            try:
                above = (await self.inner.session(above)).parent_id
            except NoSuchSession:
                return False
        self._family.add(session_id)
        return True

    def _shown(self, row: SessionRow) -> SessionRow:
        """Return a session's row. The alias is left out if the session belongs to another principal."""
        return row if row.principal == self.principal or self.principal is None else replace(row, alias=None)

    def _remember(self, session_id: str) -> None:
        self._own[session_id] = None
        if len(self._own) > _MOST_KNOWN:
            del self._own[next(iter(self._own))]


def session_view(store: Store, row: SessionRow) -> Store:
    """Return the store that an open session uses on a server with principals. The store shows everything that the
    session's owner sees. But while the session is shared, the store shows only the session and its subagents."""
    inner = store.inner if isinstance(store, PrincipalStore) else store
    return PrincipalStore(inner, row.principal, home=row.id)


def _check(session_id: str, access: Access, need: Access) -> None:
    """:raises ArgumentError: `access` is less than `need`."""
    if _RANKS[access] >= _RANKS[need]:
        return
    if need == "own":
        raise ArgumentError(f"Session {session_id} is shared with you; only its owner may do that.")
    raise ArgumentError(
        f"Session {session_id} is shared with you for reading only; its owner can share it with --write."
    )
