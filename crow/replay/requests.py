"""Builds each request of a session again with today's code, and compares it with what was sent.

The log has everything that a request is made of: system message, tools, prompts, answers, results, compactions. It also
has a digest of the bytes of each request that was sent. If today's bytes have the same digest, the request is proved to
be the same.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, TypeAlias

from crow.domain import rendering
from crow.domain.conversation import Context, Projection
from crow.domain.entries import (
    Assistant,
    Checkpoint,
    Custom,
    Entry,
    Reminder,
    Restore,
    Skill,
    ToolResult,
    User,
)
from crow.domain.messages import (
    AssistantMessage,
    Message,
    SentRequest,
    SystemMessage,
    Text,
    ToolMessage,
    UserMessage,
)
from crow.llm import THOUGHT_LEVELS, Request
from crow.llm.dialect import Dialect
from crow.llm.sent import digest_of, first_difference, read_dialect
from crow.llm.wires import AnyEncoder, wire_named
from crow.replay.log import is_request, sent_by
from crow.store import Store
from crow.store.branches import left_branches
from crow.version import __version__

_FRAME_BYTES = 16
"""In a request, at most this many bytes between two messages belong to neither of them. On the Messages API, for
example, the system message is a member of its own, and tool results share a message with the text after them. So if a
range begins this close before a message, it is taken to begin with that message."""

Outcome: TypeAlias = Literal["identical", "different", "unproven"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
    """The result for one request that was built again, or for one edit that was made again."""

    session: str
    entry: int
    """The id of the entry that holds the answer or the result."""
    turn: int
    outcome: Outcome
    """`unproven`: the log does not tell how the request was sent, or the edit cannot be made again."""
    tool: str = ""
    """The tool that made the edit. Empty for a request."""
    size: int = 0
    """The bytes of the request as built today."""
    version: str = ""
    """The version of crow that sent the request."""
    words: str = ""
    """Why it is not identical. Empty if it is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedRequest:
    """A request in the log, with the context that today's code builds from the entries before it."""

    entry: Entry
    """The answer, or the usage of a request without an answer."""
    context: Context
    projection: Projection
    """Has the entries of the context. It changes when the next request is read, so it must be used before that."""

    @property
    def sent(self) -> SentRequest | None:
        """How it was sent, if the log tells."""
        return sent_by(self.entry)


async def logged_requests(store: Store, session_id: str) -> AsyncIterator[LoggedRequest]:
    """Yield the requests of a session and of all its branches, but not those of its subagents. The current branch comes
    first."""
    known: set[int] = set()
    async for path in paths(store, session_id):
        async for each in _requests_on(path, known):
            yield each


async def paths(store: Store, session_id: str) -> AsyncIterator[Callable[[], AsyncIterator[Entry]]]:
    """Yield functions that read the paths of a session: first that of the current branch, then the others."""
    yield partial(_path, store, session_id)
    async for left in left_branches(store, session_id):
        yield partial(_path, store, session_id, left)


async def _path(store: Store, session_id: str, left: Sequence[Entry] = ()) -> AsyncIterator[Entry]:
    """Yield the entries of the session's path. If `left`, the entries of another branch, is given, yield the entries
    before that branch, and then `left`."""
    async for batch in store.history(session_id):
        for entry in batch:
            if not left or entry.id <= (left[0].parent or 0):
                yield entry
    for entry in left:
        yield entry


async def _requests_on(path: Callable[[], AsyncIterator[Entry]], known: set[int]) -> AsyncIterator[LoggedRequest]:
    """Yield the requests on a path whose entry ids are not in `known`, and add these ids to `known`."""
    projection = Projection()
    async for entry in path():
        if is_request(entry) and entry.id not in known:
            known.add(entry.id)
            yield LoggedRequest(entry=entry, context=projection.context(), projection=projection)
        if isinstance(entry.body, Restore):  # the entries that a compaction had replaced are in the context again
            projection = Projection([each async for each in path() if each.id <= entry.id])
        else:
            projection.add(entry)


