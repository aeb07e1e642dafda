"""The interface of the store, as the agent and the frontend use it.

A session is one mutable row. The row points to the session's leaf, an entry in a log. Entries are added to the log and
never change. Each method is one transaction. A caller of `append` names the leaf that it expects. If the session has a
different leaf, `append` fails. So two writers cannot mix their entries.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol, TypeAlias, TypedDict

from crow.domain.entries import CallRef, Entry, NewEntry, PromptName, TurnEnd
from crow.domain.messages import JsonObject, Part, Usage


@dataclass(frozen=True, slots=True, kw_only=True)
class NewSession:
    """A session to create."""

    id: str
    """The name by which clients know the session. It never changes."""
    cwd: str
    model: str
    mode: str
    additional_directories: tuple[str, ...] = ()
    config: JsonObject = field(default_factory=dict)
    metadata: JsonObject = field(default_factory=dict)
    parent_id: str | None = None
    """For a sub-agent: the id of the session for which it works."""
    forked_from: str | None = None
    """For a fork: the id of the original session."""
    conversation: int | None = None
    """The conversation that a fork continues. None for a session that is not a fork."""
    leaf: int | None = None
    """The last entry of a fork's path. None for a session that is not a fork."""
    title: str | None = None
    alias: str | None = None
    principal: str | None = None
    """The user of `crow serve` to whom the session will belong, or None for the local user. It is ignored for a
    sub-agent, because a sub-agent always gets the principal and the shares of its parent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionRow:
    """A session's mutable row. Times are Unix milliseconds."""

    id: str
    conversation: int
    leaf: int | None
    """The id of the last entry of the session's path, or None if the path is empty."""
    cwd: str
    model: str
    mode: str
    title: str | None = None
    title_by_user: bool = False
    """Whether the user chose the title."""
    additional_directories: tuple[str, ...] = ()
    permissions: tuple[JsonObject, ...] = ()
    config: JsonObject = field(default_factory=dict)
    metadata: JsonObject = field(default_factory=dict)
    calibration: float = 1.0
    """The factor by which token estimates are multiplied."""
    parent_id: str | None = None
    """For a sub-agent: the id of the session for which it works."""
    forked_from: str | None = None
    """For a fork: the id of the original session."""
    alias: str | None = None
    state: Literal["idle", "running"] = "idle"
    owner: str = ""
    """The process that runs a turn, or empty if no turn runs."""
    entries: int = 0
    tokens_in: int = 0
    tokens_out: int = 0
    tokens_cached: int = 0
    cost: float = 0.0
    """In US dollars."""
    newest_entry: int = 0
    """The id of the session's newest entry. Lists of sessions are sorted by it."""
    has_prompt: bool = False
    """Only sessions with a prompt are listed."""
    created_ms: int = 0
    updated_ms: int = 0
    archived: bool = False
    principal: str | None = None
    """The user of `crow serve` to whom the session belongs, or None for the local user."""


NODE_KEY = "node"
"""The key in a session's configuration whose value is the name of the machine that last ran the session."""


def node_of(row: SessionRow) -> str:
    """Return the name of the machine that last ran the session. The name is empty if the machine is unknown or if the
    store is a file."""
    name = row.config.get(NODE_KEY)
    return name if isinstance(name, str) else ""


