"""One stored session in the Python API."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Literal

import anyio.to_thread

from crow.domain.conversation import for_model
from crow.domain.entries import LABEL_CHARS, Checkpoint, Entry, Mask, NewEntry, Note, Restore, is_label
from crow.domain.errors import ArgumentError
from crow.domain.messages import Part
from crow.domain.text import describe
from crow.llm.chat.encode import ChatEncoder
from crow.llm.dialect import Dialect
from crow.sessions.openai import UserParts, read_message
from crow.sessions.turns import Turn, turn_of, turns_in
from crow.store import SessionChanges, SessionRow, Store
from crow.store.admin import Admin
from crow.store.codec import new_tag, tag_name, tags_of, tags_patch
from crow.store.portable import clean_title
from crow.store.transcript import Transcript

_PLAIN = Dialect(reasoning="none", opaque=False)
_COMPACTIONS = (Checkpoint, Mask, Restore)


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeNode:
    """A prompt, a label or a compaction in the tree of a session's branches."""

    entry: int
    """The id of its entry."""
    parent: int | None
    """The `entry` of the node before it, or None if it is the first one."""
    kind: Literal["prompt", "label", "compaction"]
    text: str
    """The label, or the start of the prompt."""
    labels: tuple[str, ...]
    """The labels of the entry, oldest first."""
    is_current: bool
    """Whether the session's current branch contains it."""
    is_leaf: bool
    """Whether it is the last node of the current branch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """A stored session. The attributes show the state at the time when this object was read. The methods read or change
    the current state. Methods that change the session need `Sessions.open(..., write=True)`.

    Times are in UTC. Tokens and cost include subagents.
    """

    id: str
    title: str | None
    alias: str | None
    workspace_path: str
    model: str
    mode: str
    message_count: int
    """The number of prompts and answers."""
    tokens_in: int
    tokens_out: int
    tokens_cached: int
    cost: float
    """In US dollars."""
    files_changed: int
    lines_added: int
    lines_removed: int
    is_compacted: bool
    """Whether the model no longer sees everything because of a compaction."""
    created_at: datetime
    updated_at: datetime
    archived: bool
    parent_id: str | None
    """If this is the session of a subagent: the id of the session for which the subagent works."""
    forked_from: str | None
    """If this session is a fork: the id of the original session."""
    leaf: int | None
    """The id of the last entry of the session's path, or None if the session is empty."""
    metadata: Mapping[str, Any]
    _admin: Admin = field(repr=False, compare=False)
    _store: Store = field(repr=False, compare=False)

    @property
    def tags(self) -> tuple[str, ...]:
        """The session's tags, in alphabetical order."""
        return tags_of(self.metadata)

    async def messages(self, *, last: int | None = None) -> list[dict[str, Any]]:
        """Return the whole conversation as messages of OpenAI's chat completions API. Compactions are ignored.

        The first message is the system message. Thoughts are left out. If a tool call has no result, the list contains
        a result that says so. With `last`, return only so many of the newest messages, without the system message. The
        first of them may be a tool result whose call is left out.

        :raises ~crow.domain.errors.NoSuchSession: the session was deleted.
        :raises ~crow.domain.errors.ArgumentError: `last` is below 1.
        """
        if last is None:
            return await _openai_messages([one async for one in self.entries() if not _is_compaction(one)])
        if last < 1:
            raise ArgumentError(f"last is {last}; expected 1 or more, or None for all messages.")
        # Usually the newest messages are in the tail. Reading the tail takes the same time however long the session is.
        tail = await self._store.tail(self.id)
        checkpoint = next((one for one in tail.entries if isinstance(one.body, Checkpoint)), None)
        kept = [one for one in tail.entries if not _is_compaction(one)]
        newest = (await _openai_messages(kept))[1:][-last:]
        if checkpoint is None or len(newest) == last:
            return newest
        return (await self.messages())[1:][-last:]

    async def context(self) -> list[dict[str, Any]]:
        """Return the messages that the model would get now. After a compaction, the summary replaces the messages that
        were compacted.

        :raises ~crow.domain.errors.NoSuchSession: the session was deleted.
        """
        return await _openai_messages((await self._store.tail(self.id)).entries)

    async def entries(self) -> AsyncIterator[Entry]:
        """Yield all entries on the session's path, oldest first. `crow.domain.entries` lists the kinds of `Entry.body`.

        :raises ~crow.domain.errors.NoSuchSession: the session was deleted.
        """
        async for batch in self._store.history(self.id):
            for entry in batch:
                yield entry

    async def tree(self) -> tuple[TreeNode, ...]:
        """Return the prompts, labels and summaries of all branches that the session has been on, oldest first.

        :raises ~crow.domain.errors.NoSuchSession: the session was deleted.
        """
        outline = await self._store.outline(self.id)
        parents = {point.entry: point.previous for point in outline.points}
        leaf = next((tip.point for tip in outline.tips if tip.is_current), None)
        current: set[int] = set()
        at = leaf
        while at is not None and at not in current:
            current.add(at)
            at = parents.get(at)
        return tuple(
            TreeNode(
                entry=point.entry,
                parent=point.previous,
                kind="compaction" if point.kind == "checkpoint" else point.kind,
                text=point.text,
                labels=point.labels,
                is_current=point.entry in current,
                is_leaf=point.entry == leaf,
            )
            for point in outline.points
        )

    async def subagents(self) -> tuple[Session, ...]:
        """Return the sessions of this session's subagents, oldest first, without their own subagents."""
        return await sessions_of(self._store, self._admin, await self._store.subagents(self.id))

    def export(self) -> AsyncIterator[bytes]:
        """Yield the parts of a file from which `crow sessions import` can import this session. The file contains all
        branches, subagents, images, and the earlier contents of changed files.

        :raises ~crow.domain.errors.StoreUnavailable: the session was deleted meanwhile.
        """
        return self._admin.export([self.id])

    async def markdown(self) -> AsyncIterator[str]:
        """Yield the parts of a Markdown transcript of the session, with thoughts, diffs and whole results.

        :raises ~crow.domain.errors.NoSuchSession: the session was deleted.
        """
        transcript = Transcript(is_full=True)
        yield transcript.head(await self._store.session(self.id))
        async for entry in self.entries():
            yield transcript.feed(entry)

    def turn(self, prompt: object = None) -> AbstractAsyncContextManager[Turn]:
        """Claim the session for the block, and begin a turn. The turn ends with the block. Until then, no other process
        can run a turn in the session. If this process dies, whoever opens the session next ends the turn.

        `prompt` is the text of a prompt, or a user message in OpenAI's form.

        :raises ~crow.domain.errors.ArgumentError: `prompt` is not a valid user message.
        :raises ~crow.domain.errors.SessionBusy: a living process runs a turn in the session; the error names it.
        :raises ~crow.domain.errors.NoSuchSession: the session was deleted.
        """
        parts: tuple[Part, ...] | None = None
        if prompt is not None:
            read = read_message({"role": "user", "content": prompt} if isinstance(prompt, str) else prompt, "prompt")
            if not isinstance(read, UserParts):
                raise ArgumentError("prompt has another role; expected a user message.")
            parts = read.parts
        return turn_of(self._store, self.id, parts)

    async def append(self, *messages: object) -> None:
        """Append whole turns in OpenAI's form. Each user message begins a turn, and system messages replace the
        session's system message. An answer may have the members `usage` (in OpenAI's form), `model` and `cost` (in US
        dollars). A tool result may have `is_error`.

        All messages are checked before the first one is stored. A cancelled call may have stored a part of them.

        :raises ~crow.domain.errors.ArgumentError: a message is not valid; nothing was stored.
        :raises ~crow.domain.errors.SessionBusy: a living process runs a turn in the session; the error names it.
        """
        for messages_of_turn in turns_in(messages):
            first, rest = messages_of_turn[0], messages_of_turn[1:]
            parts = first.parts if isinstance(first, UserParts) else None
            async with turn_of(self._store, self.id, parts) as turn:
                await turn.store(messages_of_turn if parts is None else rest)

    async def label(self, text: str, *, entry: int | None = None) -> int:
        """Label an entry of the session's conversation, on any branch, as `/label` does. Without `entry`, label the end
        of the current branch. Return the id of the entry that has the label.

        :raises ~crow.domain.errors.ArgumentError: the text cannot be a label, or the conversation has no such entry.
        :raises ~crow.domain.errors.SessionBusy: a living process runs a turn in the session; the error names it.
        """
        name = " ".join(text.split())
        if not is_label(name):
            raise ArgumentError(
                f"label is {describe(text)}; expected 1 to {LABEL_CHARS} visible characters that do not begin with #"
                " and are not a number."
            )
        tail = await self._store.open_session(self.id)
        named = None if entry is None else await self._store.entry(entry)
        if entry is not None and (named is None or named.conversation != tail.row.conversation):
            raise ArgumentError(f"entry is {entry}; expected the id of an entry in the conversation of {self.id}.")
        turn = tail.entries[-1].turn if tail.entries else 0
        note = NewEntry(body=Note(about="label", value=name, entry=entry))
        (stored,) = await self._store.append(self.id, leaf=tail.row.leaf, turn=turn, entries=[note])
        return stored.id if entry is None else entry

    async def set_title(self, title: str) -> Session:
        """Set the title, which is cleaned and shortened if need be. From now on, crow does not replace it with a title
        of its own.

        :raises ~crow.domain.errors.ArgumentError: the title has no visible characters.
        """
        cleaned = clean_title(title)
        if cleaned is None:
            raise ArgumentError(f"title is {describe(title)}; expected at least one visible character.")
        return await self._changed(SessionChanges(title=cleaned, title_by_user=True))

    async def tag(self, *tags: str) -> Session:
        """Add tags. :raises ~crow.domain.errors.ArgumentError: a text cannot be a tag."""
        row = await self._store.session(self.id)
        return await self.merge_metadata(tags_patch(row.metadata, add=[new_tag(one) for one in tags]))

    async def untag(self, *tags: str) -> Session:
        """Remove tags. Tags that the session does not have are ignored."""
        row = await self._store.session(self.id)
        return await self.merge_metadata(tags_patch(row.metadata, remove=[tag_name(one) for one in tags]))

    async def merge_metadata(self, patch: Mapping[str, Any]) -> Session:
        """Merge `patch` into the metadata (JSON Merge Patch, RFC 7396: None removes a member).

        :raises ~crow.domain.errors.ArgumentError: `patch` is not JSON, or the result is too large or too deep.
        """
        check_json(patch, "patch")
        row = await self._store.merge_metadata(self.id, patch)
        return (await sessions_of(self._store, self._admin, [row]))[0]

    async def archive(self) -> Session:
        """Hide the session from lists."""
        return await self._changed(SessionChanges(archived=True))

    async def unarchive(self) -> Session:
        """Put the session back on lists."""
        return await self._changed(SessionChanges(archived=False))

    async def delete(self) -> None:
        """Delete the session and its subagents for good.

        :raises ~crow.domain.errors.SessionBusy: a living process runs a turn in one of them; the error names it.
        """
        await self._admin.remove([self.id])

    async def _changed(self, changes: SessionChanges) -> Session:
        row = await self._store.update_session(self.id, changes)
        return (await sessions_of(self._store, self._admin, [row]))[0]


