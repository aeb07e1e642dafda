"""The store, as the agent and the frontend see it.

Strategy: an insert-only log of entries and one mutable row per session that points into it. Every method is one
transaction. Every append names the leaf it expects (compare-and-set), so two writers cannot interleave. The SQLite
adapter is wired by `crow.app` alone.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from crow.domain.entries import Entry, NewEntry
from crow.domain.messages import JsonObject, Part

__all__ = [
    "UNCHANGED",
    "BranchPoint",
    "BranchTip",
    "Hit",
    "Move",
    "NewSession",
    "Outline",
    "QueuedPrompt",
    "Scan",
    "Scope",
    "SessionChanges",
    "SessionPage",
    "SessionRow",
    "Store",
    "Tail",
    "TurnStart",
    "Unchanged",
]


class Unchanged:
    """The type of `UNCHANGED`: the column keeps its value. None would clear it."""

    __slots__ = ()


UNCHANGED = Unchanged()


@dataclass(frozen=True, slots=True, kw_only=True)
class NewSession:
    """A session to create. `id` never changes; `leaf` and `conversation` are set for a fork; `alias` names it too."""

    id: str
    cwd: str
    model: str
    mode: str
    additional_directories: tuple[str, ...] = ()
    config: JsonObject = field(default_factory=dict)
    parent_id: str | None = None
    forked_from: str | None = None
    conversation: int | None = None
    leaf: int | None = None
    title: str | None = None
    alias: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionRow:
    """The row of a session. `permissions` and `config` are JSON values, times are Unix milliseconds, `cost` is in USD.

    `calibration` multiplies token estimates. Lists are ordered by `newest_entry`, and show sessions that have a prompt.
    `owner` is the process that runs a turn, or empty.
    """

    id: str
    conversation: int
    leaf: int | None
    cwd: str
    model: str
    mode: str
    title: str | None = None
    title_by_user: bool = False
    additional_directories: tuple[str, ...] = ()
    permissions: tuple[JsonObject, ...] = ()
    config: JsonObject = field(default_factory=dict)
    metadata: JsonObject = field(default_factory=dict)
    calibration: float = 1.0
    parent_id: str | None = None
    forked_from: str | None = None
    alias: str | None = None
    state: Literal["idle", "running"] = "idle"
    owner: str = ""
    entries: int = 0
    tokens_in: int = 0
    tokens_out: int = 0
    tokens_cached: int = 0
    cost: float = 0.0
    newest_entry: int = 0
    has_prompt: bool = False
    created_ms: int = 0
    updated_ms: int = 0
    archived: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionChanges:
    """Columns of the row to set; those that are `UNCHANGED` stay as they are."""

    title: str | Unchanged | None = UNCHANGED
    title_by_user: bool | Unchanged = UNCHANGED
    model: str | Unchanged = UNCHANGED
    mode: str | Unchanged = UNCHANGED
    cwd: str | Unchanged = UNCHANGED
    additional_directories: tuple[str, ...] | Unchanged = UNCHANGED
    permissions: tuple[JsonObject, ...] | Unchanged = UNCHANGED
    config: JsonObject | Unchanged = UNCHANGED
    metadata: JsonObject | Unchanged = UNCHANGED
    calibration: float | Unchanged = UNCHANGED
    alias: str | Unchanged | None = UNCHANGED
    archived: bool | Unchanged = UNCHANGED


@dataclass(frozen=True, slots=True, kw_only=True)
class Tail:
    """The entries of a path that `for_model` needs, oldest first.

    These are the newest checkpoint that counts, the entries from its first kept one on, and the newest prompt entry;
    without a checkpoint, the whole path.
    """

    row: SessionRow
    entries: tuple[Entry, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnStart:
    """A claimed turn. `moved` is true if the leaf was not the expected one: the tail must be loaded again.

    `entries` are those that the claim has appended, the user entry last.
    """

    turn: int
    entries: tuple[Entry, ...]
    moved: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class QueuedPrompt:
    """A prompt that waits for its turn."""

    parts: tuple[Part, ...]
    message_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionPage:
    """Some sessions, newest first; `cursor` is for the next page, None at the end."""

    rows: tuple[SessionRow, ...]
    cursor: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Hit:
    """An entry found by search; `snippet` is the text around the match."""

    entry: int
    session: str
    kind: str
    snippet: str
    created_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Scope:
    """Limits of a search; None is no limit.

    `cwd` is the directory of a session, `model` a part of a model's name in any case. Entries were created at
    `since_ms` or later and before `before_ms` (Unix milliseconds).
    """

    cwd: str | None = None
    model: str | None = None
    since_ms: int | None = None
    before_ms: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Scan:
    """Matches from reading through entries, newest first.

    Entries older than `stopped_at` were not read; None: all were read.
    """

    hits: tuple[Hit, ...]
    stopped_at: int | None


class Store(Protocol):
    """Sessions and their conversations, durable.

    Every method may raise :class:`~crow.domain.errors.StoreUnavailable`; those that name a session raise
    :class:`~crow.domain.errors.NoSuchSession` unless said otherwise. Cancelling a caller leaves no transaction open;
    what was about to be committed is then either whole or absent.
    """

    @property
    def warning(self) -> str:
        """What a person should know of the place where all this is kept; empty if there is nothing."""
        ...

    async def create_session(self, new: NewSession) -> SessionRow:
        """Insert the row (and a conversation, unless it is a fork).

        :raises ~crow.domain.errors.ArgumentError: the id or the alias is taken, or the leaf is not in the conversation.
        """
        ...

    async def fork_session(
        self, session_id: str, new_id: str, *, entry: int | None, cwd: str, additional_directories: tuple[str, ...]
    ) -> SessionRow:
        """A new row that stands on `entry` of the same conversation, None for where the session stands; nothing is
        copied. It has the session's model, mode and configuration, no permissions, and a title "... (fork N)".

        :raises ~crow.domain.errors.ArgumentError: the id is taken, or the entry is not in the conversation.
        """
        ...

    async def named(self, alias: str) -> SessionRow | None:
        """The session that has this alias."""
        ...

    async def move_alias(self, session_id: str, to: str) -> None:
        """Take the alias from one session and give it to another.

        :raises ~crow.domain.errors.ArgumentError: the session has none (any more).
        """
        ...

    async def session(self, session_id: str) -> SessionRow:
        """The row now; a deleted session does not exist."""
        ...

    async def sessions(
        self, *, cwd: str | None = None, cursor: str | None = None, limit: int = 50, archived: bool = False
    ) -> SessionPage:
        """Sessions with a prompt, no sub-agents, newest entry first.

        :raises ~crow.domain.errors.ArgumentError: a cursor that is not from here.
        """
        ...

    async def update_session(self, session_id: str, changes: SessionChanges) -> SessionRow:
        """Touch the row only."""
        ...

    async def delete_session(self, session_id: str) -> None:
        """Hide it at once, its sub-agents too; unknown ids are fine. What no other path needs goes on `tidy`."""
        ...

    async def open_session(self, session_id: str) -> Tail:
        """The row and the tail. A session left `running` by a dead owner is repaired first, exactly once; where nothing
        can be written, the next claim does it."""
        ...

    async def tail(self, session_id: str) -> Tail:
        """The row and the tail, without repair."""
        ...

    def history(self, session_id: str) -> AsyncIterator[Sequence[Entry]]:
        """The whole path from its root, in batches of bounded size, oldest first; no read transaction stays open
        between batches."""
        ...

    async def entry(self, entry_id: int, *, session_id: str | None = None) -> Entry | None:
        """One entry; with `session_id`, only if it is on its path."""
        ...

    async def enqueue(self, session_id: str, parts: Sequence[Part], message_id: str) -> None:
        """Put a prompt into the inbox, under its message id."""
        ...

    async def queued(self, session_id: str) -> tuple[QueuedPrompt, ...]:
        """The prompts that wait, in order."""
        ...

    async def drop_prompt(self, session_id: str, message_id: str) -> None:
        """Take a prompt out of the inbox whose sender was told that it cannot run; unknown ones are fine."""
        ...

    async def take_turn(
        self,
        session_id: str,
        message_id: str | None,
        *,
        leaf: int | None,
        parts: Sequence[Part] | None = None,
        cut: int | None = None,
    ) -> TurnStart:
        """Claim the turn for this process and append the prompt as a user entry, in one transaction.

        `message_id` None claims it for a command: no user entry. Without its `parts` the prompt is taken out of the
        inbox. `cut` goes into the user entry. A session left `running` by a dead owner is repaired in the same
        transaction.

        :raises ~crow.domain.errors.SessionBusy: another living process owns it; nothing was written.
        """
        ...

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
        """Append a chain under `leaf` and make its last the new leaf; removes the draft; counts usage into the row. A
        user entry takes the prompt of its message id out of the inbox.

        `release` gives the turn back (state idle). May be empty together with `release`.

        :raises ~crow.domain.errors.LeafMoved: the leaf is another; nothing was written.
        """
        ...

    async def renew_lease(self, session_id: str) -> None:
        """A sign of life of the turn that this store runs: for others who cannot look up its process. Due within every
        minute in which nothing is appended; without effect if this store runs none."""
        ...

    def disown(self, session_id: str, *, leaf: int | None, turn: int, end: Sequence[NewEntry]) -> None:
        """The turn that this store runs in the session is over, but its `end`, which belongs under `leaf`, could not be
        stored: the next to open the session here, or to claim a turn, stores it first. Where that cannot be, the turn
        is repaired as if its owner had died. Never fails; writes nothing."""
        ...

    async def move_leaf(self, session_id: str, *, leaf: int | None, to: int | None, reason: str) -> None:
        """Stand the session on another entry of its conversation, recorded in `moves`.

        :raises ~crow.domain.errors.LeafMoved: the leaf is another; nothing was written.
        """
        ...

    async def count_messages(self, session_ids: Sequence[str]) -> Mapping[str, int]:
        """How many prompts and answers are on the path of each session; 0 for an unknown id."""
        ...

    async def moves(self, session_id: str) -> tuple[Move, ...]:
        """Where it was moved, newest first; the oldest of very many are left out."""
        ...

    async def outline(self, session_id: str) -> Outline:
        """All branches of the session."""
        ...

    async def left_behind(self, leaf: int | None, to: int | None, kinds: Collection[str]) -> tuple[Entry, ...]:
        """Entries of these kinds (as in the table `entries`) that are on the path of `leaf` and not on that of `to`,
        oldest first."""
        ...

    async def file_changes(self, leaf: int | None, to: int | None) -> tuple[Entry, ...]:
        """As `left_behind`: file entries, and the results of the calls that they belong to."""
        ...

    async def save_draft(
        self, session_id: str, *, after_leaf: int | None, turn: int, message_id: str, text: str, thought: str
    ) -> None:
        """Add a piece of the running stream."""
        ...

    async def search(
        self, query: str, *, session_id: str | None = None, scope: Scope | None = None, limit: int = 20
    ) -> tuple[Hit, ...]:
        """Full text over user and assistant text and titles; the query is quoted, any script. With `session_id`,
        only entries on its path."""
        ...

    async def scan(
        self, query: str, *, session_id: str, limit: int = 20, without: Collection[str] = frozenset()
    ) -> Scan:
        """What no index covers, on the session's path: calls, their results, summaries and crow's own words, but not
        the calls and results of the tools named in `without`. Bounded: the newest few megabytes."""
        ...

    async def learned(self, base_url: str, model: str) -> Mapping[str, object]:
        """Facts about an endpoint; empty if none. Those that other processes learned: as of the last transaction."""
        ...

    async def learn(self, base_url: str, model: str, facts: Mapping[str, object]) -> None:
        """Merge facts about an endpoint (top-level keys replace)."""
        ...

    async def tidy(self) -> None:
        """On idle: remove what deleted sessions left, in small batches; checkpoint the WAL."""
        ...

    def hurry(self) -> None:
        """The process is about to end: from now on a write waits for other programs no longer than a moment, then
        fails as one that waited too long. Never fails."""
        ...

    async def close(self) -> None:
        """Close connections. Bounded; safe to call twice."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """A change of a session's leaf. `reason` is `undo`, `redo`, `rewind`, `retry`, `new` or `refusal`."""

    from_leaf: int | None
    to_leaf: int | None
    reason: str
    created_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BranchPoint:
    """A place in a conversation that the user can go back to.

    `entry` is the leaf just after it, `before` the leaf just before it (None: the beginning). `previous` is the point
    before it on the path. `text` is the label, or the beginning of the prompt.
    """

    entry: int
    before: int | None
    previous: int | None
    kind: Literal["prompt", "label", "checkpoint"]
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class BranchTip:
    """The end of a branch; `point` is the last one on it."""

    entry: int | None
    point: int | None
    is_current: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Outline:
    """All branches that a session has ever been on.

    `points` are ordered by id. `tips` begin with the current branch; the others follow, last left first. Branches with
    the same messages have one tip.
    """

    points: tuple[BranchPoint, ...]
    tips: tuple[BranchTip, ...]
