"""Creates sessions of any length."""

from __future__ import annotations

from pathlib import Path

from crow.domain.entries import (
    Announcement,
    Assistant,
    Body,
    CallRef,
    Checkpoint,
    NewEntry,
    Prompt,
    ToolResult,
    TurnEnd,
    User,
)
from crow.domain.messages import Text, ToolCall
from crow.store import NewSession
from crow.store.sqlite.store import SqliteStore

__all__ = ["SESSION", "grow"]

SESSION = "s1"
TAIL = 60
"""The number of entries after the last checkpoint, in sessions of any length."""

WORDS = "The nest is built of twigs, string and whatever else the wind has left. "


def turn(number: int, leaf: int) -> list[Body]:
    """Five entries after `leaf`: a prompt, a call and its result, an answer, the end."""
    call = ToolCall(id=f"c{number}", name="look", arguments="{}")
    result = ToolResult(
        call=CallRef(assistant=leaf + 2, index=0), name="look", text=WORDS * 3, announcement=Announcement(title="Look")
    )
    return [
        User(parts=(Text(text=f"{number}: {WORDS}"),), message_id=f"u{number}"),
        Assistant(text="", message_id=f"a{number}", calls=(call,), endpoint="test scripted"),
        result,
        Assistant(text=WORDS, message_id=f"b{number}", endpoint="test scripted"),
        TurnEnd(stop="end_turn"),
    ]


async def grow(path: Path, entries: int) -> None:
    """Make a database at `path` with one session, `SESSION`, of about this many entries, `TAIL` of them after a
    checkpoint."""
    store = await SqliteStore.open(path)
    try:
        await store.create_session(NewSession(id=SESSION, cwd=str(path.parent), model="scripted", mode="auto"))
        bodies: list[Body] = [Prompt(system=WORDS, tools=(), cwd=str(path.parent), model="scripted")]
        while len(bodies) < entries:
            if entries - TAIL - 6 < len(bodies) <= entries - TAIL - 1:
                bodies.append(
                    Checkpoint(
                        compaction_id="c",
                        summary=WORDS,
                        first_kept=None,
                        method="prefix",
                        tokens_before=9,
                        tokens_after=1,
                    )
                )
            bodies += turn(len(bodies), len(bodies))
        await store.append(
            SESSION, leaf=None, turn=1, entries=[NewEntry(body=body, model="scripted") for body in bodies]
        )
    finally:
        await store.close()