class Rebuilder:
    """Builds requests again.

    `extras` has the settings `extra_body` of the user's endpoints, by their digests. With `is_from_file`, the log was
    imported from a file. The import gave the entries new ids, which are part of requests, so only the digests in a case
    file fit them.
    """

    def __init__(self, extras: Mapping[str, Mapping[str, object]] | None = None, *, is_from_file: bool = False) -> None:
        self.is_from_file = is_from_file
        self._extras = extras or {}
        self._encoders: dict[tuple[str, str], AnyEncoder] = {}

    def replay(self, logged: LoggedRequest) -> Replayed:
        """Build a request again and compare it."""
        entry, sent = logged.entry, logged.sent
        outcome, words, body = self._compared(logged)
        return Replayed(
            session=entry.session,
            entry=entry.id,
            turn=entry.turn,
            outcome=outcome,
            size=len(body),
            version=sent.version if sent else "",
            words=words,
        )

    def _compared(self, logged: LoggedRequest) -> tuple[Outcome, str, bytes]:
        sent = logged.sent
        if sent is None:
            return "unproven", _why_unknown(logged), b""
        dialect = read_dialect(sent.dialect)
        if dialect is None:
            return "unproven", f"crow {sent.version} wrote it in a form that this version does not know", b""
        body = self.body(logged, sent, dialect)
        if body is None:
            return "unproven", "its extra_body is no longer in the settings", b""
        if self.is_from_file and not sent.is_case:
            return "unproven", "the file is no case, so the ids in it are not those that were sent", body
        if not sent.digest:
            return "unproven", "it already differed when the case was written", body
        if digest_of(body) == sent.digest:
            return "identical", "", body
        return "different", self._difference(logged, sent, dialect, body), body

    def body(self, logged: LoggedRequest, sent: SentRequest, dialect: Dialect) -> bytes | None:
        """Return the bytes of a request as today's code writes them. Return None if it was sent with an `extra_body`
        that is no longer in the settings."""
        extra = self._extras.get(sent.extra) if sent.extra else {}
        if extra is None:
            return None
        key = (logged.entry.session, f"{dialect.wire} {sent.endpoint}")
        encoder = self._encoders.setdefault(key, wire_named(dialect.wire).encoder())
        return encoder.body(
            request_of(logged, sent),
            model=sent.endpoint.partition(" ")[2],
            endpoint=sent.endpoint,
            dialect=dialect,
            limit=sent.limit,
            extra=extra,
        )

    def _difference(self, logged: LoggedRequest, sent: SentRequest, dialect: Dialect, body: bytes) -> str:
        """Say where a request first differs, and which rule wrote that part."""
        where = _located(logged, sent, dialect, body, first_difference(sent, body))
        size = f"{len(body):,} bytes today, {sent.size:,} then" if len(body) != sent.size else f"{sent.size:,} bytes"
        by = f"crow {sent.version}" if sent.version != __version__ else "this version of crow"
        return f"{where} ({size}; sent by {by})"


def request_of(logged: LoggedRequest, sent: SentRequest | None) -> Request:
    """Return the request that the context gives. Its output limit and thought level are those of `sent`."""
    level = next((level for level in THOUGHT_LEVELS if sent is not None and level == sent.thought_level), None)
    return Request(
        messages=logged.context.messages,
        tools=logged.context.tools,
        max_output_tokens=sent.limit if sent else None,
        cache_key=logged.entry.session,
        thought_level=level,
    )


def _why_unknown(logged: LoggedRequest) -> str:
    prompt = logged.projection.prompt
    if prompt is None or not prompt.recorded_here:  # crow stores a prompt entry before its first request
        return "it was imported, or a program stored it, so the log does not tell how the request was sent"
    body = logged.entry.body
    if isinstance(body, Assistant) and body.finish == "interrupted":
        return "crow was stopped before it could store how the request was sent"
    return "the log does not tell how it was sent: an older version or the built-in model answered"


