"""Line diffs."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from crow.domain.diff import changed_regions, diff_lines, diff_text
from tests.support.amounts import examples

lines = st.lists(st.sampled_from(["a\n", "b\n", "c\n", "\n", "same\n", *(f"{n}\n" for n in range(30))]), max_size=40)


def test_two_distant_changes_give_two_regions_with_line_numbers() -> None:
    old = "".join(f"{n}\n" for n in range(1, 101))
    new = old.replace("10\n", "ten\n", 1).replace("90\n", "", 1)
    first, second = changed_regions(old, new)
    assert (first.old_line, first.old_text) == (7, "7\n8\n9\n10\n11\n12\n13\n")
    assert (first.new_line, first.new_text) == (7, "7\n8\n9\nten\n11\n12\n13\n")
    assert (second.old_line, second.old_text) == (87, "87\n88\n89\n90\n91\n92\n93\n")
    assert (second.new_line, second.new_text) == (87, "87\n88\n89\n91\n92\n93\n")


def test_only_a_newline_ends_a_line() -> None:
    (region,) = changed_regions("a\f1\u2028\nb\nc\nd\ne\nf\n", "a\f1\u2028\nb\nc\nd\ne\nF\n")
    assert (region.old_line, region.new_line) == (3, 3)
    assert diff_text("a\fb\n", "a\fc\n") == "@@ -1,1 +1,1 @@\n-a\fb\n+a\fc"


def test_a_changed_line_end_is_a_change() -> None:
    assert diff_text("a\r\nb\r\n", "a\r\nb\n") == "@@ -1,2 +1,2 @@\n a\n-b\n+b"
    assert diff_text("a", "a\n") == "@@ -1,1 +1,1 @@\n-a\n+a"


def test_equal_texts_have_no_regions() -> None:
    assert changed_regions("a\nb\n", "a\nb\n") == ()


@settings(max_examples=examples(20))
@given(lines, lines)
def test_applying_the_regions_to_the_old_text_gives_the_new_text(before: list[str], after: list[str]) -> None:
    old, new = "".join(before), "".join(after)
    rebuilt: list[str] = []
    at = 0
    for region in changed_regions(old, new):
        assert "".join(before[region.old_line - 1 :]).startswith(region.old_text)
        rebuilt += before[at : region.old_line - 1]
        assert len(rebuilt) == region.new_line - 1
        rebuilt += region.new_text.splitlines(keepends=True)
        at = region.old_line - 1 + len(region.old_text.splitlines(keepends=True))
    assert "".join([*rebuilt, *before[at:]]) == new


def test_a_diff_has_hunks_with_three_lines_of_context() -> None:
    assert diff_text("a\nb\nc\nd\ne\nf\n", "a\nb\nc\nd\nE\nf\n") == "@@ -2,5 +2,5 @@\n b\n c\n d\n-e\n+E\n f"
    assert diff_text("", "new") == "@@ -1,0 +1,1 @@\n+new"
    assert diff_text("same\n", "same\n") == ""


@settings(max_examples=examples(20))
@given(lines, lines)
def test_a_diff_removes_old_lines_and_adds_new_ones(before: list[str], after: list[str]) -> None:
    shown = diff_lines("".join(before), "".join(after))
    for mark, whole in (("-", before), ("+", after)):
        lines_of_one = [line.text + "\n" for line in shown if line.mark in (" ", mark)]
        rest = iter(whole)
        assert all(line in rest for line in lines_of_one)  # a subsequence, in order
    balance = sum({"+": 1, "-": -1}.get(line.mark, 0) for line in shown)
    assert balance == len(after) - len(before)
