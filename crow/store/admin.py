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
from crow.domain.text import title_line
from crow.store import Group, Scope, SessionRow, UsageTotal
from crow.store.codec import tags_of

FORMER_OWNER = "the process that ran it"
"""The owner of turns and queued prompts that were copied from another database. No store has this name, so this owner
counts as dead."""

_NAMED_IN_ERROR = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionFilter:
    """The conditions that a session must meet to be listed. A condition that is None or empty does not apply."""

    directories: Collection[str] | None = None
    """The session's directory must be one of these."""
    model: str | None = None
    """The name of a model that the session uses or has used must contain this text. Case does not matter."""
    title: str = ""
    """The session's title must contain this text. Case does not matter."""
    tags: tuple[str, ...] = ()
    """The session must have all of these tags."""
    since_ms: int | None = None
    """The session's newest entry must not be older than this time, in Unix milliseconds."""
    before_ms: int | None = None
    """The session's newest entry must be older than this time, in Unix milliseconds."""
    archived: bool = False
    """If this is true, only archived sessions are listed. Otherwise, only sessions that are not archived are listed."""

    def takes(self, row: SessionRow) -> bool:
        """Return whether a session matches `title` and `tags`. The query has already checked the other conditions."""
        has_title = self.title.casefold() in (row.title or "").casefold()
        return has_title and set(self.tags) <= set(tags_of(row.metadata))


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedSession:
    """A session in a list."""

    row: SessionRow
    used_ms: int
    """The later of two times, in Unix milliseconds: when the session was created, and when its newest entry was
    written."""
    messages: int
    """The number of prompts and answers on the session's path."""
    is_compacted: bool = False
    """Whether a compaction that was not undone is on the session's path."""
    subagents: tuple[ListedSession, ...] = ()
    """Sorted by their start, oldest first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UnusedSession:
    """A session that has not been used for a while."""

    id: str
    cwd: str
    title: str | None
    """None if the session has no title."""
    used_ms: int
    """The later of two times, in Unix milliseconds: when the session was created, and when its newest entry was
    written. Changing the title and archiving the session do not count as use."""
    entries: int
    """The number of entries."""
    archived: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionExtras:
    """The data of a session that a copy keeps and an export leaves out. Permissions are not copied."""

    alias: str | None
    model: str
    mode: str
    additional_directories: str
    """JSON."""
    config: str
    """JSON."""
    metadata: str
    """JSON."""
    calibration: float
    principal: str | None
    is_running: bool
    """Whether a dead process left a turn open."""
    shares: tuple[tuple[str, str, int], ...] = ()
    """The principal, the access and the time (Unix milliseconds) of each share."""
    inbox: tuple[tuple[str, str, int, str | None, str | None], ...] = ()
    """The message id, the parts as JSON, the time (Unix milliseconds), and the name's id and digest of each
    queued prompt. Without a name, both are None."""
    draft: tuple[tuple[int, str, str, str, int], ...] = ()
    """The turn, message id, text, thought and time (Unix milliseconds) of each stored piece of an unfinished answer
    below the leaf."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversationState:
    """The data that a copy of a conversation needs in addition to an export of the conversation."""

    extras: Mapping[str, SessionExtras]
    """Maps the ids of the conversation's sessions to their extras."""
    users: tuple[str, ...]
    """The names of the living processes that use at least one of these sessions."""
    stamp: str
    """A text that changes whenever one of these sessions changes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportDefaults:
    """The values that imported sessions get in addition to those in the file."""

    model: str = ""
    """The model of sessions without extras."""
    mode: str = "ask"
    """The mode of sessions without extras."""
    extras: Mapping[str, SessionExtras] = field(default_factory=dict)
    """Maps the ids of sessions to their extras when the sessions are copied. Titles of copied sessions are not
    changed."""
    relatives: frozenset[str] = frozenset()
    """The ids of sessions outside of the file. A session in the file may name one of them as its parent, or as the
    session from which it was forked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Imported:
    """One conversation of an imported file."""

    sessions: tuple[str, ...]
    """The ids of the conversation's sessions."""
    entries: int
    """The number of the conversation's entries."""
    is_new: bool
    """False if the database already had the conversation. In this case nothing was changed."""
    cleaned: tuple[str, ...] = ()
    """The ids of the sessions whose titles were changed, because a title was too long or had invisible characters."""
    is_same: bool = False
    """Whether the conversation in the database has the same hash as the one in the file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Backup:
    """A verified copy of the database."""

    path: str
    bytes: int
    sessions: int
    """The number of sessions in the copy."""
    entries: int
    """The number of entries in the copy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskUse:
    """The space on disk that a part of the database takes."""

    what: str
    """The name of the part."""
    number: int | None
    """The number of items in the part, or None if the items are not counted."""
    bytes: int
    """For texts and blobs, only their own bytes count, without the overhead of their rows. Pages, tables and files
    count as a whole."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Damage:
    """The damage to a database. Both fields are empty if all is well."""

    problems: tuple[str, ...] = ()
    """The problems in the file."""
    entries: tuple[str, ...] = ()
    """The entries that cannot be read."""


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
        """Return the sessions that `name` may mean. This is the session with this id. If there is none, it is the
        session with this alias. If there is none either, it is every session whose id begins with `name` or whose title
        is `name`, most recently used first. Aliases of principals do not count, because several principals may use the
        same alias."""

    async def find(self, name: str) -> str:
        """Return the id of the only session that `name` may mean; see `matches`.

        :raises ~crow.domain.errors.ArgumentError: no session matches, or several do.
        """
        return only_match(name, await self.matches(name)).id

    async def ids(self) -> tuple[str, ...]:
        """Return the ids of all sessions and subagents, sorted."""

    async def written_after(self, entry: int) -> Mapping[str, int]:
        """Map the id of each session and subagent with an entry newer than `entry` (an id) to the id of its newest
        entry. The session whose newest entry is the oldest comes first."""

    async def listed(self, chosen: SessionFilter, *, limit: int | None = None) -> tuple[ListedSession, ...]:
        """Return the sessions that have a prompt, each with its subagents. The session that was used last comes
        first."""

    async def totals(self, by: Sequence[Group], scope: Scope) -> tuple[UsageTotal, ...]:
        """Return sums of tokens and cost, one for each group of entries with the same values of the keys in `by`.
        Without keys, return one sum of everything. If `by` contains the day, the sums are sorted by day; otherwise the
        largest sum comes first. Each entry counts once, even if several forks share it. A subagent's usage counts for
        its parent session. The result of a task repeats the usage of its subagent, but this repetition does not count.
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
        """Return the lines of an export file with these sessions and their subagents. If `ids` is None, export all
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
        Sessions that were never used are left out, except subagents and sessions with subagents."""

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
    """Return the session in `found`, if there is exactly one. `found` are the sessions that `name` may mean.

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
    """Return the sessions of the lowest rank. Each session comes with its rank: 0 if the name is the session's id, 1 if
    the name is the session's alias, 2 otherwise."""
    best = min((rank for rank, _ in found), default=0)
    return tuple(one for rank, one in found if rank == best)
