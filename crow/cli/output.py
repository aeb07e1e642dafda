"""Prints tables on a terminal, tab-separated lines in a pipe, and JSON on request.

Stored text may contain control characters. They are replaced with visible symbols, so that they cannot control the
terminal.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Literal, NamedTuple, TextIO

from rich import box
from rich.console import Console
from rich.markdown import Markdown
from rich.table import Table
from rich.text import Text

from crow.domain.text import on_one_line, safe, safe_json

_SHORTEST_PREFIX = 8


class Column(NamedTuple):
    """A column of a table."""

    name: str
    style: Literal["fixed", "text", "number"] = "text"
    """`fixed` keeps cells on one line, `text` wraps them, and `number` aligns them to the right."""


def print_table(
    columns: Sequence[Column], rows: Sequence[Sequence[str]], *, empty: str, total: Sequence[str] = ()
) -> None:
    """Print rows as a table if stdout is a terminal, and as tab-separated lines if it is not. On a terminal, `total` is
    the last row of the table. If there are no rows, a terminal shows the text `empty` instead of a table."""
    if not in_terminal():
        for row in rows:
            print(*(on_one_line(cell) for cell in row), sep="\t")
        return
    if not rows:
        print(empty)
        return
    table = Table(
        box=box.SIMPLE_HEAD, show_edge=False, header_style="bold", padding=(0, 1, 0, 0), show_footer=bool(total)
    )
    for number, column in enumerate(columns):
        table.add_column(
            column.name,
            footer=total[number] if total else "",
            justify="right" if column.style == "number" else "left",
            no_wrap=column.style != "text",
            overflow="fold",
        )
    for row in rows:
        table.add_row(*(Text(on_one_line(cell)) for cell in row))
    Console().print(table)


def print_matches(heading: tuple[str, str, str], rows: Sequence[tuple[str, str]], words: Sequence[str]) -> None:
    """Print the matches of a search on a terminal: a heading (id, title, directory), and below it one line for each row
    (label, text).

    A long text is cut so that its first match is visible. The matching words are highlighted in the title and in the
    texts.
    """
    console = Console(highlight=False)
    pattern = re.compile("|".join(map(re.escape, words)), re.IGNORECASE)

    def highlighted(text: Text) -> Text:
        text.highlight_regex(pattern, "bold yellow")
        return text

    name, title, place = map(on_one_line, heading)
    console.print(Text.assemble((name, "cyan"), "  ", highlighted(Text(title, style="bold")), "  ", (place, "dim")))
    for label, text in rows:
        room = max(20, console.width - len(label) - 4)
        line = highlighted(_cut(on_one_line(text), pattern, room))
        line.truncate(room, overflow="ellipsis")
        console.print(Text.assemble("  ", (label, "dim"), "  ", line), no_wrap=True, crop=True)
    console.print()


def _cut(line: str, pattern: re.Pattern[str], room: int) -> Text:
    """Cut off the beginning of a long line, so that the first match is visible. The place of the cut is only
    approximate, because some characters take two columns."""
    place = pattern.search(line)
    start = min(place.start() - room // 3, len(line) - room + 1) if place else 0
    return Text(f"…{line[start:]}" if start > 0 else line)


def say(line: str, *, file: TextIO | None = None) -> None:
    """Print one line for a person. Hidden characters are escaped, and line ends become spaces."""
    print(safe(line.replace("\n", " ")), file=file, flush=True)


def print_json(values: Iterable[Mapping[str, object]]) -> None:
    """Print one JSON object per line. Characters that the encoding of stdout may lack are written as JSON escapes."""
    is_ascii = not (sys.stdout.encoding or "").lower().startswith("utf")
    for value in values:
        print(safe_json(json.dumps(value, ensure_ascii=is_ascii)))


def print_markdown(text: str) -> None:
    """Print Markdown: formatted on a terminal, unchanged elsewhere."""
    if not text:
        return
    if not in_terminal():
        print(safe(text), end="")
        return
    console = Console()
    console.print(Markdown(safe(text), hyperlinks=False))
    console.print()


def in_terminal() -> bool:
    """Return whether stdout is a terminal."""
    return sys.stdout.isatty()


def age_text(seconds: float) -> str:
    """Return an age as text, such as `now`, `5 min`, `3 h`, `12 d`, `7 mo` or `2 y`."""
    for size, unit in ((365 * 86_400, "y"), (30 * 86_400, "mo"), (86_400, "d"), (3_600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds // size:.0f} {unit}"
    return "now"


def unique_prefixes(ids: Sequence[str]) -> dict[str, str]:
    """Map each of the sorted `ids` to a prefix that no other id has: the shortest such prefix with at least eight
    characters."""
    lengths = dict.fromkeys(ids, _SHORTEST_PREFIX)
    for pair in pairwise(ids):
        differs = (at for at, (one, other) in enumerate(zip(*pair, strict=False)) if one != other)
        length = next(differs, min(map(len, pair))) + 1
        for name in pair:
            lengths[name] = max(lengths[name], length)
    return {name: name[:length] for name, length in lengths.items()}
