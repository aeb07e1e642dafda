"""The interface of the store, as the agent and the frontend use it.

A session is one mutable row. The row points to the session's leaf, an entry in a log. Entries are added to the log and
never change. Each method is one transaction. A caller of `append` names the leaf that it expects. If the session has a
different leaf, `append` fails. So two writers cannot mix their entries.

A `Store` has five facets, so that a function can ask for the one that it needs, and a test can build only that.

Every method may raise :class:`~crow.domain.errors.StoreUnavailable`. A method that takes the id of a session raises
:class:`~crow.domain.errors.NoSuchSession` if the session does not exist, unless the description of the method says
otherwise. If a caller is cancelled, the method's changes are written completely or not at all.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from typing import Protocol

from crow.domain.entries import CallRef, Entry, NewEntry, PromptName
from crow.domain.messages import JsonObject, Part
from crow.store.values import (
    GROUPS,
    NODE_KEY,
    Access,
    BranchPoint,
    BranchTip,
    Directory,
    Group,
    Hit,
    Move,
    NamedPrompt,
    NewSession,
    Outline,
    QueuedPrompt,
    ScanResult,
    Scope,
    SessionChanges,
    SessionPage,
    SessionRow,
    SessionSetup,
    Share,
    ShareAccess,
    Tail,
    Token,
    TurnStart,
    UsageTotal,
    hits_by_session,
    node_of,
)

__all__ = [
    "GROUPS",
    "NODE_KEY",
    "Access",
    "AccessStore",
    "BranchPoint",
    "BranchStore",
    "BranchTip",
    "ClaimStore",
    "Directory",
    "Group",
    "Hit",
    "LogStore",
    "Move",
    "NamedPrompt",
    "NewSession",
    "Outline",
    "QueuedPrompt",
    "RowStore",
    "ScanResult",
    "Scope",
    "SearchStore",
    "SessionChanges",
    "SessionPage",
    "SessionRow",
    "SessionSetup",
    "SessionStore",
    "Share",
    "ShareAccess",
    "Store",
    "Tail",
    "Token",
    "TurnStart",
    "TurnStore",
    "UsageTotal",
    "hits_by_session",
    "node_of",
]


class RowStore(Protocol):
    """The row of a session that exists."""

    async def session(self, session_id: str) -> SessionRow:
        """Return the session's current row."""

    async def update_session(self, session_id: str, changes: SessionChanges) -> SessionRow:
        """Change columns of the row.

        :raises ~crow.domain.errors.ArgumentError: the alias belongs to another session.
        """

    async def merge_metadata(self, session_id: str, patch: JsonObject) -> SessionRow:
        """Merge `patch` into the session's metadata, as `crow.store.codec.merged_metadata` does, in one transaction.

        :raises ~crow.domain.errors.ArgumentError: the result is too large or too deep; nothing was changed.
        """


class SessionStore(RowStore, Protocol):
    """The rows of all sessions."""

    async def create_session(self, new: NewSession) -> SessionRow:
        """Insert a session. If the session is not a fork, also insert a conversation for it.

        :raises ~crow.domain.errors.ArgumentError: the id or the alias is taken, the id has a NUL or a lone surrogate,
            or the leaf is not in the conversation.
        :raises ~crow.domain.errors.NoSuchSession: the parent of a subagent does not exist, or was deleted.
        """

    async def fork_session(
        self,
        session_id: str,
        new_id: str,
        *,
        entry: int | None,
        cwd: str,
        additional_directories: tuple[str, ...],
        metadata: JsonObject | None = None,
        principal: str | None = None,
    ) -> SessionRow:
        """Insert a session that points to `entry`, or to the original session's leaf if `entry` is None.

        No entries are copied. The fork gets the original session's model, mode, configuration and metadata, but not its
        permissions and shares. `metadata` is merged into the fork's metadata. The fork's title is "... (fork N)". The
        fork belongs to `principal`. If `principal` is None, it belongs to the original session's principal.

        :raises ~crow.domain.errors.ArgumentError: the id is taken, or the entry is not in the conversation.
        """

    async def sessions(
        self,
        *,
        cwd: str | None = None,
        cursor: str | None = None,
        limit: int = 50,
        archived: bool | None = False,
        seen_by: str | None = None,
    ) -> SessionPage:
        """Return the sessions that have a prompt, except subagents. The session with the newest entry comes first. If
        `archived` is true, return only archived sessions. If it is false, leave archived sessions out. If it is None,
        return both kinds. With `seen_by`, return only the sessions that this principal owns or that are shared with it.

        :raises ~crow.domain.errors.ArgumentError: the cursor does not come from an earlier page, or the limit is below
            1.
        """

    async def session_by_alias(self, alias: str, *, principal: str | None = None) -> SessionRow | None:
        """Return the session of this principal with this alias, or None. Each principal has its own aliases."""

    async def move_alias(self, session_id: str, to: str) -> None:
        """Take the alias from the session `session_id`, and give it to the session `to`.

        :raises ~crow.domain.errors.ArgumentError: the session has no alias.
        """

    async def subagents(self, session_id: str) -> tuple[SessionRow, ...]:
        """Return the subagents of a session, oldest first, including archived ones. The result is empty if the session
        does not exist."""

    async def directories(self, *, limit: int = 200, seen_by: str | None = None) -> tuple[Directory, ...]:
        """Return the directories of the sessions that `sessions` lists, the most recently used first. For `seen_by`,
        see `sessions`."""

    async def is_known_directory(self, paths: Sequence[str], *, principal: str | None = None) -> bool:
        """Return whether at least one of these directories is the working directory of a session with a prompt.
        Imported conversations do not count. With `principal`, only sessions of this principal count."""

    async def delete_session(self, session_id: str) -> None:
        """Hide the session and its subagents. `tidy` removes their data later. An unknown id is ignored."""


