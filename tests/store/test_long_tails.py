"""Of a path that is too long for any model, only the end is read, on both engines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from crow.domain.conversation import Projection, for_model
from crow.domain.entries import Body, Checkpoint, Entry, Remark, Restore, ToolResult, User
from crow.domain.messages import Text, ToolMessage, UserMessage
from crow.store import Store, paths
from crow.store.paths import RESULT_BYTES
from tests.store.scenes import add, begin, converse, new_session, result, said
from tests.support.paths import problems

TAIL_BYTES = 1_000_000
LONG = 100_000


@pytest.fixture(autouse=True)
def less_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paths, "TAIL_BYTES", TAIL_BYTES)


async def look(store: Store, name: str, count: int, size: int) -> list[Entry]:
    """Steps of the running turn, with results of so many characters."""
    entries: list[Entry] = []
    for number in range(count):
        (answer,) = await add(store, name, said(f"look {number}", calls=1))
        done = replace(result(answer.id, f"{number} ".ljust(size, "x")), cut=1_000)
        entries += [answer, *await add(store, name, done)]
    return entries


def texts_of(entries: Sequence[Entry]) -> int:
    return sum(len(entry.body.text) for entry in entries if isinstance(entry.body, ToolResult))


def checkpoint(summary: str, first_kept: int | None = None) -> Body:
    return Checkpoint(compaction_id=summary, summary=summary, first_kept=first_kept)


async def test_a_short_path_is_read_whole(store: Store) -> None:
    await store.create_session(new_session())
    await begin(store, "s1", "go")
    entries = await look(store, "s1", 4, LONG)
    tail = (await store.open_session("s1")).entries
    assert tail[1:] == tuple(entries)


async def test_only_the_end_of_a_long_path_is_read(store: Store) -> None:
    await store.create_session(new_session())
    first = await begin(store, "s1", "the first prompt")
    await look(store, "s1", 8, LONG)
    second = await begin_again(store, "the second prompt")
    entries = await look(store, "s1", 8, LONG)
    tail = await store.open_session("s1")
    unread, *kept = tail.entries
    assert isinstance(unread.body, Checkpoint)
    assert (unread.body.method, unread.body.first_covered, unread.body.last_covered) == ("unread", first.id, unread.id)
    assert unread.id == kept[0].parent
    assert unread.body.pins == ()
    assert kept[-17:] == [second, *entries]
    assert texts_of(kept) <= TAIL_BYTES
    messages = for_model(tail.entries).messages
    assert problems(messages) == []
    assert isinstance(messages[1], UserMessage)
    assert f"[Entry {unread.id} and everything before it was left out" in str(messages[1])
    assert await store.tail("s1") == replace(tail, waiting=())


async def begin_again(store: Store, prompt: str) -> Entry:
    await add(store, "s1", said("done"), release=True)
    return await begin(store, "s1", prompt)


async def test_the_prompt_of_a_long_turn_is_kept(store: Store) -> None:
    await store.create_session(new_session())
    await converse(store, "s1", "an older prompt")
    prompt = await begin(store, "s1", "what this turn is about")
    await look(store, "s1", 19, LONG)
    unread, *kept = (await store.open_session("s1")).entries
    assert isinstance(unread.body, Checkpoint)
    assert [(pin.entry, pin.text) for pin in unread.body.pins] == [(prompt.id, "what this turn is about")]
    assert not any(isinstance(entry.body, User) for entry in kept)


async def test_a_summary_before_the_end_is_kept_unless_it_was_undone(store: Store) -> None:
    await store.create_session(new_session())
    await converse(store, "s1", "one")
    (good, wrong) = await add(store, "s1", checkpoint("the good summary"), checkpoint("the undone summary"))
    await add(store, "s1", Restore(entry=wrong.id))
    await begin(store, "s1", "two")
    await look(store, "s1", 19, LONG)
    unread, *_ = (await store.open_session("s1")).entries
    assert isinstance(unread.body, Checkpoint)
    assert unread.body.summary.startswith("the good summary\n\n[Entry ")
    assert good.id < unread.id


@pytest.mark.parametrize("is_undone", [False, True])
async def test_the_summary_of_the_entry_that_did_not_fit_is_kept(store: Store, is_undone: bool) -> None:
    await store.create_session(new_session())
    await converse(store, "s1", "one")
    await add(store, "s1", checkpoint("an older summary"))
    (last,) = await add(store, "s1", checkpoint("s" * 2 * LONG))
    await begin(store, "s1", "two")
    entries = await look(store, "s1", 8, LONG + 5_000)
    if is_undone:
        await add(store, "s1", Restore(entry=last.id))
    unread, *kept = (await store.open_session("s1")).entries
    assert isinstance(unread.body, Checkpoint)
    assert (unread.id, unread.body.last_covered, kept[1:17]) == (last.id, last.id, entries)
    summary = "an older summary" if is_undone else "s" * 2 * LONG
    assert unread.body.summary.startswith(f"{summary}\n\n[Entry {last.id} ")


async def test_a_fork_keeps_a_summary_after_the_original_session_is_removed(store: Store) -> None:
    await store.create_session(new_session())
    await converse(store, "s1", "one")
    await add(store, "s1", checkpoint("the summary"))
    await begin(store, "s1", "two")
    await look(store, "s1", 19, LONG)
    await store.fork_session("s1", "fork", entry=None, cwd="/repo", additional_directories=())
    await store.delete_session("s1")
    await store.tidy()
    unread, *_ = (await store.open_session("fork")).entries
    assert isinstance(unread.body, Checkpoint)
    assert unread.body.summary.startswith("the summary\n\n[Entry ")


async def test_all_that_a_checkpoint_keeps_is_read(store: Store) -> None:
    await store.create_session(new_session())
    user = await begin(store, "s1", "one")
    entries = await look(store, "s1", 19, LONG)
    (stored,) = await add(store, "s1", checkpoint("summary", user.id))
    tail = (await store.open_session("s1")).entries
    assert [entry.id for entry in tail] == [user.id, *(entry.id for entry in entries), stored.id]
    shortened = [entry for entry in tail if isinstance(entry.body, ToolResult) and len(entry.body.text) < LONG]
    assert [entry.id for entry in shortened] == [entry.id for entry in entries[1:20:2]]


@pytest.mark.parametrize("size", [TAIL_BYTES + 1, 4 * TAIL_BYTES])
async def test_one_huge_result_is_shortened_and_hides_nothing(store: Store, size: int) -> None:
    await store.create_session(new_session())
    user = await begin(store, "s1", "one")
    answer, huge = await look(store, "s1", 1, size)
    tail = (await store.open_session("s1")).entries
    assert tail[:2] == (user, answer)
    body = tail[2].body
    assert isinstance(body, ToolResult)
    assert (tail[2].id, body.call, body.cut) == (huge.id, result(answer.id).call, 1_000)
    assert len(body.text) < 2 * RESULT_BYTES
    (shown,) = [message for message in for_model(tail).messages if isinstance(message, ToolMessage)]
    assert shown.text.startswith("0 xxx")


async def test_a_session_goes_on_after_its_beginning_was_left_out(store: Store) -> None:
    await store.create_session(new_session())
    await begin(store, "s1", "one")
    await look(store, "s1", 19, LONG)
    projection = Projection((await store.open_session("s1")).entries)
    unread = projection.checkpoint
    assert unread is not None
    kept = projection.entries[1].id
    (stored,) = await add(store, "s1", checkpoint("a real summary", kept))
    projection.add(stored)
    assert projection.complete
    assert projection.checkpoint is stored
    assert unread not in projection.entries
    assert Projection((await store.open_session("s1")).entries).context() == projection.context()
    (restore,) = await add(store, "s1", Restore(entry=stored.id))
    projection.add(restore)
    assert not projection.complete
    again = Projection((await store.open_session("s1")).entries)
    assert again.complete
    assert again.checkpoint_body is not None
    assert again.checkpoint_body.method == "unread"


def test_what_is_left_out_is_said_in_the_words_of_a_user_message() -> None:
    body = Checkpoint(compaction_id="x", summary="left out", first_kept=None, method="unread")
    entry = Entry(id=7, conversation=1, session="s1", parent=6, turn=1, body=body)
    text = Entry(id=8, conversation=1, session="s1", parent=7, turn=1, body=Remark(text="x", message_id="x"))
    (_, message) = for_model([entry, text]).messages
    assert isinstance(message, UserMessage)
    assert any(isinstance(part, Text) and "left out" in part.text for part in message.parts)
