from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crow.domain.errors import ArgumentError
from crow.tools.builtin.matching import Replacement, replace_text
from crow.tools.builtin.mismatch import placeholder_in

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
        "old_text occurs 3 times in a.py; include more lines so that it occurs once, or set all=true:\n"
        "1\ta\n2\tb\n3\ta\n4\ta"
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


def test_all_places_are_not_replaced_if_they_are_indented_in_several_ways() -> None:
    text = "  x = 1\nif a:\n    x = 1\n"
    assert replace_text(text, "  x = 1", "  x = 2", every=True, name="a.py").count == 2
    with pytest.raises(ArgumentError, match=r"one by one\. a\.py has:\n3\t    x = 1"):
        replace_text(text, "  x = 1", "  if b:\n    x = 1", every=True, name="a.py")


def test_places_that_differ_only_in_their_line_ends_are_several_places() -> None:
    mixed = "a\nb\nc\na\r\nb\r\nd\na\r\nb\n"
    assert "occurs 3 times in a.py" in refused(mixed, "a\nb\n", "x\ny\n")
    edit = replace_text(mixed, "a\nb\n", "x\ny\n", every=True, name="a.py")
    assert edit == Replacement(text="x\ny\nc\nx\r\ny\r\nd\nx\r\ny\n", count=3, line=1)


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
        "old_text does not occur in a.py: its lines are indented in another way. The file has:\n"
        "1\tdef f():\n2\t    if x:\n3\t        return 1\n4\t    return 2"
    )


def test_a_loose_match_in_several_places_is_refused() -> None:
    assert refused("a \nb\na\t\n", "a\n") == (
        "old_text occurs 2 times in a.py if white space is ignored; copy one place with its white space:\n"
        "1\ta \n2\tb\n3\ta\t"
    )


def test_a_loose_match_keeps_a_missing_final_newline_and_crlf() -> None:
    assert once("a\r\n  b ", "b\n", "x\ny\n").text == "a\r\n  x\r\n  y"
    assert once("a \r\nb\r\n", "a\nb", "x\ny").text == "x\r\ny\r\n"


def test_deleting_lines_by_a_loose_match_leaves_no_empty_line() -> None:
    assert once("a\nb \nc\n", "b\nc\n", "").text == "a\n"


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("2\t    if x:\n3\t        return 1", "2\t    if x:\n3\t        return 3"),
        ("  2:     if x:\n  3:         return 1", "    if x:\n        return 3"),
        ("```python\n    if x:\n        return 1\n```", "```python\n    if x:\n        return 3\n```"),
        ("     if x:\n-        return 1", "     if x:\n+        return 3"),
        ("\n    if x:\n        return 1\n\n", "\n    if x:\n        return 3\n\n"),
        ("\tif x:\n\t\treturn 1", "\tif x:\n\t\treturn 3"),
        ("if x :".replace(" :", ":") + "\u200b\n    return 1", "if x:\n    return 3"),
    ],
)
def test_a_slip_in_both_texts_is_undone(old: str, new: str) -> None:
    assert once(CODE, old, new).text == CODE.replace("return 1", "return 3")


def test_escapes_and_entities_are_undone_only_where_old_text_shows_the_slip() -> None:
    assert once('say("hi")\n', 'say(\\"hi\\")', 'say(\\"ho\\")').text == 'say("ho")\n'
    assert once("a < b\n", "a &lt; b", "a &lt; c").text == "a < c\n"
    assert refused("a < b\n", "a &lt; b", "a &lt; &amp;amp;").endswith("The file has:\n1\ta < b")
    assert once("a &lt; b\n", "a &lt; b", "a &lt; c").text == "a &lt; c\n"


def test_what_an_edit_does_not_change_keeps_the_characters_of_the_file() -> None:
    text = "x    = “a”\ny\u00a0= 2\n"
    edited = once(text, 'x = "a"\ny = 2\n', 'x = "a"\ny = 3\n')
    assert edited.text == "x    = “a”\ny\u00a0= 3\n"
    assert edited.remark == (
        "old_text differed only in white space and look-alikes: the file has U+00A0 NO-BREAK SPACE, "
        "U+201C LEFT DOUBLE QUOTATION MARK, U+201D RIGHT DOUBLE QUOTATION MARK"
    )


