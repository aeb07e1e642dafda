"""The store in memory that tests use behaves like the real stores wherever it stands in for them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

from crow.domain.entries import CallRef, Checkpoint, Entry, NewEntry, Note, Prompt, Restore
from crow.domain.errors import LeafMoved, NoSuchSession
from crow.domain.messages import Usage
from crow.store import SessionChanges, SessionRow, Store, Tail
from tests.store.scenes import history, new_session, result, said
from tests.support.memory_store import MemoryStore

PROMPT = NewEntry(body=Prompt(system="You are crow.", tools=(), cwd="/repo", model="scripted"))
ANSWER = NewEntry(body=said("yes", calls=1), model="m1", usage=Usage(input_tokens=9), cost=0.5, estimate=4)


def checkpoint(first_kept: int | None) -> NewEntry:
    return NewEntry(body=Checkpoint(compaction_id="c", summary="so far", first_kept=first_kept))


async def append(store: Any, leaf: int | None, *entries: NewEntry, **more: Any) -> tuple[Entry, ...]:
    stored: tuple[Entry, ...] = await store.append("s1", leaf=leaf, turn=1, entries=entries, **more)
    return stored


STEPS: tuple[Callable[[Any], Awaitable[object]], ...] = (
    lambda store: store.session("s1"),
    lambda store: store.session("gone"),
    lambda store: append(store, 1, ANSWER),
    lambda store: append(store, None, PROMPT, ANSWER, NewEntry(body=said("more"))),
    lambda store: append(
        store, 3, NewEntry(body=Note(about="mode", value="plan")), changes=SessionChanges(mode="plan")
    ),
    lambda store: append(store, 3, ANSWER),
    lambda store: store.tail("s1"),
    lambda store: append(store, 4, checkpoint(3), ANSWER),
    lambda store: store.tail("s1"),
    lambda store: append(store, 6, NewEntry(body=Restore(entry=5))),
    lambda store: store.tail("s1"),
    lambda store: append(store, 7, checkpoint(None), release=True),
    lambda store: store.tail("s1"),
    lambda store: store.update_session("s1", SessionChanges(calibration=1.5, model="m2", title=None)),
    lambda store: store.move_leaf("s1", leaf=8, to=3, reason="undo"),
    lambda store: store.tail("s1"),
    lambda store: store.move_leaf("s1", leaf=8, to=2, reason="undo"),
    lambda store: append(store, 3, ANSWER),
    lambda store: store.tail("s1"),
    lambda store: store.entry(2),
    lambda store: store.entry(99),
    lambda store: store.entry(2, session_id="s1"),
    lambda store: store.entry(8, session_id="s1"),
    lambda store: store.open_session("s1"),
    lambda store: append(store, 9, NewEntry(body=result(9))),
    lambda store: store.result("s1", CallRef(assistant=9, index=0)),
    lambda store: store.result("s1", CallRef(assistant=9, index=1)),
    lambda store: history(store, "s1"),
)


def comparable(value: object) -> object:
    """Without times and the counters of the row, which the store in memory leaves out."""
    match value:
        case Entry():
            return replace(value, created_ms=0)
        case SessionRow():
            return (value.id, value.leaf, value.cwd, value.model, value.mode, value.title, value.calibration)
        case Tail(row=row, entries=entries):
            return comparable(row), comparable(entries)
        case tuple():
            return tuple(comparable(item) for item in value)
        case _:
            return value


async def outcomes(store: object) -> list[object]:
    found = []
    for step in STEPS:
        try:
            found.append(comparable(await step(store)))
        except (LeafMoved, NoSuchSession) as error:
            found.append(type(error))
    return found


async def test_both_stores_give_the_same_rows_tails_entries_and_refusals(store: Store) -> None:
    await store.create_session(replace(new_session(), model="scripted"))
    memory = MemoryStore()
    memory.create("s1")
    assert await outcomes(memory) == await outcomes(store)
