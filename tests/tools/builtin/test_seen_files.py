"""What is noted of the lines that the model knows."""

from __future__ import annotations

from pathlib import Path

from crow.tools.builtin.seen_files import SeenFiles
from crow.tools.in_context import CallPart

FILE, TEXT = Path("/nest/a.txt"), "twigs\nmoss\n"
WHOLE = (range(2),)


def test_lines_that_two_agents_have_read_are_known_to_both() -> None:
    seen = SeenFiles(lambda part, reader: part.call_id == reader)
    seen.note_read(FILE, TEXT, WHOLE, "one")
    seen.note_read(FILE, TEXT, WHOLE, "other")
    assert [seen.unread_lines(FILE, TEXT, reader=reader) for reader in ("one", "other")] == [[], []]
    assert seen.unread_lines(FILE, TEXT, reader="third") == [range(2)]


def test_lines_that_were_read_twice_are_known_after_one_result_was_removed() -> None:
    removed: set[CallPart] = set()
    seen = SeenFiles(lambda part, _reader: part not in removed)
    seen.note_read(FILE, TEXT, WHOLE, "first")
    seen.note_read(FILE, TEXT, WHOLE, "second")
    removed.add(CallPart("second", "result"))
    assert seen.unread_lines(FILE, TEXT) == []
    removed.add(CallPart("first", "result"))
    assert seen.unread_lines(FILE, TEXT) == [range(2)]


def test_an_edit_that_removes_the_last_line_end_is_known() -> None:
    seen = SeenFiles()
    seen.note_read(FILE, TEXT, WHOLE, "read")
    seen.note_write(FILE, TEXT, "twigs\ndown", "edit")
    assert seen.unread_lines(FILE, "twigs\ndown") == []
