"""Adds to a subagent's prompt the files that the caller names, and a summary of the caller's conversation.

A file is read as `read_file` would read it, so deny rules hold and secrets stay hidden. If reading a file needs the
user's permission, the prompt only names the file. The sizes of files, summary and lists are limited.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from crow.agent.compaction.checkpoint import files_touched
from crow.agent.compaction.newest import with_newest
from crow.domain.conversation import Projection
from crow.domain.messages import Part, Resource, Text
from crow.domain.rendering import plan_line
from crow.domain.text import on_one_line, shorten_middle
from crow.store.transcript import fenced

_ALL_CHARS, _FILE_CHARS = 80_000, 40_000
"""All files together have at most `_ALL_CHARS` characters, and each file at most `_FILE_CHARS`."""

_MIN_FILE_CHARS = 200
"""If fewer characters than this still fit, no more files are attached."""
_STATE_TOKENS = 2_000
"""The caller's last summary and newest messages together have at most this many tokens."""
_LISTED_FILES = 30
"""Only the newest changed files are listed, at most this many."""
_NOT_ATTACHED = (
    "[These files are not attached, because they cannot be read, need a permission, or are too large together: "
    "{names}. Read them yourself if you need them.]"
)
_STATE = "What the agent that gave you this task has done so far. It is information, not part of your task.\n{text}"


async def attached_files(
    names: Sequence[str], read: Callable[[str], Awaitable[str | None]], *, window: int | None
) -> tuple[Part, ...]:
    """Return the named files as parts of a prompt. `read` returns the text of a file, or None if it may not be read.
    `window` is the subagent's context window in tokens, if it is known."""
    # a token has about four characters, so files with `window` characters fill about a quarter of the window
    left = _ALL_CHARS if window is None else min(_ALL_CHARS, window)
    parts: list[Part] = []
    missing: list[str] = []
    for name in dict.fromkeys(names):
        text = await read(name) if left >= _MIN_FILE_CHARS else None
        if text is None:
            missing.append(on_one_line(name))
            continue
        shown = shorten_middle(text, min(_FILE_CHARS, left))
        left -= len(shown)
        parts.append(Resource(uri=on_one_line(name), text=shown))
    if missing:
        parts.append(Text(text=_NOT_ATTACHED.format(names=", ".join(missing))))
    return tuple(parts)


def state_part(projection: Projection) -> Text:
    """Return a summary of a conversation for a subagent: plan, changed files, the last compaction's summary and the
    newest messages."""
    checkpoint, entries = projection.checkpoint_body, projection.entries
    sections = []
    if projection.plan:
        sections.append("\n".join(["## Plan", *map(plan_line, projection.plan)]))
    _, changed = files_touched(checkpoint, entries)
    if changed := changed[-_LISTED_FILES:]:
        sections.append("\n".join(["## Files changed", *map(on_one_line, changed)]))
    sections.append(with_newest(checkpoint.summary if checkpoint is not None else "", entries, _STATE_TOKENS).strip())
    text = "\n\n".join(filter(None, sections))
    return Text(text=_STATE.format(text=fenced(text).rstrip()))
