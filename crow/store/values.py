"""Values that the methods of the store take and return."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias, TypedDict

from crow.domain.entries import Entry, TurnEnd
from crow.domain.messages import JsonObject, Part, Usage


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionSetup:
    """What a session should have when it is opened."""

    cwd: str
    """The working directory, an absolute path."""
    directories: tuple[str, ...]
    """The additional directories, as absolute paths."""
    model: str | None = None
    """The model to use. If it is None, a stored session keeps its model, and a new session gets the default model."""
    config: JsonObject = field(default_factory=dict)
    """Changes of the session's stored configuration. The value None removes a member."""
    metadata: JsonObject = field(default_factory=dict)
    """Changes of the session's stored metadata. The value None removes a member."""


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
    """For a subagent: the id of the session for which it works."""
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
    subagent, because a subagent always gets the principal and the shares of its parent."""


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
    """For a subagent: the id of the session for which it works."""
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
    files_changed: int = 0
    lines_added: int = 0
    lines_removed: int = 0
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
    """The part of the path, oldest first: the newest valid checkpoint, its `first_kept` and all later entries, and the
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
class Directory:
    """A working directory with sessions."""

    cwd: str
    sessions: int
    """The number of sessions in this directory that lists of sessions show."""
    updated_ms: int
    """When one of them was last changed, in Unix milliseconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BranchPoint:
    """An entry in the outline: a prompt, a checkpoint, or an entry that has a label."""

    entry: int
    """The id of its entry."""
    before: int | None
    """The id of the entry just before it on the path, or None if it is the first entry."""
    previous: int | None
    """The `entry` of the preceding prompt, label or checkpoint on the path."""
    kind: Literal["prompt", "label", "checkpoint"]
    text: str
    """The start of the prompt, or the labels, separated by commas."""
    labels: tuple[str, ...] = ()
    """The labels of the entry, oldest first. If several entries were given the same label, only the last of them still
    has it."""


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

    def points_of(self, tip: BranchTip) -> list[BranchPoint]:
        """Return the prompts, labels and checkpoints of a branch, oldest first."""
        by_entry = {point.entry: point for point in self.points}
        points: list[BranchPoint] = []
        at = tip.point
        while at is not None:
            points.append(by_entry[at])
            at = by_entry[at].previous
        return points[::-1]

    @property
    def prompts(self) -> list[BranchPoint]:
        """The prompts of the current branch, oldest first."""
        return [point for point in self.points_of(self.tips[0]) if point.kind == "prompt"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scope:
    """The limits of a search. None means no limit."""

    cwd: str | None = None
    """Only sessions in this directory are searched."""
    model: str | None = None
    """A part of a model's name. Case does not matter."""
    since_ms: int | None = None
    """Entries that are older than this time are left out, in Unix milliseconds."""
    before_ms: int | None = None
    """Only entries that are older than this time are searched, in Unix milliseconds."""


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
    """A sum of usage. The field for a key in `GROUPS` is None if the sums are not grouped by this key."""

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