class LogStore(Protocol):
    """Reads and extends the path of a session, and moves the session to another path."""

    async def open_session(self, session_id: str) -> Tail:
        """Return the session's row and the end of its path. If a process died and left a running turn or queued prompts
        in the session, first append the entries that close them (see `TurnStore.unstored_end`). This happens only once.
        If these entries cannot be written, the next `take_turn` appends them."""

    async def tail(self, session_id: str) -> Tail:
        """Return the session's row and the end of its path. Unlike `open_session`, this writes nothing."""

    def history(
        self, session_id: str, *, result_bytes: Callable[[int], int | None] | None = None
    ) -> AsyncIterator[Sequence[Entry]]:
        """Return the whole path, oldest first, in batches of bounded size. No read transaction stays open between
        batches.

        `result_bytes` is called once, with the number of entries. If it returns a number, this is roughly the maximum
        size of a tool result's text in bytes. A longer text is returned as an excerpt (see
        `crow.domain.rendering.excerpt`).
        """

    async def entry(self, entry_id: int, *, session_id: str | None = None) -> Entry | None:
        """Return the entry, or None if it does not exist. With `session_id`, also return None if it is not on that
        session's path."""

    async def result(self, session_id: str, call: CallRef) -> Entry | None:
        """Return the whole result of a call, from any branch of the session's conversation, or None if the call has no
        result."""

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
        """Append a chain of entries under `leaf`. The last of them becomes the leaf.

        The usage of the entries is added to the session's row. Storing an answer removes the draft of this answer.
        Storing a user entry or a `Custom` entry removes the item with the same message id from the inbox. With
        `release`, the turn ends, and the session's state becomes idle. In this case `entries` may be empty.

        :raises ~crow.domain.errors.LeafMoved: the session has another leaf; nothing was written.
        """

    async def save_draft(
        self, session_id: str, *, after_leaf: int | None, turn: int, message_id: str, text: str, thought: str
    ) -> None:
        """Append a piece of the streamed answer to the session's draft. This also renews the lease.

        :raises ~crow.domain.errors.LeafMoved: this store does not run the session's turn, or no longer does; nothing
            was written.
        """

    async def move_leaf(self, session_id: str, *, leaf: int | None, to: int | None, reason: str) -> None:
        """Move the session to another entry of its conversation, and record the move in `moves`.

        :raises ~crow.domain.errors.LeafMoved: the session has another leaf; nothing was written.
        :raises ~crow.domain.errors.ArgumentError: the entry is not in the conversation.
        """


