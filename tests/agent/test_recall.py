"""Tests what `recall` finds in the session's log."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from crow.agent.branch import Branch
from crow.agent.recall import BranchLog
from crow.domain.entries import Assistant, Checkpoint
from crow.domain.messages import ToolCall
from crow.store import SessionChanges
from crow.store.sqlite.store import SqliteStore
from tests.agent.harness import NoteTaker
from tests.store.scenes import add, begin, converse, ids, new_session, result, said

END = "Pass an entry's number to read all of it, or with a query to see only the matches in it."


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[SqliteStore]:
    opened = await SqliteStore.open(tmp_path / "crow.db")
    await opened.create_session(new_session())
    yield opened
    await opened.close()


async def recall(store: SqliteStore, query: str | None = None, entry: int | None = None, session: str = "s1") -> str:
    branch = Branch(store, NoteTaker(), await store.tail(session))
    return await BranchLog(store, branch).recall(query=query, entry=entry, limit=3)


async def test_words_are_found_in_messages_calls_results_and_summaries(store: SqliteStore) -> None:
    user = await begin(store, "s1", "where is the needle?")
    (asked,) = await add(
        store,
        "s1",
        Assistant(
            text="I look.", message_id="a", calls=(ToolCall(id="c", name="grep", arguments='{"pattern":"needle"}'),)
        ),
    )
    found, summary = await add(
        store,
        "s1",
        result(asked.id, f"hay\n{'x' * 40_000}\nNEEDLE, here"),
        Checkpoint(compaction_id="k", summary="The needle was found.", first_kept=None),
    )
    assert await recall(store, "needle") == "\n".join(
        [
            f"entry {summary.id} (checkpoint): The needle was found.",
            f"entry {found.id} (tool): …{'x' * 79} NEEDLE, here",
            f'entry {asked.id} (assistant): grep {{"pattern":"needle"}}',
            END,
        ]
    )
    assert await recall(store, "where the needle") == f"entry {user.id} (user): where is the needle?\n{END}"
    assert await recall(store, "absent") == 'No matches for "absent" in this conversation.'


@pytest.mark.parametrize(
    "word", ["漢字", "Почини", "🎉", "ok", '"quoted"', "AND", "NEAR(a)", "a*", "-b", "100%_", "col:x"]
)
async def test_any_word_is_found_literally_in_messages_and_outputs(store: SqliteStore, word: str) -> None:
    (plain,) = await add(store, "s1", said("nothing of it; c o k a b"))
    (spoken,) = await add(store, "s1", said(f"before {word} after", calls=1))
    (given,) = await add(store, "s1", result(spoken.id, f"line\n{word}\nline"))
    lines = (await recall(store, word)).splitlines()
    assert [line.split(" (")[0] for line in lines[:-1]] == [f"entry {given.id}", f"entry {spoken.id}"]
    assert plain.id not in (given.id, spoken.id)


async def test_recall_calls_and_the_title_are_not_searched(store: SqliteStore) -> None:
    await store.update_session("s1", SessionChanges(title="needle"))
    call = ToolCall(id="c", name="recall", arguments='{"query":"needle"}')
    (asked,) = await add(store, "s1", Assistant(text="", message_id="a", calls=(call,)))
    earlier = result(asked.id, "needle")
    await add(
        store, "s1", type(earlier)(call=earlier.call, name="recall", text="needle", announcement=earlier.announcement)
    )
    assert await recall(store, "needle") == 'No matches for "needle" in this conversation.'


async def test_only_the_path_of_the_session_is_searched(store: SqliteStore) -> None:
    entries = await converse(store, "s1", "kept", "undone")
    row = await store.session("s1")
    await store.move_leaf("s1", leaf=row.leaf, to=entries[2].id, reason="undo")
    await store.create_session(new_session("s2"))
    (other,) = await add(store, "s2", said("undone", calls=1))
    assert await recall(store, entry=entries[0].id) == f"Entry {entries[0].id} (user):\nkept"
    for entry in (entries[3].id, other.id, 10**30):
        assert (await recall(store, entry=entry)).startswith(f"There is no entry {entry} in this conversation.")
    assert await recall(store, "undone") == 'No matches for "undone" in this conversation.'


async def test_matches_in_one_long_entry_are_shown_with_their_positions(store: SqliteStore) -> None:
    (asked,) = await add(store, "s1", said("", calls=1))
    text = f"{'a' * 5_000}needle{'b' * 5_000}needle needle{'c' * 5_000}"
    (given,) = await add(store, "s1", result(asked.id, text))
    assert await recall(store, "NEEDLE", given.id) == "\n".join(
        [
            f"Entry {given.id} (toolresult, 15,030 characters):",
            f"[at character 4,711] {'a' * 300}needle{'b' * 300}",
            f"[at character 9,717] {'b' * 300}needle needle{'c' * 293}",
        ]
    )
    assert await recall(store, "absent", given.id) == (
        f'Entry {given.id} (toolresult, 15,030 characters) has no match for "absent".'
    )


async def test_answer_says_which_entries_were_not_searched(store: SqliteStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("crow.store.sqlite.search._MOST_CHARACTERS", 1_000)
    (asked,) = await add(store, "s1", said("", calls=2))
    stored = await add(store, "s1", result(asked.id, "needle"), result(asked.id, "y" * 2_000, index=1))
    assert await recall(store, "needle") == (
        'No matches for "needle" in this conversation.\n'
        f"Calls and their outputs before entry {ids(stored)[1]} were not searched."
    )
