"""Copies sessions from one store into another."""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO, Literal, TypeAlias, cast

from crow.domain.errors import ArgumentError, NoSuchSession
from crow.store import Store
from crow.store.admin import Admin, ImportDefaults, Imported, SessionExtras
from crow.store.portable import FORMAT, End, Header, line_of
from crow.store.transfer import ExportedSessionDeleted

_BATCH_BYTES = 16 * 1024 * 1024
_BATCH_CONVERSATIONS = 100
_CHUNK_BYTES = 1024 * 1024

Outcome: TypeAlias = Literal["copied", "known", "changed", "in use", "refused", "different"]
"""What happened to one conversation. "copied": it was copied. "known": the target already had this conversation.
"changed": the target has different sessions with the same ids. "in use": a living process uses the conversation, or
changed or deleted it during the copy. "refused": the conversation cannot be exported or imported. "different": it was
copied, but the copy is not equal to the source."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CopiedConversation:
    """A conversation, and the outcome of copying it."""

    outcome: Outcome
    sessions: tuple[str, ...]
    """The ids of the conversation's sessions."""
    entries: int = 0
    words: str = ""
    """The reason for the outcome. It is empty for the outcomes "copied" and "known"."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """A conversation in a batch."""

    sessions: tuple[str, ...]
    """The ids of the conversation's sessions."""
    extras: Mapping[str, SessionExtras]
    """Maps the ids of sessions to their extras."""
    start: int
    """The position in the file at which the conversation's lines begin, in bytes."""
    end: int
    """The position in the file at which the conversation's lines end, in bytes."""
    lines: int
    """The number of the conversation's lines."""
    hash: str
    """The sha256 (hex) of the conversation's lines."""


class _CopiedBatch:
    """An export file with some conversations. After they are imported, the file is emptied and used for the next
    conversations."""

    def __init__(self, file: BinaryIO, path: Path) -> None:
        self.path = path
        self.parts: list[_Part] = []
        self._file = file
        self.clear()

    @property
    def is_full(self) -> bool:
        """Whether the batch is large enough to be imported."""
        return self._file.tell() > _BATCH_BYTES or len(self.parts) >= _BATCH_CONVERSATIONS

    def clear(self) -> None:
        """Empty the file, and write the header."""
        self.parts = []
        self._cut(0)
        self._file.write(line_of(Header(format=FORMAT)))

    async def add(
        self, sessions: tuple[str, ...], extras: Mapping[str, SessionExtras], lines: AsyncIterator[bytes]
    ) -> None:
        """Add a conversation. If `lines` fails, nothing is added."""
        digest, start, count = hashlib.sha256(), self._file.tell(), 0
        try:
            async for some in lines:
                digest.update(some)
                count += some.count(b"\n")
                self._file.write(some)
        except BaseException:
            self._cut(start)
            raise
        end = self._file.tell()
        part = _Part(sessions=sessions, extras=extras, start=start, end=end, lines=count, hash=digest.hexdigest())
        self.parts.append(part)

    def add_from(self, other: _CopiedBatch, part: _Part) -> None:
        """Add a conversation of another batch."""
        start = self._file.tell()
        for at in range(part.start, part.end, _CHUNK_BYTES):
            other._file.seek(at)
            self._file.write(other._file.read(min(_CHUNK_BYTES, part.end - at)))
        self.parts.append(replace(part, start=start, end=self._file.tell()))

    def drop_last(self) -> None:
        """Remove the conversation that was added last."""
        self._cut(self.parts.pop().start)

    def finish(self) -> None:
        """Write the end of the file."""
        lines = 1 + sum(part.lines for part in self.parts)
        self._file.write(line_of(End(lines=lines, sha256=None)))
        self._file.flush()

    def _cut(self, size: int) -> None:
        self._file.seek(size)
        self._file.truncate()