class ClaimStore(Protocol):
    """Claims the turns of sessions: only the store that has claimed a session's turn may run it."""

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
        """Claim the turn for this store and append the prompt as a user entry, in one transaction.

        For a slash command, `message_id` is None and no user entry is appended. Without `parts`, the parts and the name
        of the prompt are taken from the inbox. `cut` (see `User`) is stored in the user entry. If a dead owner left a
        turn running, the same transaction repairs that turn. If a slash command has a name, `command_id` is the message
        id of the command.

        :raises ~crow.domain.errors.RepeatedPrompt: the session has this prompt already, under this name; nothing was
            written.
        :raises ~crow.domain.errors.ArgumentError: a prompt with other content has this name; nothing was written.
        :raises ~crow.domain.errors.SessionBusy: another living process runs a turn; nothing was written.
        """

    def disown(self, session_id: str, *, leaf: int | None, turn: int, end: Sequence[NewEntry]) -> None:
        """Give up a turn of this store after its last entries (`end`) could not be stored under `leaf`.

        The next `open_session` or `take_turn` of this store first tries again to store `end`. If `end` cannot be
        stored, the turn is repaired as if its owner had died. This method writes nothing and never fails.
        """

    async def drop_prompt(self, session_id: str, message_id: str, *, is_cancelled: bool = False) -> None:
        """Remove a prompt from the inbox. Call this after the sender was told that the prompt cannot run. An unknown
        message id is ignored. The name of the prompt is removed too, so that the prompt can be sent again. With
        `is_cancelled`, the name stays, and a repeat is cancelled too."""


class TurnStore(ClaimStore, Protocol):
    """The claims of turns, and the prompts that wait for a turn in a session's inbox."""

    async def enqueue(
        self, session_id: str, parts: Sequence[Part], message_id: str, *, name: PromptName | None = None
    ) -> None:
        """Put a prompt into the inbox under its message id.

        A message id that begins with `crow.domain.subagents.WAKE` marks a text that is not a prompt. Such a text stays
        in the inbox until an entry with the same message id is stored.

        :raises ~crow.domain.errors.RepeatedPrompt: the session has this prompt already, under this name; nothing was
            written.
        :raises ~crow.domain.errors.ArgumentError: a prompt with other content has this name; nothing was written.
        """

    async def named_prompt(self, session_id: str, name: PromptName) -> NamedPrompt | None:
        """Return the prompt of this session that has this name, or None. Prompts on all branches count, but not those
        of the session from which this session was forked.

        :raises ~crow.domain.errors.ArgumentError: a prompt with other content has this name.
        """

    async def replace_queued(self, session_id: str, parts: Sequence[Part], message_id: str) -> None:
        """Change the parts of a prompt in the inbox. An unknown message id is ignored."""

    async def queued(self, session_id: str) -> tuple[QueuedPrompt, ...]:
        """Return the prompts in the inbox, in order."""

    async def unstored_end(self, session_id: str) -> tuple[Entry, ...]:
        """Return the entries that `LogStore.open_session` would append to repair the session: the saved part of an
        answer, the end of the turn, and prompts that never ran. Return nothing if no repair is needed. This writes
        nothing. When the entries are stored, they get other ids."""

    async def cancel_turn(self, session_id: str) -> bool:
        """If another store runs a turn of this session, ask that store to cancel the turn. Return false if no other
        store runs a turn of this session, or if stores on this database cannot notify each other."""

    async def renew_lease(self, session_id: str) -> None:
        """Renew the lease, so that other hosts see that this store still runs the session's turn. Call this at least
        once a minute while nothing is appended. This has no effect if this store does not run a turn of the session."""


class BranchStore(RowStore, LogStore, ClaimStore, Protocol):
    """The methods that `crow.agent.history.branch.Branch` needs."""


