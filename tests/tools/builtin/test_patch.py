"""How patches are read, and where their hunks belong."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crow.domain.errors import ArgumentError
from crow.tools.builtin.patch import FileChange, Hunk, HunkLine, parse_patch
from crow.tools.builtin.patching import apply_hunks

TWO = """\
class A:
    def f(self):
        return 1

    def g(self):
        return 2


class B:
    def f(self):
        return 1
"""


EMPTY = "diff --git a/x b/x\nnew file mode 100644\nindex 0000000..e69de29"
GIT = "--- a/y\n+++ b/y\n@@ -1 +1 @@\n-a\n+b"


def patched(text: str, *lines: str) -> str:
    (change,) = parse_patch("\n".join(["*** Begin Patch", "*** Update File: a.py", *lines, "*** End Patch"]))
    return apply_hunks(text, change.hunks, name="a.py").text


def refused(text: str, *lines: str) -> str:
    with pytest.raises(ArgumentError) as error:
        patched(text, *lines)
    return str(error.value)


def test_a_file_may_contain_the_last_line_of_a_patch() -> None:
    assert patched("*** End Patch\nold\n", " *** End Patch", "-old", "+new") == "*** End Patch\nnew\n"


def test_a_patch_names_what_becomes_of_each_file() -> None:
    text = (
        "*** Begin Patch\n*** Add File: new.txt\n+one\n+\n*** Delete File: old.txt\n*** Update File: a.py\n"
        "*** Move to: b.py\n@@ class A\n@@ def f\n kept\n-old\n+new\n\n*** End of File\n*** End Patch\n"
    )
    hunk = Hunk(
        number=1,
        headers=("class A", "def f"),
        lines=(
            *(HunkLine(mark=" ", text="kept"), HunkLine(mark="-", text="old"), HunkLine(mark="+", text="new")),
            HunkLine(mark="", text=""),
        ),
        is_at_end=True,
    )
    wanted = (
        FileChange(action="add", path="new.txt", content="one\n\n"),
        FileChange(action="delete", path="old.txt"),
        FileChange(action="update", path="a.py", move_to="b.py", hunks=(hunk,)),
    )
    assert parse_patch(text) == wanted
    assert parse_patch(text.replace("\n", "\r\n")) == wanted
    assert parse_patch(text.replace("*** Begin Patch\n", "").replace("*** End Patch\n", "")) == wanted
    assert parse_patch(f"```diff\n{text}```\n") == wanted
    assert parse_patch(f"apply_patch <<'EOF'\n{text}EOF\n") == wanted


def test_a_patch_in_gits_form_is_understood() -> None:
    text = (
        "diff --git a/a.py b/a.py\nindex 123abc..456def 100644\n--- a/a.py\n+++ b/a.py\n@@ -2,2 +2,2 @@ class A:\n"
        " kept\n--- x\n+++ y\n\\ No newline at end of file\n--- /dev/null\n+++ b/new.txt\n@@ -0,0 +1 @@\n+text\n"
        "--- a/old.txt\n+++ /dev/null\n@@ -1 +0,0 @@\n-gone\n"
    )
    update, added, deleted = parse_patch(text)
    assert (update.action, update.path, update.hunks[0].line, update.hunks[0].headers) == (
        *("update", "a.py", 2),
        ("class A:",),
    )
    assert update.hunks[0].lines[1:] == (HunkLine(mark="-", text="-- x"), HunkLine(mark="+", text="++ y"))
    assert added == FileChange(action="add", path="new.txt", content="text\n")
    assert (deleted.action, deleted.path) == ("delete", "old.txt")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "the patch names no file"),
        ("hello", "line 1 of the patch is `hello`"),
        ("*** Begin Patch\n*** Update File: a\n*** End Patch", "has no lines that begin with `-` or `+`"),
        ("*** Update File: a\n@@\n kept", "hunk 1 of a changes nothing"),
        ("*** Update File: a\n*** Rename to: b\n@@\n-x", "an unknown line for a: `*** Rename to: b`"),
        ("*** Update File: \n@@\n-x", "a path is missing"),
        ("*** Add File: a\n+x\ny", "a line of the new file a does not begin with `+`: `y`"),
        ("*** Delete File: a\n-x", "is followed by lines"),
        ("*** Add File: a\n+x\n*** Delete File: a", "the patch names a twice"),
        ("*** Update File: a\n@@\n-x\n*** End Patch\n*** Begin Patch\n*** Delete File: b", "send one patch"),
        ("diff --git a/x b/y\nrename from x\nrename to y", "`*** Move to: NEW`"),
        (f"{EMPTY}\ndiff --git a/y b/y\n{GIT}", "line 1 of the patch is `diff --git a/x b/x`; no changed lines follow"),
        (f"{GIT}\n{EMPTY}", "line 6 of the patch is `diff --git a/x b/x`; no changed lines follow"),
        (f"diff --git a/y b/y\nold mode 100644\nnew mode 100755\n{GIT}", "use chmod in shell"),
    ],
)
def test_what_cannot_be_read_without_a_guess_is_refused(text: str, words: str) -> None:
    with pytest.raises(ArgumentError) as error:
        parse_patch(text)
    assert words in str(error.value)


def test_headers_choose_among_several_places() -> None:
    change = ("-        return 1", "+        return 3")
    assert patched(TWO, "@@ class B", "@@     def f(self):", *change) == TWO[:-2] + "3\n"
    assert patched(TWO, "@@ class A", *change) == TWO.replace("1", "3", 1)
    assert patched(TWO, *change, "*** End of File") == TWO[:-2] + "3\n"
    assert patched(TWO, "@@ -3 +3 @@", *change) == TWO.replace("1", "3", 1)
    for headers in ([], ["@@ def f(self):"], ["@@ class C"]):
        words = refused(TWO, *headers, *change)
        assert words.startswith("hunk 1 occurs 2 times in a.py; add lines around it, or `@@` with the line of the")
        assert "3\t        return 1" in words
        assert "11\t        return 1" in words


def test_lines_that_stand_only_elsewhere_than_below_the_header_are_refused() -> None:
    words = refused(TWO, "@@ class B:", "-        return 2", "+        return 3")
    assert words.startswith("hunk 1: its lines are at line 6 of a.py, but not below `@@ class B:`")
    assert "11\t        return 1" in words


def test_indentation_is_taken_from_the_file() -> None:
    wanted = TWO.replace("        return 2\n", "        if x:\n            return 3\n")
    lines = ("     def g(self):", "-        return 2", "+        if x:", "+            return 3")
    assert patched(TWO, *lines) == wanted
    assert patched(TWO, *(line[:1] + line[5:] for line in lines)) == wanted, "all lines less indented"
    assert patched(TWO, lines[0][1:], *lines[1:]) == wanted, "without the space before a kept line"
    assert patched(TWO, *(line[:1] + line[1:].replace("    ", "\t") for line in lines)) == wanted, "tabs"


def test_kept_lines_keep_the_characters_of_the_file() -> None:
    text = "say(\u201chello\u201d)  \nx = 1\n"
    assert patched(text, ' say("hello")', "-x = 1", "+x = 2") == text.replace("1", "2")


def test_what_fits_nowhere_is_refused_with_the_closest_text_and_the_number_of_the_hunk() -> None:
    words = refused(TWO, "@@", "-class A:", "+class C:", "@@", "     def g(self):", "-        return 4", "+        x")
    assert words == (
        "hunk 2 does not occur in a.py: line 6 has `2` where hunk 2 has `4`. The file has:\n"
        "4\t\n5\t    def g(self):\n6\t        return 2\n7\t"
    )


def test_a_hunk_that_is_already_made_is_refused() -> None:
    lines = ("     def g(self):", "+        check(self.values)", "         return 2")
    made = patched(TWO, *lines)
    assert "Was the edit already made?" in refused(made, *lines)
    assert "Was the edit already made?" in refused(made, *lines[:2])


def test_lines_without_a_place_are_added_only_at_the_end() -> None:
    assert patched("a\nb", "@@", "+c", "*** End of File") == "a\nb\nc"
    assert patched("a\nb\n", "@@", "+c", "*** End of File") == "a\nb\nc\n"
    assert patched("", "@@", "+c") == "c\n"
    assert "does not say where; add the line before or after" in refused(TWO, "@@ class B:", "+    x = 1")


def test_two_hunks_that_change_the_same_lines_are_refused() -> None:
    words = refused(TWO, "@@", "-class A:", "+class C:", "@@", "-class A:", "-    def f(self):", "+x")
    assert words == "hunks 1 and 2 both change line 1 of a.py; make them one hunk"


def test_hunks_may_share_kept_lines_and_come_in_any_order() -> None:
    assert patched("a\nb\nc\n", "@@", " b", "-c", "+C", "@@", "-a", "+A", " b") == "A\nb\nC\n"


LINE = st.sampled_from(
    ["x = 1", "    y = 2", "\tz", "", "}", "    return x", "-- sql", "++ more", "*** stars", "@@ at"]
)
TEXT = st.lists(LINE, max_size=12)


@given(before=TEXT, after=TEXT, end=st.sampled_from(["\n", "\r\n"]), context=st.integers(0, 3))
def test_a_patch_makes_exactly_the_change_that_it_describes_or_is_refused(
    before: list[str], after: list[str], end: str, context: int
) -> None:
    start = [f"# start {number}" for number in range(3)]
    stop = [f"# stop {number}" for number in range(3)]
    lines = [f" {line}" for line in start[len(start) - context :]]
    lines += [f"-{line}" for line in before] + [f"+{line}" for line in after]
    lines += [f" {line}" for line in stop[:context]]
    text = end.join([*start, *before, *stop, ""])
    try:
        made = patched(text, "@@", *lines)
    except ArgumentError:
        assert not context or before == after
        return
    assert made == end.join([*start, *after, *stop, ""])


@given(st.text(alphabet="ab \t-+@*\n\r", max_size=200))
def test_any_text_is_read_or_refused(text: str) -> None:
    for patch in (text, f"*** Begin Patch\n*** Update File: a\n{text}", f"--- a/a\n+++ b/a\n@@ -1 +1 @@\n{text}"):
        try:
            changes = parse_patch(patch)
            for change in changes:
                apply_hunks("a\nb\n", change.hunks, name="a") if change.hunks else None
        except ArgumentError:
            continue


@pytest.mark.parametrize(
    ("lines", "made"),
    [
        ((" b", " ", "+c"), "a\nb\n\nc\n"),
        ((" a", "-b", "-", "+c"), "a\nc\n"),
        ((" b", "+c", "", "+d"), "a\nb\nc\n\nd\n"),
    ],
)
def test_a_blank_line_behind_the_last_one_does_not_cost_the_last_line_end(lines: tuple[str, ...], made: str) -> None:
    assert patched("a\nb\n", "@@", *lines) == made