class SessionCopy:
    """Copies sessions from `source` to `target`, except those that were never used. Reports the outcome for each
    conversation.

    A conversation becomes visible in the target when it is complete. Then it is read from the target and compared with
    the source. If a copy is interrupted, the next one continues with the conversations that are missing. The source is
    not changed.
    """

    def __init__(
        self, source: Admin, target: Admin, target_store: Store, report: Callable[[CopiedConversation], None]
    ) -> None:
        self._source = source
        self._target = target
        self._target_store = target_store
        self._report = report
        self._known: frozenset[str] = frozenset()

    async def run(self) -> None:
        """Copy everything that is not in the target yet."""
        conversations = await self._source.conversations()
        self._known = frozenset(name for names in conversations.values() for name in names)
        with _new_batch() as batch:
            for conversation, sessions in conversations.items():
                await self._add(batch, conversation, sessions)
                if batch.is_full:
                    await self._import(batch)
            await self._import(batch)

    async def _add(self, batch: _CopiedBatch, conversation: int, sessions: tuple[str, ...]) -> None:
        """Add a conversation to the batch. If a living process uses it, or it changes or is deleted meanwhile, report
        that instead."""
        size, words = len(batch.parts), ""
        try:
            before = await self._source.conversation_state(sessions)
            if before.users:
                words = f"{', '.join(before.users)} uses it now"
            else:
                await batch.add(sessions, before.extras, self._source.lines(conversation, sessions, self._known))
                if await self._source.conversation_state(sessions) != before:
                    words = "it changed while it was copied"
        except (NoSuchSession, ExportedSessionDeleted):
            words = "it was deleted while it was copied"
        if words:
            if len(batch.parts) > size:
                batch.drop_last()
            self._report(CopiedConversation(outcome="in use", sessions=sessions, words=words))

    async def _import(self, batch: _CopiedBatch) -> None:
        """Import the batch. If the import is refused, import each conversation separately. Then clear the batch."""
        if not batch.parts:
            return
        batch.finish()
        extras = {name: extras for part in batch.parts for name, extras in part.extras.items()}
        try:
            imported = await self._target.import_file(batch.path, ImportDefaults(extras=extras, relatives=self._known))
        except ArgumentError as error:
            if len(batch.parts) == 1:
                words = str(error).replace(f"{batch.path}, ", "").removesuffix(" Nothing was imported.")
                self._report(CopiedConversation(outcome="refused", sessions=batch.parts[0].sessions, words=words))
            else:
                with _new_batch() as alone:
                    for part in batch.parts:
                        alone.add_from(batch, part)
                        await self._import(alone)
        else:
            for part, one in zip(batch.parts, imported, strict=True):
                self._report(await self._checked(part, one))
        batch.clear()

    async def _checked(self, part: _Part, imported: Imported) -> CopiedConversation:
        """Compare a conversation in the target with the source, and return the outcome."""
        values: dict[str, Any] = {"sessions": part.sessions, "entries": imported.entries}
        if imported.is_same and not imported.is_new:
            return CopiedConversation(outcome="known", **values)
        if await self._hash_in_target(part.sessions) == part.hash:
            return CopiedConversation(outcome="copied" if imported.is_new else "known", **values)
        if imported.is_new:
            words = "the copy is not equal to the source; remove the copy from the target, then copy again"
            return CopiedConversation(outcome="different", **values, words=words)
        words = "the target has different sessions with these ids; it was left unchanged"
        return CopiedConversation(outcome="changed", **values, words=words)

    async def _hash_in_target(self, sessions: tuple[str, ...]) -> str:
        digest = hashlib.sha256()
        try:
            conversation = (await self._target_store.session(sessions[0])).conversation
            async for some in self._target.lines(conversation, sessions, self._known):
                digest.update(some)
        except NoSuchSession:
            return ""
        return digest.hexdigest()


@contextmanager
def _new_batch() -> Iterator[_CopiedBatch]:
    with tempfile.NamedTemporaryFile(prefix="crow-", suffix=".jsonl") as file:
        yield _CopiedBatch(cast(BinaryIO, file), Path(file.name))