def _located(
    logged: LoggedRequest, sent: SentRequest, dialect: Dialect, body: bytes, part: tuple[int, int, bool]
) -> str:
    """Say in which messages the first difference is.

    `part` is the result of :func:`crow.llm.sent.first_difference`: a range of positions, and whether it lies in one
    message. The range begins at the same position in today's `body` and in the request that was sent, since the bytes
    before are the same. It ends at a position in the request that was sent, so the messages found in today's `body` for
    that end are an estimate.
    """
    messages, encoder = logged.context.messages, wire_named(dialect.wire).encoder()
    pieces = encoder.messages(messages, endpoint=sent.endpoint, dialect=dialect)
    start_at, end_at, is_one = part
    # Look for the first message without its last byte, as a cache mark may be before that byte. If the mark has turned
    # the text of the system message into a list, look for the list of messages instead.
    first_piece = body.find(pieces[0][:-1]) if pieces else -1
    if first_piece < 0 and (at := body.find(f'"{encoder.member}":['.encode())) >= 0:
        first_piece = body.index(b"[", at) + 1
    if first_piece < 0:
        return f"it differs between byte {start_at:,} and byte {end_at:,}"
    if end_at <= first_piece:
        return "the model, the options or the tools differ; they come before the messages"

    def start(count: int) -> int:
        """Return where the message with this index begins."""
        before = pieces[:count]
        if len(pieces) != len(messages) and count:  # the wire joins messages or adds some, so encode only these
            before = encoder.messages(messages[:count], endpoint=sent.endpoint, dialect=dialect)
        return first_piece + sum(len(piece) + 1 for piece in before)

    def index_at(position: int) -> int:
        return max(0, bisect_right(range(len(messages)), position, key=start) - 1)

    first = index_at(start_at + _FRAME_BYTES)
    last = first if is_one else max(first, index_at(end_at - 1))
    if start_at + _FRAME_BYTES < first_piece:  # today, the members before the messages may have another length
        those = "the first message" if last == 0 else f"one of the first {last + 1} messages"
        return f"the model, the options, the tools or {those} of {len(messages)} differ"
    rule = _rule(logged, first)
    if first == last:
        return f"message {first + 1} of {len(messages)} differs: {rule}"
    return f"one of the messages {first + 1} to {last + 1} of {len(messages)} differs; the first is {rule}"


def _rule(logged: LoggedRequest, index: int) -> str:
    """Say what a message is, and which rule made it from which entry."""
    message, origin = logged.context.messages[index], logged.context.origins[index]
    entry = next((each for each in logged.projection.entries if each.id == origin), None)
    place = f"entry {origin}" if entry is not None else "the newest prompt entry"
    return f"{_rule_words(message, entry)} ({place})"


def _rule_words(message: Message, entry: Entry | None) -> str:
    body = entry.body if entry is not None else None
    match message, body:
        case SystemMessage(), _:
            return "the system message"
        case AssistantMessage(text=rendering.NO_ANSWER) | UserMessage(parts=(Text(text=rendering.NO_QUESTION),)), _:
            return "the fixed line between two messages of one role"
        case ToolMessage(text=text), ToolResult() if text != body.text and " elided; recall" in text:
            return f"the line for a hidden output of {body.name}"
        case ToolMessage(), ToolResult(cut=int()):
            return f"the shortened result of {body.name}"
        case ToolMessage(), ToolResult():
            return f"the result of {body.name}"
        case ToolMessage(), _:
            return "the line for a call without a result"
        case AssistantMessage(), Assistant(cut=int()):
            return "an answer whose calls were shortened"
        case AssistantMessage(), _:
            return "an answer, with those of its calls, thoughts and opaque members that are sent back"
        case UserMessage(), Checkpoint():
            return "the summary of a compaction"
        case UserMessage(), User(cut=int()):
            return "a shortened prompt"
        case UserMessage(), User():
            return "a prompt, with the text that crow joined to it"
        case UserMessage(), Reminder() | Skill() | Custom():
            return "text that crow added for the model"
        case _:
            return "a message that crow added"