async def sessions_of(store: Store, admin: Admin, rows: Sequence[SessionRow]) -> tuple[Session, ...]:
    """Return the sessions in these rows."""
    ids = [row.id for row in rows]
    counts, compacted = await store.count_messages(ids), await store.compacted(ids)
    return tuple(session_of(store, admin, row, counts[row.id], is_compacted=row.id in compacted) for row in rows)


def session_of(store: Store, admin: Admin, row: SessionRow, messages: int, *, is_compacted: bool) -> Session:
    """Return the session in this row. `messages` is the number of its prompts and answers."""
    return Session(
        id=row.id,
        title=row.title,
        alias=row.alias,
        workspace_path=row.cwd,
        model=row.model,
        mode=row.mode,
        message_count=messages,
        tokens_in=row.tokens_in,
        tokens_out=row.tokens_out,
        tokens_cached=row.tokens_cached,
        cost=row.cost,
        files_changed=row.files_changed,
        lines_added=row.lines_added,
        lines_removed=row.lines_removed,
        is_compacted=is_compacted,
        created_at=time_of(row.created_ms),
        updated_at=time_of(row.updated_ms),
        archived=row.archived,
        parent_id=row.parent_id,
        forked_from=row.forked_from,
        leaf=row.leaf,
        metadata=row.metadata,
        _admin=admin,
        _store=store,
    )


def time_of(unix_ms: int) -> datetime:
    """Return a time in UTC."""
    return datetime.fromtimestamp(unix_ms / 1000, UTC)


def check_json(value: Mapping[str, Any], name: str) -> None:
    """Check that a value is a JSON object. :raises ~crow.domain.errors.ArgumentError: it is not."""
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise ArgumentError(f"{name} is not JSON: {error}.") from error
    if not isinstance(value, Mapping):
        raise ArgumentError(f"{name} is {describe(value)}; expected an object.")


def _is_compaction(entry: Entry) -> bool:
    return isinstance(entry.body, _COMPACTIONS)


async def _openai_messages(entries: Sequence[Entry]) -> list[dict[str, Any]]:
    """Return entries as messages. The work is done in a thread, because it may take long for a long session."""

    def render() -> list[dict[str, Any]]:
        sent = ChatEncoder().messages(for_model(entries).messages, endpoint="", dialect=_PLAIN)
        messages: list[dict[str, Any]] = json.loads(b"[" + b",".join(sent) + b"]")
        return messages

    return await anyio.to_thread.run_sync(render)
