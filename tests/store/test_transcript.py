"""Sessions as Markdown."""

from __future__ import annotations

import time

import pytest

from crow.domain.entries import Announcement, CallRef, Entry, Skill, ToolResult, User
from crow.domain.messages import Text
from crow.store.transcript import Transcript, time_text

CALL = CallRef(assistant=1, index=0)


def markdown(body: User | ToolResult | Skill) -> str:
    entry = Entry(id=2, conversation=1, session="s", parent=1, turn=1, body=body)
    return Transcript(is_full=False).feed(entry)


def test_a_short_result_with_windows_line_ends_is_whole() -> None:
    result = ToolResult(call=CALL, name="shell", text="a\r\nb\r\n", announcement=Announcement(title="t", kind="read"))
    assert "more character" not in markdown(result)


def test_a_prompt_that_begins_with_indented_code_stays_as_it_is() -> None:
    assert markdown(User(parts=(Text(text="\n    code\n"),), message_id="m")).endswith("\n\n    code\n\n")


def test_the_name_of_a_skill_begins_no_line_of_its_own() -> None:
    assert markdown(Skill(name="a\n# b", text="")).count("\n#") == 0


def test_the_last_time_that_an_import_may_bring_is_shown_in_every_time_zone() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TZ", "Pacific/Kiritimati")
        time.tzset()
        shown = time_text(253_402_300_799_999)
    time.tzset()
    assert shown == "9999-12-31 13:59+14:00"
