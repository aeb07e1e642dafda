"""What a person or a program reads: tables on a terminal, tab-separated lines in a pipe, JSON on request.

Strategy: a command gives rows of text once, and the same as values for JSON. Text that came from a model, a tool or a
file may hold anything: control characters are shown as pictures, so that nothing of it can steer the terminal.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Literal

__all__ = [
    "Column",
    "counted",
    "in_terminal",
    "on_one_line",
    "safe",
    "show",
    "show_json",
    "time_text",
    "unique_prefixes",
]

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_SHORTEST = 8
_NARROWEST = 8
_GAP = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """A column of a table. `fold`: broken into lines where it does not fit, else cut short; `right`: a number."""

    name: str
    style: Literal["fixed", "fold", "cut", "right"] = "cut"


def show(columns: Sequence[Column], rows: Sequence[Sequence[str]], *, empty: str, total: Sequence[str] = ()) -> None:
    """Print a table: on a terminal with its head (and `total` at its foot, or `empty` in its place), else one line a
    row, cells between tabs."""
    if not in_terminal():
        for row in rows:
            print(*(on_one_line(cell) for cell in row), sep="\t")
        return
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    if not rows:
        console.print(Text(empty))
        return
    table = Table(
        box=box.SIMPLE_HEAD, show_edge=False, header_style="bold", padding=(0, 1, 0, 0), show_footer=bool(total)
    )
    widths = _widths(columns, rows, total, console.width)
    for number, column in enumerate(columns):
        table.add_column(
            column.name,
            footer=total[number] if total else "",
            justify="right" if column.style == "right" else "left",
            no_wrap=column.style != "fold",
            overflow="fold" if column.style == "fold" else "ellipsis",
            width=widths[number],
        )
    for row in rows:
        table.add_row(*(Text(on_one_line(cell)) for cell in row))
    console.print(table)


def show_json(values: Iterable[Mapping[str, object]]) -> None:
    """Print one JSON object a line."""
    for value in values:
        print(json.dumps(value, ensure_ascii=False))


def in_terminal() -> bool:
    """Whether a person reads stdout."""
    return sys.stdout.isatty()


def safe(text: str) -> str:
    """`text` with its lines and tabs, and a picture for every other control character."""
    return _CONTROL.sub(_picture, text)


def on_one_line(text: str) -> str:
    """`text` without line breaks, tabs and other control characters."""
    return safe(" ".join(text.split()))


def time_text(unix_ms: int, precision: Literal["minutes", "seconds"] = "minutes") -> str:
    """Local time with its offset, as ISO 8601 but for the space."""
    return datetime.fromtimestamp(unix_ms / 1000).astimezone().isoformat(sep=" ", timespec=precision)


def counted(number: int, noun: str) -> str:
    """`1 entry`, `2 entries`, `10,000 sessions`."""
    plural = f"{noun[:-1]}ies" if noun.endswith("y") else f"{noun}s"
    return f"{number:,} {noun if number == 1 else plural}"


def unique_prefixes(ids: Sequence[str]) -> dict[str, str]:
    """For each of `ids` (in order) the shortest beginning, of at least eight characters, that no other one has."""
    shortest: dict[str, str] = {}
    for index, name in enumerate(ids):
        around = [ids[at] for at in (index - 1, index + 1) if 0 <= at < len(ids)]
        length = max([_SHORTEST, *(_shared(name, other) + 1 for other in around)])
        shortest[name] = name[:length]
    return shortest


def _widths(
    columns: Sequence[Column], rows: Sequence[Sequence[str]], total: Sequence[str], width: int
) -> Sequence[int]:
    """How wide each column is: numbers, times and ids as they need, the others share what is left, the narrow ones
    first."""
    from rich.cells import cell_len

    widths = [
        max(cell_len(on_one_line(cell)) for cell in (column.name, *(row[number] for row in rows), *total[number:][:1]))
        for number, column in enumerate(columns)
    ]
    flexible = sorted(
        (number for number, column in enumerate(columns) if column.style in ("fold", "cut")), key=widths.__getitem__
    )
    left = width - _GAP * (len(columns) - 1) - sum(size for at, size in enumerate(widths) if at not in flexible)
    for done, number in enumerate(flexible):
        widths[number] = min(widths[number], max(_NARROWEST, left // (len(flexible) - done)))
        left -= widths[number]
    return widths


def _shared(one: str, other: str) -> int:
    for at, (left, right) in enumerate(zip(one, other, strict=False)):
        if left != right:
            return at
    return min(len(one), len(other))


def _picture(match: re.Match[str]) -> str:
    code = ord(match[0])
    return chr(0x2400 + code) if code < 0x20 else "␡" if code == 0x7F else "\ufffd"
