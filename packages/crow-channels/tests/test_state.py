"""The state file."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from crow_channels.errors import StateError
from crow_channels.state import Question, State


def test_only_its_owner_can_read_it_and_only_one_process_uses_it(tmp_path: Path) -> None:
    path = tmp_path / "state.db"
    path.touch(0o644)
    os.chmod(path, 0o644)
    state = State(path)
    state.add("c", "p", "m", user="u", principal="ann")
    assert {each.name: each.stat().st_mode & 0o777 for each in tmp_path.iterdir()} == dict.fromkeys(
        ("state.db", "state.db-shm", "state.db-wal", "state.db.lock"), 0o600
    )
    with pytest.raises(StateError, match="in use by another crow-channels"):
        State(path)
    state.close()
    State(path).close()
    (tmp_path / "other.db").write_text("this is no database, but it is long enough to look like one " * 20)
    with pytest.raises(StateError, match="cannot be used"):
        State(tmp_path / "other.db")
    with pytest.raises(StateError, match="cannot be used"):
        State(tmp_path / "missing" / "state.db")


def test_a_message_is_stored_once_and_survives(tmp_path: Path) -> None:
    state = State(tmp_path / "state.db")
    for text in ("one", "again"):
        state.add("c", "p", "m", user="u", principal="ann", blocks=[{"type": "text", "text": text}])
    state.add("c", "p", "m2", user="u", principal="ann")
    prompt = state.next_prompt("c", "p")
    assert prompt is not None
    prompt.stage, prompt.session, prompt.cursor, prompt.text, prompt.calls = "sent", "s", "e1", "answer", ["call"]
    state.save(prompt)
    state.close()
    state = State(tmp_path / "state.db")
    again = state.next_prompt("c", "p")
    assert again == prompt
    assert again.blocks == [{"type": "text", "text": "one"}]
    state.finish(prompt.number)
    assert state.knows("c", "p", "m")
    following = state.next_prompt("c", "p")
    assert following is not None
    assert following.message == "m2"
    assert state.cancel("c", "p") == following.number
    assert state.open_places() == [("c", "p")]
    state.close()


def test_a_question_takes_one_answer_until_it_is_closed(tmp_path: Path) -> None:
    state = State(tmp_path / "state.db")
    question = Question(
        id="q", prompt=1, number=500, name="call_1:x", text="?", choices=(("a", "A"),), answer=None, is_open=True
    )
    state.add_question(question)
    assert state.question("q") == question
    assert (state.answer("q", "a"), state.answer("q", "b"), state.answer("none", "a")) == (True, False, False)
    assert state.question_named(1, "call_1:x") is not None
    state.close_answered(1, "call_10")
    assert state.question_named(1, "call_1:x") is not None
    state.close_answered(1, "call_1")
    assert state.question_named(1, "call_1:x") is None
    state.close()
