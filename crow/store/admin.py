"""The interface for administering stored sessions, as the command line uses it.

`crow acp` does not use this interface, so it is separate from the interface of the store. This way `crow acp` does not
import modules that only administration needs.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from crow.domain.errors import ArgumentError
from crow.domain.rendering import title_line
from crow.store import Group, Scope, SessionRow, UsageTotal
from crow.store.codec import tags_of

FORMER_OWNER = "the process that ran it"
"""The owner of turns and queued prompts that were copied from another database. No store has this name, so this owner
counts as dead."""

_NAMED_IN_ERROR = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionFilter:
    """The conditions that a session must meet to be listed. A condition that is None or empty does not apply.

    The session's directory must be one of `directories`. Its title must contain `title`. The name of a model that it
    uses or has used must contain `model`. Case does not matter in titles and names of models. The session must have all
    of `tags`. Its newest entry must be from `since_ms` up to but not including `before_ms` (Unix milliseconds). If
    `archived` is true, only archived sessions are listed, otherwise only sessions that are not archived.
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
    """A session in a list. `used_ms` (Unix milliseconds) is the later of two times: when the session was created, and
    when its newest entry was written. `messages` is the number of prompts and answers on the session's path.
    `subagents` are sorted by their start, oldest first."""

    row: SessionRow
    used_ms: int
    messages: int
    subagents: tuple[ListedSession, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class UnusedSession:
    """A session that has not been used for a while.

    `used_ms` (Unix milliseconds) is the later of two times: when the session was created, and when its newest entry was
    written. Changing the title and archiving the session do not count as use. `title` is None if the session has none.
    """

    id: str
    cwd: str
    title: str | None
    used_ms: int
    entries: int
    archived: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionExtras:
    """The data of a session that a copy keeps and an export leaves out. `additional_directories`, `config` and
    `metadata` are JSON texts.

    `shares` has the principal, the access and the time of each share. `inbox` has the message id, the parts as JSON,
    the time, and the name's id and digest of each queued prompt; without a name, both are None. `draft` has the turn,
    message id, text, thought and time of each stored piece of an unfinished answer below the leaf. Times are Unix
    milliseconds. `is_running` is true if a dead process left a turn open. Permissions are not copied.
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
    inbox: tuple[tuple[str, str, int, str | None, str | None], ...] = ()
    draft: tuple[tuple[int, str, str, str, int], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversationState:
    """The data that a copy of a conversation needs in addition to an export of the conversation.

    `extras` maps the ids of the conversation's sessions to their extras. `users` names the living processes that use at
    least one of these sessions. `stamp` changes whenever a session changes.
    """

    extras: Mapping[str, SessionExtras]
    users: tuple[str, ...]
    stamp: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportDefaults:
    """The values that imported sessions get in addition to those in the file. `model` and `mode` are for sessions
    without extras. When sessions are copied, `extras` maps their ids to their extras, and their titles are not changed.
    `relatives` are the ids of sessions outside of the file. A session in the file may name one of them as its parent,
    or as the session from which it was forked."""

    model: str = ""
    mode: str = "ask"
    extras: Mapping[str, SessionExtras] = field(default_factory=dict)
    relatives: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class Imported:
    """One conversation of an imported file. `is_new` is false if the database already had the conversation. In this
    case nothing was changed. `is_same` is true if the conversation in the database has the same hash as the one in the
    file. `cleaned` are the sessions whose titles were changed, because a title was too long or had invisible
    characters."""

    sessions: tuple[str, ...]
    entries: int
    is_new: bool
    cleaned: tuple[str, ...] = ()
    is_same: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Backup:
    """A verified copy of the database. `sessions` and `entries` are the numbers of sessions and entries in the copy."""

    path: str
    bytes: int
    sessions: int
    entries: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskUse:
    """The bytes that a part of the database takes. `what` names the part. `number` is the number of items in the part,
    or None if the items are not counted. For texts and blobs, only their own bytes count, without the overhead of their
    rows. Pages, tables and files count as a whole."""

    what: str
    number: int | None
    bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Damage:
    """The damage to a database: `problems` in the file, and `entries` that cannot be read. Both are empty if all is
    well."""

    problems: tuple[str, ...] = ()
    entries: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionMatch:
    """A session that the user may mean."""

    id: str
    title: str | None

    def __str__(self) -> str:
        return f'{self.id} ("{title_line(self.title, 40)}")' if self.title else self.id


class Admin(Protocol):
    """Administers the sessions of an open store. Every method may raise
    :class:`~crow.domain.errors.StoreUnavailable`."""

    async def matches(self, name: str) -> tuple[SessionMatch, ...]:
        """Return the sessions that `name` may mean, most recently used first: the session with this id. If there is
        none, the session with this alias. If there is none, all sessions whose id begins with `name` or whose title is
        `name`. Aliases of principals do not count, because several principals may use the same alias."""

    async def find(self, name: str) -> str:
        """Return the id of the only session that `name` may mean; see `matches`.

        :raises ~crow.domain.errors.ArgumentError: no session matches, or several do.
        """
        return only_match(name, await self.matches(name)).id

    async def ids(self) -> tuple[str, ...]:
        """Return the ids of all sessions and sub-agents, sorted."""

    async def listed(self, chosen: SessionFilter, *, limit: int | None = None) -> tuple[ListedSession, ...]:
        """Return the sessions that have a prompt, each with its sub-agents. The session that was used last comes
        first."""

    async def totals(self, by: Sequence[Group], scope: Scope) -> tuple[UsageTotal, ...]:
        """Return sums of tokens and cost, one for each group of entries with the same values of the keys in `by`.
        Without keys, return one sum of everything. If `by` contains the day, the sums are sorted by day; otherwise the
        largest sum comes first. Each entry counts once, even if several forks share it. A sub-agent's usage counts for
        its parent session. The result of a task repeats the usage of its sub-agent, but this repetition does not count.
        Days are in local time. If all sessions of a conversation are deleted, its usage does not count."""

    async def disk_use(self) -> tuple[DiskUse, ...]:
        """Return how many bytes each part of the database takes."""

    async def count_tags(self) -> Mapping[str, int]:
        """Map each tag to the number of sessions that have it. Tags are in alphabetical order."""

    async def directories(self) -> tuple[str, ...]:
        """Return the directories of all sessions."""

    async def unused_since(self, before_ms: int, cwd: str | None = None) -> tuple[UnusedSession, ...]:
        """Return the sessions that were last used before `before_ms`, oldest first. With `cwd`, return only the
        sessions in that directory. Sessions with a running turn are left out."""

    async def prune(self, before_ms: int, cwd: str | None = None) -> tuple[UnusedSession, ...]:
        """Remove the sessions that `unused_since` lists, and return them."""

    async def remove(self, ids: Sequence[str]) -> None:
        """Remove sessions, and the data that only they need.

        :raises ~crow.domain.errors.SessionBusy: a living process runs a turn in one of these sessions; no session was
            removed.
        """

    def export(self, ids: Sequence[str] | None) -> AsyncIterator[bytes]:
        """Return the lines of an export file with these sessions and their sub-agents. If `ids` is None, export all
        sessions that `crow sessions` lists. Turns that a dead process left open are closed first."""

    async def import_file(self, path: Path, defaults: ImportDefaults) -> tuple[Imported, ...]:
        """Check the whole file, then import the conversations that are not in the database yet.

        The conversations are written in small transactions, so that other processes can write in between. The
        conversations stay hidden until all of them are complete.

        :raises ~crow.domain.errors.ArgumentError: the file is damaged or not a crow export, or another process is
            importing or removing a session of the file; nothing was imported.
        """

    async def conversations(self) -> Mapping[int, tuple[str, ...]]:
        """Map each conversation to its sessions. Both the conversations and their sessions are sorted, oldest first.
        Sessions that were never used are left out, except sub-agents and sessions with sub-agents."""

    async def conversation_state(self, ids: Sequence[str]) -> ConversationState:
        """Return the data that a copy of these sessions needs in addition to an export. All these sessions belong to
        one conversation."""

    def lines(self, conversation: int, ids: Sequence[str], known: frozenset[str]) -> AsyncIterator[bytes]:
        """Return the lines of an export file for these sessions of a conversation, without header and end. Turns that a
        dead process left open are exported as they are. A session's `parent_id` and `forked_from` are exported only if
        they are in `known`."""

    async def damage(self) -> Damage:
        """Look for damage in the database file. A PostgreSQL database is not checked, because the server checks it."""

    async def size(self) -> int | None:
        """Return the size of the database's files in bytes, or None for a database on a server."""

    async def back_up(self, path: Path) -> Backup:
        """Copy the database to a new file while it is in use, and verify the copy.

        :raises ~crow.domain.errors.ArgumentError: `path` exists or cannot be created, or the database is on a server.
        :raises ~crow.domain.errors.StoreUnavailable: the copy could not be written, or the copy is damaged because the
            database is damaged.
        """


def only_match(name: str, found: Sequence[SessionMatch]) -> SessionMatch:
    """Return the only one of the sessions that `name` may mean.

    :raises ~crow.domain.errors.ArgumentError: there is no such session, or there are several.
    """
    if not found:
        raise ArgumentError(f'No session "{name}". Run "crow sessions" to list them.')
    if len(found) > 1:
        some = ", ".join(str(one) for one in found[:_NAMED_IN_ERROR])
        more = ", ..." if len(found) > _NAMED_IN_ERROR else ""
        raise ArgumentError(f'"{name}" may mean {len(found)} sessions: {some}{more}. Give more of the id.')
    return found[0]


def best_matches(found: Sequence[tuple[int, SessionMatch]]) -> tuple[SessionMatch, ...]:
    """Return the sessions of the lowest rank. Each session comes with its rank: 0 if the name is its id, 1 if it is its
    alias, 2 otherwise."""
    best = min((rank for rank, _ in found), default=0)
    return tuple(one for rank, one in found if rank == best)