def test_a_character_that_stands_for_several_is_not_cut() -> None:
    assert once("wait… now\n", "wait... now", "wait... then").text == "wait… then\n"
    assert "The file has" not in refused("wait… now\n", "wait... now", "wait.. now")
    assert refused("wait… now\n", "wait... now", "wait.. now").endswith("1\twait… now")


def test_new_lines_get_the_file_s_tabs() -> None:
    text = "func f() {\n\tif x {\n\t\tgo()\n\t}\n}\n"
    new = "    if x {\n        for {\n            go()\n        }\n    }"
    assert once(text, "    if x {\n        go()\n    }", new).text == (
        "func f() {\n\tif x {\n\t\tfor {\n\t\t\tgo()\n\t\t}\n\t}\n}\n"
    )


def test_indentation_without_a_counterpart_is_refused_with_the_text() -> None:
    assert refused("\ta()\n", "    a()", "    a()\n      b()") == (
        "the indentation '      ' of a new line has no counterpart in the old lines, which are indented differently "
        "from the file. Copy old_text exactly; a.py has:\n1\t\ta()"
    )


def test_part_of_the_indentation_is_no_exact_match() -> None:
    assert once("    a()\n", "  a()", "  a()\n  b()").text == "    a()\n    b()\n"


@pytest.mark.parametrize(
    ("old", "why"),
    [
        ("def f():\n    if y:\n        return 1", "line 2 has `x` where old_text has `y`"),
        ("def f():\n        return 1", "old_text leaves out line 2"),
        ("def f():\n    if x:\n        log()\n        return 1", "the file does not have `log()` there"),
        (
            "def f(\n):\n    if (x):\n        return 1",
            "it differs there in line breaks, commas",
        ),
    ],
)
def test_a_refusal_says_why_and_shows_the_text_that_is_meant(old: str, why: str) -> None:
    words = refused(CODE, old)
    assert why in words
    assert "1\tdef f():\n2\t    if x:\n3\t        return 1\n" in words


def test_an_edit_that_was_already_made_is_named() -> None:
    text = "def total(items):\n    return sum(items)\n"
    assert refused(text, "    return add(items)", "    return sum(items)  ").startswith(
        "old_text does not occur in a.py"
    )
    new = "def total(items):\n    return sum(items)"
    assert refused(text, "def count(items):\n    return len(items)", new) == (
        "old_text does not occur in a.py, but new_text does, from line 1. Was the edit already made?\n"
        "1\tdef total(items):\n2\t    return sum(items)"
    )


def test_text_that_does_not_occur_is_refused() -> None:
    assert refused("x = 1\n" * 9, "class C:") == (
        "old_text does not occur in a.py, nor anything like it; read the file again, or look for the text with grep"
    )
    assert refused("", "class C:").startswith("old_text does not occur in a.py")
    assert refused("a\nb\n", " \n \n").startswith("old_text does not occur in a.py")


@pytest.mark.parametrize(
    ("line", "is_placeholder"),
    [
        ("# ... existing code ...", True),
        ("// rest of the code unchanged", True),
        ("<!-- ... -->", True),
        ("    ...", False),
        ("# Keep the rest of the file open until the end", False),
        ('print("...")', False),
        ("def existing(): ...", False),
    ],
)
def test_lines_that_stand_for_code_are_told_from_code(line: str, is_placeholder: bool) -> None:
    assert placeholder_in(f"a\n{line}\nb", "a\nb") == (line.strip() if is_placeholder else None)
    assert placeholder_in(line, f"a\n{line}\nb") is None


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


@pytest.mark.parametrize(
    ("text", "old", "new", "made"),
    [
        (
            "a = b(1)\nc = 2\n",
            "a\u00a0= b(\u200b1)\nc\u00a0= 2",
            "a\u00a0= b(\u200b1)\nd\u00a0= 3",
            "a = b(1)\nd = 3\n",
        ),
        ("if a:\n    b\n\n    c\nd\n", "\tb\n\n\tc", "\tb\n", "if a:\n    b\n\nd\n"),
        ("if a:\n    if b:\n        c\n", "  if b:", "  if b:\n    x", "if a:\n    if b:\n        x\n        c\n"),
    ],
    ids=["look-alikes in both texts", "a blank line at the end", "levels of the file"],
)
def test_what_a_slip_leaves_open_follows_the_file(text: str, old: str, new: str, made: str) -> None:
    assert replace_text(text, old, new, every=False, name="a.py").text == made


