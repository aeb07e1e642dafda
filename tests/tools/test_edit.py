from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crow.domain.errors import ArgumentError
from crow.tools.builtin.edit import Replacement, replace_text

CODE = "def f():\n    if x:\n        return 1\n    return 2\n"


def once(text: str, old: str, new: str) -> Replacement:
    return replace_text(text, old, new, every=False, name="a.py")


def refused(text: str, old: str, new: str = "new") -> str:
    with pytest.raises(ArgumentError) as error:
        once(text, old, new)
    return str(error.value)


def test_an_exact_match_replaces_one_place_and_reports_its_line() -> None:
    assert once(CODE, "return 1", "return 3") == Replacement(text=CODE.replace("1", "3"), count=1, line=3)


def test_several_matches_are_refused_with_their_lines_or_all_replaced() -> None:
    text = "a\nb\na\na\n"
    assert refused(text, "a\n") == (
        "old_text occurs 3 times in a.py; include more lines so that it occurs once (lines 1, 3, 4), or set all=true"
    )
    assert replace_text(text, "a\n", "c\n", every=True, name="a.py") == Replacement(
        text="c\nb\nc\nc\n", count=3, line=1
    )


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("", "x", "old_text is empty; expected text from the file. Use write_file for a new file"),
        ("x", "x", "old_text and new_text are the same; nothing would change"),
    ],
)
def test_an_edit_that_changes_nothing_is_refused(old: str, new: str, words: str) -> None:
    assert refused(CODE, old, new) == words


def test_overlapping_matches_count_as_several() -> None:
    with pytest.raises(ArgumentError, match="occurs 2 times in a"):
        replace_text("aaa\n", "aa", "b", every=False, name="a.txt")
    assert replace_text("aaa\n", "aa", "b", every=True, name="a.txt").text == "ba\n"


def test_new_lines_get_the_line_end_of_the_line_they_replace() -> None:
    mixed = "a\r\nb\nc"
    ends = {old: replace_text(mixed, old, "x\ny", every=False, name="a.txt").text for old in "abc"}
    assert ends == {"a": "x\r\ny\r\nb\nc", "b": "a\r\nx\ny\nc", "c": "a\r\nb\nx\ny"}


def test_lf_matches_crlf_and_new_text_gets_crlf() -> None:
    assert once("a\r\nb\r\nc\r\n", "a\nb", "x\ny\nz").text == "x\r\ny\r\nz\r\nc\r\n"
    assert once("a\r\nb\r\n", "b", "x\ny").text == "a\r\nx\r\ny\r\n"
    assert once("a\r\nb\r\n", "a\r\nb", "x\ny").text == "x\ny\r\n"


def test_lf_lines_of_a_file_with_both_line_ends_stay_lf() -> None:
    assert once("a\nb\nc\r\n", "a\nb", "x\ny").text == "x\ny\nc\r\n"


def test_trailing_white_space_is_ignored_and_reported() -> None:
    assert once("a  \nb\t\nc\n", "a\nb\n", "x\ny\n") == Replacement(
        text="x\ny\nc\n", count=1, line=1, remark="old_text differed only in white space"
    )


def test_one_shift_of_indentation_is_ignored_and_applied_to_the_new_text() -> None:
    assert once(CODE, "if x:\n    return 1", "if y:\n\n    return 3") == Replacement(
        text="def f():\n    if y:\n\n        return 3\n    return 2\n",
        count=1,
        line=2,
        remark="old_text differed only in white space; new_text was indented to match",
    )
    assert once("if x:\n  go\n", "    if x:\n      go", "    if y:\n      stay").text == "if y:\n  stay\n"


def test_lines_with_different_shifts_do_not_match() -> None:
    words = refused(CODE, "if x:\nreturn 1")
    assert words == (
        "old_text does not occur in a.py; its first line is at line 2, but the lines after it differ: read from there"
    )


def test_a_loose_match_in_several_places_is_refused() -> None:
    assert refused("a \nb\na\t\n", "a\n") == (
        "old_text does not occur as given in a.py, but 2 places differ from it only in white space (lines 1, 3); "
        "copy one of them with its white space"
    )


def test_a_loose_match_keeps_a_missing_final_newline_and_crlf() -> None:
    assert once("a\r\n  b ", "b\n", "x\ny\n").text == "a\r\n  x\n  y"
    assert once("a \r\nb\r\n", "a\nb", "x\ny").text == "x\r\ny\r\n"


def test_deleting_lines_by_a_loose_match_leaves_no_empty_line() -> None:
    assert once("a\nb \nc\n", "b\nc\n", "").text == "a\n"


def test_line_numbers_in_old_text_are_reported() -> None:
    assert refused(CODE, "     1\tdef f():\n     2\t    if x:") == (
        "old_text does not occur in a.py; leave out the line numbers that read_file adds"
    )


def test_text_that_does_not_occur_is_refused() -> None:
    assert refused(CODE, "class C:") == (
        "old_text does not occur in a.py; read the file again and copy the text exactly"
    )
    assert refused("", "class C:").startswith("old_text does not occur in a.py")
    assert refused("a\nb\n", " \n \n").startswith("old_text does not occur in a.py")


PIECE = st.text(alphabet="ab \t\r\n", max_size=12)


@given(before=PIECE, old=PIECE.filter(bool), after=PIECE, new=PIECE)
def test_text_around_the_match_never_changes(before: str, old: str, after: str, new: str) -> None:
    text = f"{before}<{old}>{after}"
    wanted, given_text = f"<{old}>", f"<{new}>"
    if wanted == given_text:
        return
    replaced = once(text, wanted, given_text)
    assert replaced.text.startswith(before)
    assert replaced.text.endswith(after)
    middle = replaced.text[len(before) : len(replaced.text) - len(after)]
    assert middle.replace("\r\n", "\n") == given_text.replace("\r\n", "\n")
    assert replaced.line == before.count("\n") + 1