class SessionChanges(TypedDict, total=False):
    """Columns to set in a session's row. Columns that are left out stay as they are."""

    title: str | None
    title_by_user: bool
    model: str
    mode: str
    cwd: str
    additional_directories: tuple[str, ...]
    permissions: tuple[JsonObject, ...]
    config: JsonObject
    """Only those keys of the session's configuration that change. A key whose value is None is removed."""
    metadata: JsonObject
    calibration: float
    alias: str | None
    archived: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionPage:
    """One page of the list of sessions."""

    rows: tuple[SessionRow, ...]
    """Newest first."""
    cursor: str | None
    """Requests the next page. On the last page, it is None."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QueuedPrompt:
    """A prompt that waits in a session's inbox until it runs."""

    parts: tuple[Part, ...]
    message_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedPrompt:
    """A stored prompt to which a client has given a name, and the outcome of its turn."""

    message_id: str
    turn: int | None = None
    """The number of its turn. None while the prompt is in the inbox, and if it was cancelled there."""
    end: TurnEnd | None = None
    """None if the turn has not ended. A prompt that was cancelled in the inbox has the end `cancelled`."""
    end_entry: int | None = None
    """The id of the entry that holds `end`."""
    usage: Usage | None = None
    """The usage of the turn, if the turn has ended and its requests used something."""
    is_own: bool = False
    """Whether this store has put the prompt into the inbox, and the prompt is still there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tail:
    """A session and the part of its path that `crow.domain.conversation.for_model` needs."""

    row: SessionRow
    entries: tuple[Entry, ...]
    """The part of the path, oldest first: the newest valid checkpoint, all entries from its `first_kept` on, and the
    newest prompt entry. Without a checkpoint, it is the whole path. If the part is longer than any model can see, only
    its end is here. Then the first entry is a checkpoint that is not stored and whose `method` is "unread"."""
    waiting: tuple[QueuedPrompt, ...] = ()
    """The texts in the inbox that tell the model about background work that has ended. Only `open_session` sets this
    field."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnStart:
    """A claimed turn."""

    turn: int
    """The number of the turn in its session."""
    entries: tuple[Entry, ...]
    """The entries that the claim appended. If one of them is a user entry, it is the last one."""
    moved: bool
    """Whether the session's leaf was not the expected one. If so, the caller must load the tail again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """A move of a session to another leaf."""

    from_leaf: int | None
    to_leaf: int | None
    reason: str
    """`undo`, `redo`, `rewind`, `retry`, `new` or `refusal`."""
    created_ms: int
    """When the session was moved, in Unix milliseconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BranchPoint:
    """A prompt, label or checkpoint in the outline."""

    entry: int
    """The id of its entry."""
    before: int | None
    """The id of the entry just before it on the path, or None if it is the first entry."""
    previous: int | None
    """The `entry` of the preceding prompt, label or checkpoint on the path."""
    kind: Literal["prompt", "label", "checkpoint"]
    text: str
    """The label, or the start of the prompt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BranchTip:
    """The end of a branch."""

    entry: int | None
    """The id of the branch's last entry, or None if the branch is empty."""
    point: int | None
    """The `entry` of the last prompt, label or checkpoint on the branch."""
    is_current: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Outline:
    """All branches that a session has ever been on."""

    points: tuple[BranchPoint, ...]
    """Sorted by id."""
    tips: tuple[BranchTip, ...]
    """The end of the current branch first, then the ends of the other branches, starting with the branch that the
    session left most recently. If several ends have the same newest message on their paths, only the first of these
    ends is listed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scope:
    """The limits of a search. None means no limit."""

    cwd: str | None = None
    """The directory of a session."""
    model: str | None = None
    """A part of a model's name. Case does not matter."""
    since_ms: int | None = None
    """The search covers entries from this time on, in Unix milliseconds."""
    before_ms: int | None = None
    """The search covers entries before this time, in Unix milliseconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hit:
    """An entry that a search found."""

    entry: int
    session: str
    """The id of a session."""
    kind: str
    snippet: str
    """The part of the entry's text around the match."""
    created_ms: int
    """Unix milliseconds."""


def hits_by_session(hits: Sequence[Hit]) -> Mapping[str, Sequence[Hit]]:
    """Group hits by session. The sessions are in the order of their first hits."""
    groups: dict[str, list[Hit]] = {}
    for hit in hits:
        groups.setdefault(hit.session, []).append(hit)
    return groups


@dataclass(frozen=True, slots=True, kw_only=True)
class ScanResult:
    """The result of a scan of a session's path."""

    hits: tuple[Hit, ...]
    """Newest first."""
    stopped_at: int | None
    """The scan read no entries older than this one. None means that it read the whole path."""


Group: TypeAlias = Literal["session", "model", "day"]
"""A key by which usage can be grouped."""

GROUPS: tuple[Group, ...] = ("session", "model", "day")


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageTotal:
    """A sum of usage. The fields by which the sums are not grouped are None."""

    session: str | None = None
    """The id of a session. It is empty for entries of a deleted session that its forks still contain."""
    title: str | None = None
    model: str | None = None
    day: str | None = None
    """For example `2026-11-20`."""
    requests: int
    tokens_in: int
    """Includes `tokens_cached` and `tokens_cache_written`."""
    tokens_out: int
    """Includes `tokens_reasoning`."""
    tokens_cached: int
    """The tokens that were read from the provider's cache."""
    tokens_reasoning: int = 0
    tokens_cache_written: int = 0
    """The tokens that were written to the provider's cache."""
    estimated: int = 0
    """The number of requests whose tokens crow estimated, because the endpoint did not report them."""
    cost: float | None
    """In US dollars, or None if no price was known."""


ShareAccess: TypeAlias = Literal["read", "write"]