class SearchStore(Protocol):
    """Searches and counts many entries: words, branches, usage."""

    async def search(
        self,
        query: str,
        *,
        session_id: str | None = None,
        scope: Scope | None = None,
        limit: int = 20,
        seen_by: str | None = None,
    ) -> tuple[Hit, ...]:
        """Search titles, prompts and answers with the full-text index, in any script. All words must match. With
        `session_id`, search only that session's title and path. Without words, find all prompts and answers in the
        period that `scope` sets. If `scope` sets no period either, find nothing. With `seen_by`, search only sessions
        that this principal owns or that are shared with it."""

    async def scan(
        self,
        query: str,
        *,
        session_id: str,
        scope: Scope | None = None,
        limit: int = 20,
        without: Collection[str] = frozenset(),
    ) -> ScanResult:
        """Search the texts on the session's path that are not in the full-text index: calls, results, summaries,
        reminders.

        Calls and results of the tools named in `without` are skipped. Entries outside the period that `scope` sets are
        skipped too. At most the newest few megabytes are read.
        """

    async def outline(self, session_id: str) -> Outline:
        """Return the prompts, labels and checkpoints of all branches of the session, and where the branches end."""

    async def moves(self, session_id: str) -> tuple[Move, ...]:
        """Return the session's moves, newest first, but not more than ten thousand."""

    async def entries_beyond(self, leaf: int | None, to: int | None, kinds: Collection[str]) -> tuple[Entry, ...]:
        """Return the entries of these kinds that are on the path to `leaf` but not on the path to `to`, oldest first.
        Kinds are named as in the table `entries`."""

    async def file_changes(self, leaf: int | None, to: int | None) -> tuple[Entry, ...]:
        """Return the file entries that are on the path to `leaf` but not on the path to `to`, together with the results
        of their calls, oldest first."""

    async def count_messages(self, session_ids: Sequence[str]) -> Mapping[str, int]:
        """Map each session id to the number of prompts and answers on the session's path. An unknown id is mapped to
        0."""

    async def compacted(self, session_ids: Sequence[str]) -> frozenset[str]:
        """Return the sessions among these whose path has a compaction that was not undone. In such a session, the model
        sees a summary of earlier entries, or no longer sees some outputs."""

    async def usage_by_model(self, session_id: str) -> tuple[UsageTotal, ...]:
        """Return one sum for each model that the session or its subagents used."""


class AccessStore(Protocol):
    """Says which principal may see which sessions, and stores shares and tokens."""

    async def access_of(self, session_id: str, principal: str) -> Access | None:
        """Return what a principal may do with a session. Return None if the principal may do nothing with the session,
        or if the session does not exist. In both cases the same statement runs, so a caller cannot tell the two cases
        apart by the time they take."""

    async def sees_entries(
        self, entries: Sequence[int], *, principal: str | None, session_id: str | None = None
    ) -> bool:
        """Return whether a principal may see all these entries. A principal that may read a session may see the entries
        that the session wrote, and the entries on the session's current and former paths. With `session_id`, only that
        session counts. If `principal` is None, every session may be read. Return false if an entry does not exist."""

    async def share_session(self, session_id: str, principal: str, access: ShareAccess | None) -> None:
        """Let a principal read a session and its subagents, or read and write them. If `access` is None, end the
        share.

        :raises ~crow.domain.errors.ArgumentError: the session is a subagent, or belongs to this principal.
        """

    async def shares(self, session_id: str) -> tuple[Share, ...]:
        """Return a session's shares, sorted by principal. The result is empty if the session does not exist."""

    async def add_token(self, token: Token) -> None:
        """Store a new token. :raises ~crow.domain.errors.ArgumentError: the token's id is taken."""

    async def token(self, token_id: str) -> Token | None:
        """Return the token with this id, even if it has expired or was revoked. Return None if no token has this id."""

    async def tokens(self) -> tuple[Token, ...]:
        """Return all tokens, oldest first."""

    async def note_token_use(self, token_id: str, used_ms: int) -> None:
        """Store when a token was used. An unknown id is ignored."""

    async def revoke_token(self, token_id: str) -> bool:
        """Revoke a token. Return false if no token has this id, or if the token was already revoked."""


class Store(SessionStore, LogStore, TurnStore, SearchStore, AccessStore, Protocol):
    """Durable sessions and their conversations: all facets, what is known about endpoints, and upkeep."""

    @property
    def warning(self) -> str:
        """A warning for the user about the database file. It is empty if all is well."""

    @property
    def notifies(self) -> bool:
        """Whether the processes that use the database notify each other of changes. If so, the store is also a
        `crow.store.watching.Watcher`, and watching takes almost no time while nothing changes."""

    async def learned(self, base_url: str, model: str) -> Mapping[str, object]:
        """Return the known facts about an endpoint, such as the size of its context window."""

    async def learn(self, base_url: str, model: str, facts: Mapping[str, object]) -> None:
        """Store facts about an endpoint. They replace stored facts of the same name."""

    async def tidy(self) -> None:
        """Remove the data of deleted sessions in small batches, and compact the database file. Call this when idle."""

    def hurry(self) -> None:
        """Prepare for the end of the process. After this call, a write waits only briefly for other programs. This
        method never fails."""

    async def close(self) -> None:
        """Close the connections within a few seconds. A second call has no effect."""
