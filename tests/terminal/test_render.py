"""Markdown, diffs and tool calls as a terminal shows them."""

from __future__ import annotations

import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from crow.terminal.markdown import MarkdownStream, inline
from crow.terminal.render import Look, diff_of, look_of, output_of, plan_of, title_of, usage_of

PLAIN = Look(has_styles=False, has_colors=False)
STYLED = Look()
WORDS = Look(has_styles=False, has_colors=False, has_words=True)

EVIL = "\x1b]0;owned\x07\x1b[2J \u202etxt.exe \r over \x9b31m"

DOCUMENT = """\
# A `heading`

Some **bold words**, *italic* and ~~gone~~, a snake_case_name, 2 * 3 * 4, \\*stars\\*,
[a page](https://example.org/x) and ``a `tick` here``.

- one
  - two
3. three
> quoted

~~~text
**code**
~~~

| a | b |
|---|--:|
| 1 | **2** |
***
***both*** and an unclosed **end"""


def shown(text: str, look: Look = PLAIN, size: int = 10_000) -> str:
    stream = MarkdownStream(look)
    return "".join(stream.feed(text[at : at + size]) for at in range(0, len(text), size)) + stream.end()


@pytest.fixture(autouse=True)
def terminal_of_40_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")


def test_markdown_becomes_text_with_breaks_between_words() -> None:
    assert shown(DOCUMENT).splitlines() == [
        "# A heading",
        "",
        "Some bold words, italic and gone, a",
        "snake_case_name, 2 * 3 * 4, *stars*,",
        "a page (https://example.org/x) and a",
        "`tick` here.",
        "",
        "- one",
        "  - two",
        "3. three",
        "> quoted",
        "",
        "~~~text",
        "**code**",
        "~~~",
        "",
        "+---+---+",
        "| a | b |",
        "+---+---+",
        "| 1 | 2 |",
        "+---+---+",
        "---",
        "both and an unclosed **end",
    ]


def test_a_screen_reader_gets_words_instead_of_symbols_and_breaks() -> None:
    lines = shown(DOCUMENT, WORDS).splitlines()
    assert lines[0] == "Heading: A heading"
    assert {"Quote: quoted", "Code, text:", "End of code.", "a: 1; b: 2."} <= set(lines)
    assert title_of(WORDS, "make", "failed") == "Failed: make\n"
    assert plan_of(WORDS, [{"content": "tea", "status": "in_progress"}]) == "Plan\n  now: tea\n"
    assert diff_of(WORDS, {"path": "/a", "oldText": "x\n", "newText": "y\n"}, most=9)[0].splitlines()[2:] == [
        "removed: x",
        "added: y",
    ]


def test_styles_and_colours_follow_the_environment() -> None:
    assert look_of({"TERM": "xterm"}, is_plain=False) == STYLED
    assert look_of({"TERM": "xterm", "NO_COLOR": "1"}, is_plain=False) == Look(has_colors=False)
    assert look_of({"TERM": "dumb"}, is_plain=False) == look_of({}, is_plain=False) == PLAIN
    assert look_of({"TERM": "xterm"}, is_plain=True) == WORDS
    for background in ("0;15", "0;default;15", "0;7"):
        assert look_of({"TERM": "xterm", "COLORFGBG": background}, is_plain=False) == Look(is_light=True)
    for background in ("15;0", "15;default", "", "0;"):
        assert look_of({"TERM": "xterm", "COLORFGBG": background}, is_plain=False) == STYLED
    no_colors = {"TERM": "xterm", "COLORFGBG": "0;15", "NO_COLOR": "1"}
    assert look_of(no_colors, is_plain=False) == Look(has_colors=False)


