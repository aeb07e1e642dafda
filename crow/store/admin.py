"""The interface for administering stored sessions, as the command line uses it.

It is separate from the store because `crow acp` needs neither these functions nor the modules that they import.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from crow.domain.errors import ArgumentError
from crow.store import Group, Scope, SessionRow, UsageTotal
from crow.store.codec import tags_of

FORMER_OWNER = "the process that ran it"
"""The owner of turns and queued prompts that were copied from another database. It is not alive anywhere."""

_NAMED_IN_ERROR = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionFilter:
    """Which sessions to list. None, an empty text and empty `tags` mean no limit.

    A session's directory must be one of `directories`. `model` is a part of the name of a model that the session uses
    or used, and `title` a part of its title; case does not matter. A session must have all of `tags`, and its newest
    entry must be from `since_ms` up to but not including `before_ms` (Unix milliseconds). With `archived`, only
    archived sessions are listed; without it, only the others.
    """

    directories: Collection[str] | None = None
    model: str | None = None
    title: str = ""
    tags: tuple[str, ...] = ()
    since_ms: int | None = None
    before_ms: int | None = None
    archived: bool = False

    def takes(self, row: SessionRow) -> bool:
        """Whether a session matches `title` and `tags`. The query has already checked the other conditions."""
        has_title = self.title.casefold() in (row.title or "").casefold()
        return has_title and set(self.tags) <= set(tags_of(row.metadata))


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedSession:
    """A session in a list. `used_ms` (Unix milliseconds) is the time of its newest entry, or of its creation if that is
    later. `messages` counts the prompts and answers on its path. `subagents` are in the order in which they were
    started."""

    row: SessionRow
    used_ms: int
    messages: int
    subagents: tuple[ListedSession, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class UnusedSession:
    """A session that has not been used for a while.

    `used_ms` (Unix milliseconds) is the time of its newest entry, or of its creation if that is later. Changing the
    title or archiving the session does not count as use. `title` is None if the session has none.
    """

    id: str
    cwd: str
    title: str | None
    used_ms: int
    entries: int
    archived: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionExtras:
    """What a copy of a session keeps beyond what an export contains. `additional_directories`, `config` and `metadata`
    are JSON, as stored.

    `shares` are the principals with whom it is shared, their access, and the time. `inbox` are queued prompts: message
    id, parts as JSON, and time. `draft` is the stored part of an unfinished answer below the leaf: turn, message id,
    pieces of text and thought, and time. `is_running` is true if a process that has ended left a turn open. Permissions
    are not copied.
    """

    alias: str | None
    model: str
    mode: str
    additional_directories: str
    config: str
    metadata: str
    calibration: float
    principal: str | None
    is_running: bool
    shares: tuple[tuple[str, str, int], ...] = ()
    inbox: tuple[tuple[str, str, int], ...] = ()
    draft: tuple[tuple[int, str, str, str, int], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversationState:
    """What a copy of a conversation needs beside its export.

    `extras` maps the ids of its sessions to their extras. `users` names the living processes that use one of the
    sessions now. `stamp` changes whenever one of the sessions does.
    """

    extras: Mapping[str, SessionExtras]
    users: tuple[str, ...]
    stamp: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportDefaults:
    """The model and mode of imported sessions, the same as for a new session.

    For a copy, `extras` has the values of each session, and titles stay as they are. `relatives` are sessions outside
    of the file that sessions in it may name as parent or origin.
    """

    model: str = ""
    mode: str = "ask"
    extras: Mapping[str, SessionExtras] = field(default_factory=dict)
    relatives: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class Imported:
    """One conversation of an imported file. `is_new` is false if it had been imported before and was left unchanged.
    `cleaned` are the sessions whose titles were changed because they were too long or had invisible characters.
    `is_same` is true if what had been imported before has the same hash."""

    sessions: tuple[str, ...]
    entries: int
    is_new: bool
    cleaned: tuple[str, ...] = ()
    is_same: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Backup:
    """A verified copy of the database, with the number of sessions and entries in it."""

    path: str
    bytes: int
    sessions: int
    entries: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskUse:
    """The bytes that something takes in the database, and how many of it there are; None if that is not counted.

    Texts and blobs are counted as they are stored, without the room that the database needs for each row. Pages, tables
    and files are counted as a whole."""

    what: str
    number: int | None
    bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Damage:
    """What is wrong with a database, and the entries that cannot be read; both empty if all is well."""

    problems: tuple[str, ...] = ()
    entries: tuple[str, ...] = ()


class Admin(Protocol):
    """Administers the sessions of an open store. Every method may raise
    :class:`~crow.domain.errors.StoreUnavailable`."""

    async def find(self, name: str) -> str:
        """Return the id of the session with this id or alias. If there is none, return the id of the only session whose
        id begins with `name`. Aliases that principals have given do not count: several may have chosen the same.

        :raises ~crow.domain.errors.ArgumentError: no session matches, or several do.
        """

    async def ids(self) -> tuple[str, ...]:
        """Return the ids of all sessions and sub-agents, in order."""

    async def listed(self, chosen: SessionFilter, *, limit: int | None = None) -> tuple[ListedSession, ...]:
        """Return the sessions that have a prompt, each with its sub-agents. The session that was used last comes
        first."""

    async def totals(self, by: Sequence[Group], scope: Scope) -> tuple[UsageTotal, ...]:
        """Return sums of tokens and cost, grouped by the keys in `by`. Without keys, return one sum of everything. If
        grouped by day, the sums are sorted by day; otherwise the largest sum comes first.

        Each entry counts once, even if several forks share it. A sub-agent's usage also counts once: it is added to the
        parent session, and the copy in the task's result is ignored. Days are in local time. Usage in conversations
        whose sessions are all deleted is not counted.
        """

    async def disk_use(self) -> tuple[DiskUse, ...]:
        """Return what takes the room in the database."""

    async def count_tags(self) -> Mapping[str, int]:
        """Return all tags in alphabetical order, each with the number of sessions that have it."""

    async def directories(self) -> tuple[str, ...]:
        """Return the directories of all sessions."""

    async def unused_since(self, before_ms: int, cwd: str | None = None) -> tuple[UnusedSession, ...]:
        """Return the sessions that were last used before `before_ms`, oldest first. With `cwd`, return only the
        sessions in that directory. Sessions with a running turn are left out."""

    async def prune(self, before_ms: int, cwd: str | None = None) -> tuple[UnusedSession, ...]:
        """Remove the sessions that `unused_since` lists, and return them."""

    async def remove(self, ids: Sequence[str]) -> None:
        """Remove sessions, and all their data that no other session needs.

        :raises ~crow.domain.errors.SessionBusy: a living process runs a turn in one of them; no session was removed.
        """

    def export(self, ids: Sequence[str] | None) -> AsyncIterator[bytes]:
        """Return the lines of an export file with these sessions and their sub-agents. If `ids` is None, export every
        listed session. Turns that a dead process left open are closed first."""

    async def import_file(self, path: Path, defaults: ImportDefaults) -> tuple[Imported, ...]:
        """Check the whole file, then import the conversations that are not in the database yet.

        They are written in small transactions, since other processes write too. They stay hidden until all of them are
        complete.

        :raises ~crow.domain.errors.ArgumentError: the file is damaged or not a crow export, or another process is
            importing or removing one of its sessions; nothing was imported.
        """

    async def conversations(self) -> Mapping[int, tuple[str, ...]]:
        """Return the sessions that were ever used, sub-agents and their parents, by conversation, oldest first."""

    async def conversation_state(self, ids: Sequence[str]) -> ConversationState:
        """Return what a copy of these sessions, all of one conversation, needs beside their export."""

    def lines(self, conversation: int, ids: Sequence[str], known: frozenset[str]) -> AsyncIterator[bytes]:
        """Return the lines of an export file for these sessions of a conversation, without header and end. Nothing is
        repaired. Parents and origins that are not in `known` are left out."""

    async def damage(self) -> Damage:
        """Look for damage. A server looks after its files itself."""

    async def size(self) -> int | None:
        """Return the size of the database's files in bytes, or None if a server keeps them."""

    async def back_up(self, path: Path) -> Backup:
        """Copy the database to a new file while it is in use, and verify the copy.

        :raises ~crow.domain.errors.ArgumentError: `path` exists or cannot be created, or a server keeps the database.
        :raises ~crow.domain.errors.StoreUnavailable: the copy is damaged, so the database is damaged too.
        """


def only_match(name: str, found: Sequence[str], *, is_exact: bool) -> str | None:
    """Return the first of the ids found for `name`. If there is none, return None for a search for exact names.

    :raises ~crow.domain.errors.ArgumentError: a search for beginnings of ids found none, or several.
    """
    if is_exact:
        return found[0] if found else None
    if len(found) > 1:
        some = ", ".join(found[:_NAMED_IN_ERROR])
        more = ", ..." if len(found) > _NAMED_IN_ERROR else ""
        raise ArgumentError(f'{len(found)} session ids begin with "{name}": {some}{more}. Give more of the id.')
    if not found:
        raise ArgumentError(f'No session "{name}". Run "crow sessions" to list them.')
    return found[0]