@pytest.mark.parametrize(
    ("text", "old", "new", "cause"),
    [
        (
            "first_call(one)\nsecond_call(two)\nthird_call(three)\nfourth()\n",
            "first_cal(one)\nsecond_call(two)\nthird_call(three)",
            "second_call(two)\nthird_call(three)",
            "line 1 has `first_call` where old_text has `first_cal`",
        ),
        ("one(a)\n\ntwo(b)\nthree(c)\nfour\n", "two(b)\nthree(c)\none(a)", "two(b)", "in another order"),
    ],
    ids=["a removal", "another order"],
)
def test_a_refusal_names_the_cause_and_no_edit_that_was_never_made(text: str, old: str, new: str, cause: str) -> None:
    with pytest.raises(ArgumentError) as error:
        replace_text(text, old, new, every=False, name="a.py")
    assert cause in str(error.value)
    assert "already made" not in str(error.value)


def test_whole_lines_without_their_last_line_end_do_not_join_the_next_line() -> None:
    assert once("a\nb\nc\n", "b\n", "x").text == "a\nx\nc\n"
    assert once("a\r\nb\r\nc\r\n", "b\n", "x").text == "a\r\nx\r\nc\r\n"
    assert once("a\nb\n", "b\n", "x").text == "a\nx\n"
    assert once("a\nb\nc\n", "b\n", "").text == "a\nc\n"
    assert once("a,\nb\n", "a,\n", "a,").text == "a,b\n"  # nothing else changes, so this is meant
    assert once("x = 1\ny = 2\n", "1\tx = 1\n", "1\tx = 2").text == "x = 2\ny = 2\n"


def test_a_line_end_lost_within_a_line_is_refused_with_the_lines() -> None:
    words = refused("a = 1\nb = 2\n", "= 1\n", "= 3")
    assert "the next line would be joined" in words
    assert "1\ta = 1\n2\tb = 2" in words


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("turn total(nest)", "return count(nest)"),
        ("total(nest)", "    return count(nest)"),
        ("return total(", "return count(nest)"),
    ],
)
def test_a_cut_line_that_the_new_text_has_whole_is_not_written_twice(old: str, new: str) -> None:
    words = refused("def f(nest):\n    return total(nest)\n", old, new)
    assert "would be written twice" in words
    assert "2\t    return total(nest)" in words


def test_a_part_of_a_line_may_be_replaced_and_wrapped() -> None:
    assert once("x = f(a)\n", "f(a)", "f(f(a))").text == "x = f(f(a))\n"
    assert once("x = f(a)\n", "a", "f(a)").text == "x = f(f(a))\n"
    assert once("turn on\nturn off\n", "on\nturn", "up\nturn").text == "turn up\nturn off\n"


@pytest.mark.parametrize(
    ("text", "old", "new", "made"),
    [
        ('d = {\n    404: "Not Found",\n}\n', '404:  "Not Found",', '410:  "Gone",', 'd = {\n    410: "Gone",\n}\n'),
        ("80: web\n", "80:  web", "443:  tls", "443: tls\n"),
        ("-  foo\n- bar\n", "- foo", "", "- bar\n"),
    ],
)
def test_a_number_or_a_mark_that_belongs_to_the_text_is_no_slip(text: str, old: str, new: str, made: str) -> None:
    assert once(text, old, new).text == made


@pytest.mark.parametrize(
    ("text", "old", "new"),
    [
        ("# List\n- eggs\n\nWe already have enough milk in stock.\n", "- milk", ""),
        ("timeout = 5\n", "-5", "+7"),
        ("def f():\n    return x + 1\n\ndef g(): pass\n", "def f():\n\treturn x\n", "def f():\n\treturn y\n"),
        ("a = 1\nx = foo(1).bar()\n", "a  = 1\nx = foo(1)\n", "a  = 1\n"),
    ],
)
def test_a_part_of_another_line_is_not_what_an_edit_means(text: str, old: str, new: str) -> None:
    assert "does not occur" in refused(text, old, new)


def test_no_replaced_place_of_several_joins_two_lines() -> None:
    with pytest.raises(ArgumentError, match="would be joined to it"):
        replace_text("foo\nx = foo\ny\n", "foo\n", "", every=True, name="a.py")


def test_a_slip_in_whole_lines_replaces_only_whole_lines() -> None:
    found = replace_text("  milk\nno milk\n  milk\n", "- milk", "+ tea", every=True, name="a.py")
    assert (found.text, found.count) == ("  tea\nno milk\n  tea\n", 2)