def test_every_colour_on_a_light_background_can_be_read() -> None:
    """The contrast with white is at least 4.5, as WCAG asks for."""

    def contrast(number: int) -> float:
        shades = (0, 95, 135, 175, 215, 255)
        parts = (shades[(number - 16) // base % 6] / 255 for base in (36, 6, 1))
        red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
        return 1.05 / (0.2126 * red + 0.7152 * green + 0.0722 * blue + 0.05)

    light, found = Look(is_light=True), set[int]()
    for tone in ("title", "code", "added", "removed", "place", "bad", "good"):
        codes = re.fullmatch(r"\x1b\[(?:1;)?38;5;(\d+)mx\x1b\[0m", light.paint(tone, "x"))
        assert codes is not None, tone
        found.add(int(codes[1]))
    assert {number for number in found if contrast(number) < 4.5} == set()
    assert light.paint("dim", "x") == "\x1b[2mx\x1b[0m"
    assert shown("**b** `c`", STYLED) == "\x1b[1mb\x1b[0m \x1b[36mc\x1b[0m\n"
    assert shown("**b** `c`", Look(has_colors=False)) == "\x1b[1mb\x1b[0m c\n"


MARKDOWN = st.lists(
    st.sampled_from([*"*_`~|[]()\\#->+1. \n\t", "word", "long" * 9, "```", "~~~", "---", "| a |\n", "日本", "\r\n"])
).map("".join)


@given(text=MARKDOWN | st.text(), size=st.integers(1, 9))
@example(text=DOCUMENT, size=1)
@example(text=DOCUMENT, size=7)
def test_the_pieces_in_which_a_text_arrives_make_no_difference(text: str, size: int) -> None:
    assert shown(text, PLAIN, size) == shown(text)


@given(text=MARKDOWN | st.text() | st.just(EVIL))
@example(text="0\r")
def test_no_text_reaches_the_terminal_with_control_characters_of_its_own(text: str) -> None:
    styles = re.compile(r"\x1b\[[0-9;]+m")
    for look in (STYLED, PLAIN, WORDS):
        written = shown(text, look) + title_of(look, text, "completed") + output_of(look, text)
        written += diff_of(look, {"path": text, "oldText": "", "newText": text}, most=9)[0]
        written += plan_of(look, [{"content": text, "status": text}])
        assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]", styles.sub("", written))


@given(words=st.lists(st.text("abc日*`", min_size=1, max_size=12), max_size=40))
def test_no_line_of_prose_is_wider_than_the_terminal(words: list[str]) -> None:
    from rich.cells import cell_len

    assert all(cell_len(line) <= 39 for line in shown(" ".join(words)).splitlines())


@pytest.mark.parametrize("text", ["*a" * 30_000, "[" * 60_000, "`" * 60_000, "a*" * 30_000, "| a\n" * 15_000])
def test_hostile_markdown_takes_linear_time(text: str) -> None:
    assert shown(text)


def test_code_and_links_are_not_read_as_emphasis() -> None:
    segments, _ = inline("`**a**` [**b**](http://c/_d_) \\_e\\_")
    assert "".join(text for _, text in segments) == "**a** **b** (http://c/_d_) _e_"


def test_a_long_output_shows_its_last_lines_and_a_long_diff_says_what_is_missing() -> None:
    text = "```console\n" + "".join(f"{number}\n" for number in range(20)) + "```"
    assert output_of(PLAIN, text).splitlines() == ["  ... (12 lines before)", *(f"  {n}" for n in range(12, 20))]
    diff, hidden = diff_of(PLAIN, {"path": "/a", "oldText": "", "newText": "x\n" * 30}, most=10)
    assert (hidden, diff.splitlines()[-1]) == (21, "  ... (21 more lines)")


def test_usage_names_the_window_and_the_cost() -> None:
    assert usage_of(6_400, 128_000, 0.01234) == "context 5% of 128k · $0.0123"
    assert usage_of(0, 0, None) == ""


def test_the_marks_around_a_drawing_are_not_shown_but_those_around_code_are() -> None:
    look = Look(has_styles=True, has_colors=False)
    stream = MarkdownStream(look)
    text = stream.feed("```text\n██░░\n```\n\n```sh\nls\n```\n") + stream.end()
    assert ("```text" in text, text.count("```")) == (False, 2)
    assert "██░░" in text
