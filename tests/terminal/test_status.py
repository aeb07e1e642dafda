"""The line below a running turn, the call to the user, and the numbered lists."""

from __future__ import annotations

import os
import pty
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from crow.terminal.picker import SHOWN, Choice, pick
from crow.terminal.screen import Screen
from crow.terminal.status import notification, status_line


def line(label: str, columns: int, *, is_stopping: bool = False) -> str:
    return status_line(label, columns, seconds=72.6, tokens=4120, mode="ask", is_stopping=is_stopping)


@pytest.mark.parametrize(
    ("columns", "shown"),
    [
        (117, "Run make test · 1 min 12 s · 4.1k tokens · ask · Esc stops · type to queue or steer"),
        (77, "Run make test · 1 min 12 s · 4.1k tokens · ask · Esc stops"),
        (50, "Run make test · 1 min 12 s · 4.1k tokens · ask"),
        (30, "Run make test · 1 min 12 s"),
        (12, "Run make te…"),
    ],
)
def test_a_narrow_terminal_gets_the_most_important_part(columns: int, shown: str) -> None:
    assert line("Run make test", columns) == shown


def test_a_turn_that_stops_says_only_how_to_leave() -> None:
    label = "Cancelling; press Ctrl-C again to leave"
    assert line(label, 77, is_stopping=True) == f"{label} · 1 min 12 s · 4.1k tokens · ask"


@given(st.text(st.characters(exclude_categories=["C", "M", "Z"])), st.integers(2, 200), st.booleans())
def test_the_line_is_never_wider_than_the_terminal(label: str, columns: int, is_stopping: bool) -> None:
    assert cell_len(line(label, columns, is_stopping=is_stopping)) <= columns


def test_a_simple_terminal_only_rings() -> None:
    assert notification("done", "dumb", has_styles=False) == "\a"
    assert notification("done", "linux", has_styles=True) == "\a"
    assert notification("do\x07ne", "xterm", has_styles=True) == "\x1b]9;do\\x07ne\x07\a"


@pytest.mark.parametrize(("is_newest_last", "ends"), [(True, ("86)", "100)")), (False, ("1)", "15)"))])
async def test_a_long_list_shows_one_end_and_finds_the_rest(is_newest_last: bool, ends: tuple[str, str]) -> None:
    shown: list[str] = []
    typed = iter(["nothing like it", "3" * 5000, "9 prompt", "prompt 99"])

    async def show(words: str) -> None:
        shown.append(words)

    async def ask(_: str) -> str:
        return next(typed)

    choices = [Choice(str(number), f"prompt {number} \x1b[31m{'w' * 90}") for number in range(1, 101)]
    found = await pick(choices, columns=40, is_newest_last=is_newest_last, show=show, ask=ask)
    assert found == "99"
    first = shown[0].splitlines()
    assert (first[0].split()[0], first[SHOWN - 1].split()[0]) == ends
    assert first[SHOWN] == "     … 85 more; type a word to find them"
    assert "\x1b" not in "".join(shown)
    assert all(cell_len(each) <= 60 for each in first)
    assert "Nothing in the list has the words nothing like it." in shown
    assert "59) prompt 59" in shown[-1]


async def test_the_lines_below_are_made_once_for_each_piece_of_the_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[int] = []

    def below(columns: int) -> list[str]:
        asked.append(columns)
        return ["typed"]

    ours, theirs = pty.openpty()
    with os.fdopen(theirs, "w") as terminal, os.fdopen(ours, "rb"):
        monkeypatch.setattr(sys, "stdout", terminal)
        monkeypatch.setattr(sys, "stderr", terminal)
        monkeypatch.setenv("TERM", "xterm")
        screen = Screen()
        screen.below = below
        for piece in ("one ", "two", "\n"):
            await screen.print_rendered(piece)
    assert len(asked) == 3