Access: TypeAlias = Literal["own", "write", "read"]
"""What a principal may do with a session."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """The right of a principal to read a session of another principal, or to read and write it."""

    session: str
    """The id of the session."""
    principal: str
    """The principal that has the right."""
    access: ShareAccess
    created_ms: int = 0
    """Unix milliseconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Token:
    """A token for `crow serve`. Times are Unix milliseconds."""

    id: str
    principal: str
    hash: str
    """The sha256 (hex) of the token's secret."""
    label: str = ""
    created_ms: int = 0
    expires_ms: int | None = None
    used_ms: int | None = None
    revoked_ms: int | None = None


class Store(Protocol):
    """Durable sessions and their conversations.

    Every method may raise :class:`~crow.domain.errors.StoreUnavailable`. A method that takes the id of a session raises
    :class:`~crow.domain.errors.NoSuchSession` if the session does not exist, unless the description of the method says
    otherwise. If a caller is cancelled, the method's changes are written completely or not at all.
    """

    @property
    def warning(self) -> str:
        """A warning for the user about the database file. It is empty if all is well."""

    @property
    def notifies(self) -> bool:
        """Whether the processes that use the database notify each other of changes. If so, the store is also a
        `crow.store.watching.Watcher`, and watching takes almost no time while nothing changes."""

    async def create_session(self, new: NewSession) -> SessionRow:
        """Insert a session. If the session is not a fork, also insert a conversation for it.

        :raises ~crow.domain.errors.ArgumentError: the id or the alias is taken, or the leaf is not in the conversation.
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

    async def session_by_alias(self, alias: str, *, principal: str | None = None) -> SessionRow | None:
        """Return the session of this principal with this alias, or None. Each principal has its own aliases."""

    async def move_alias(self, session_id: str, to: str) -> None:
        """Take the alias from the session `session_id`, and give it to the session `to`.

        :raises ~crow.domain.errors.ArgumentError: the session has no alias.
        """

    async def session(self, session_id: str) -> SessionRow:
        """Return the session's current row."""

    async def sessions(
        self,
        *,
        cwd: str | None = None,
        cursor: str | None = None,
        limit: int = 50,
        archived: bool | None = False,
        seen_by: str | None = None,
    ) -> SessionPage:
        """Return the sessions that have a prompt, except sub-agents. The session with the newest entry comes first. If
        `archived` is true, return only archived sessions. If it is false, leave archived sessions out. If it is None,
        return both kinds. With `seen_by`, return only the sessions that this principal owns or that are shared with it.

        :raises ~crow.domain.errors.ArgumentError: the cursor does not come from an earlier page, or the limit is below
            1.
        """

    async def subagents(self, session_id: str) -> tuple[SessionRow, ...]:
        """Return the sub-agents of a session, oldest first, including archived ones. The result is empty if the session
        does not exist."""

    async def is_known_directory(self, paths: Sequence[str], *, principal: str | None = None) -> bool:
        """Return whether at least one of these directories is the working directory of a session with a prompt.
        Imported conversations do not count. With `principal`, only sessions of this principal count."""

    async def update_session(self, session_id: str, changes: SessionChanges) -> SessionRow:
        """Change columns of the row.

        :raises ~crow.domain.errors.ArgumentError: the alias belongs to another session.
        """

    async def merge_metadata(self, session_id: str, patch: JsonObject) -> SessionRow:
        """Merge `patch` into the session's metadata, as `crow.store.codec.merged_metadata` does, in one transaction.

        :raises ~crow.domain.errors.ArgumentError: the result is too large or too deep; nothing was changed.
        """

    async def delete_session(self, session_id: str) -> None:
        """Hide the session and its sub-agents. `tidy` removes their data later. An unknown id is ignored."""

    async def open_session(self, session_id: str) -> Tail:
        """Return the session's row and its tail. If a store died while it ran a turn of the session, repair this turn
        first. No turn is repaired twice. If the repair cannot be written, the next `take_turn` repairs the turn."""

    async def tail(self, session_id: str) -> Tail:
        """Return the session's row and its tail. Unlike `open_session`, this repairs nothing."""

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

    async def enqueue(
        self, session_id: str, parts: Sequence[Part], message_id: str, *, name: PromptName | None = None
    ) -> None:
        """Put a prompt into the inbox under its message id.

        A message id that begins with `crow.domain.subagents.WAKE` marks a text that is not a prompt. Such a text stays
        in the inbox until an entry with the same message id is stored.

        :raises ~crow.domain.errors.RepeatedPrompt: the session has a prompt with this name; nothing was written.
        :raises ~crow.domain.errors.ArgumentError: a prompt with other content has this name; nothing was written.
        """

    async def named_prompt(self, session_id: str, name: PromptName) -> NamedPrompt | None:
        """Return the prompt of this session that has this name, or None. Prompts on all branches count, but not those
        of the session from which this one was forked.

        :raises ~crow.domain.errors.ArgumentError: a prompt with other content has this name.
        """

    async def replace_queued(self, session_id: str, parts: Sequence[Part], message_id: str) -> None:
        """Change the parts of a prompt in the inbox. An unknown message id is ignored."""

    async def queued(self, session_id: str) -> tuple[QueuedPrompt, ...]:
        """Return the prompts in the inbox, in order."""

    async def drop_prompt(self, session_id: str, message_id: str, *, is_cancelled: bool = False) -> None:
        """Remove a prompt from the inbox. Call this after the sender was told that the prompt cannot run. An unknown
        message id is ignored. The name of the prompt is removed too, so that the prompt can be sent again. With
        `is_cancelled`, the name stays, and a repeat is cancelled too."""

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

        :raises ~crow.domain.errors.RepeatedPrompt: the session has a prompt with this name; nothing was written.
        :raises ~crow.domain.errors.ArgumentError: a prompt with other content has this name; nothing was written.
        :raises ~crow.domain.errors.SessionBusy: another living process runs a turn; nothing was written.
        """

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

    async def cancel_turn(self, session_id: str) -> bool:
        """If another store runs a turn of this session, ask that store to cancel the turn. Return false if no other
        store runs a turn of this session, or if stores on this database cannot notify each other."""

    async def renew_lease(self, session_id: str) -> None:
        """Renew the lease, so that other hosts see that this store still runs the session's turn. Call this at least
        once a minute while nothing is appended. This has no effect if this store does not run a turn of the session."""

    def disown(self, session_id: str, *, leaf: int | None, turn: int, end: Sequence[NewEntry]) -> None:
        """Give up a turn of this store after its last entries (`end`) could not be stored under `leaf`.

        The next `open_session` or `take_turn` of this store first tries again to store `end`. If `end` cannot be
        stored, the turn is repaired as if its owner had died. This method writes nothing and never fails.
        """

    async def move_leaf(self, session_id: str, *, leaf: int | None, to: int | None, reason: str) -> None:
        """Move the session to another entry of its conversation, and record the move in `moves`.

        :raises ~crow.domain.errors.LeafMoved: the session has another leaf; nothing was written.
        :raises ~crow.domain.errors.ArgumentError: the entry is not in the conversation.
        """

    async def count_messages(self, session_ids: Sequence[str]) -> Mapping[str, int]:
        """Map each session id to the number of prompts and answers on the session's path. An unknown id is mapped to
        0."""

    async def usage_by_model(self, session_id: str) -> tuple[UsageTotal, ...]:
        """Return one sum for each model that the session or its sub-agents used."""

    async def moves(self, session_id: str) -> tuple[Move, ...]:
        """Return the session's moves, newest first, but not more than ten thousand."""

    async def outline(self, session_id: str) -> Outline:
        """Return the prompts, labels and checkpoints of all branches of the session, and where the branches end."""

    async def left_behind(self, leaf: int | None, to: int | None, kinds: Collection[str]) -> tuple[Entry, ...]:
        """Return the entries of these kinds that are on the path to `leaf` but not on the path to `to`, oldest first.
        Kinds are named as in the table `entries`."""

    async def file_changes(self, leaf: int | None, to: int | None) -> tuple[Entry, ...]:
        """Return the file entries that are on the path to `leaf` but not on the path to `to`, together with the results
        of their calls, oldest first."""

    async def save_draft(
        self, session_id: str, *, after_leaf: int | None, turn: int, message_id: str, text: str, thought: str
    ) -> None:
        """Append a piece of the streamed answer to the session's draft. This also renews the lease."""

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

    async def learned(self, base_url: str, model: str) -> Mapping[str, object]:
        """Return the known facts about an endpoint. Facts that another process learned recently may be missing until
        this store's next write transaction."""

    async def learn(self, base_url: str, model: str, facts: Mapping[str, object]) -> None:
        """Store facts about an endpoint. They replace stored facts of the same name."""

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
        """Let a principal read a session and its sub-agents, or read and write them. If `access` is None, end the
        share.

        :raises ~crow.domain.errors.ArgumentError: the session is a sub-agent, or belongs to this principal.
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

    async def tidy(self) -> None:
        """Remove the data of deleted sessions in small batches, and compact the database file. Call this when idle."""

    def hurry(self) -> None:
        """Prepare for the end of the process. After this call, a write waits only briefly for other programs. This
        method never fails."""

    async def close(self) -> None:
        """Close the connections within a few seconds. A second call has no effect."""
