"""Tables on a terminal, tab-separated lines in a pipe, JSON on request.

Stored text may hold anything: control characters are printed as pictures, so that it cannot steer the terminal.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from itertools import pairwise
from typing import Literal, NamedTuple

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_SHORTEST_PREFIX = 8


class Column(NamedTuple):
    """A column of a table: `fixed` cells stay on one line, `text` is wrapped, `number` is aligned to the right."""

    name: str
    style: Literal["fixed", "text", "number"] = "text"


def print_table(
    columns: Sequence[Column], rows: Sequence[Sequence[str]], *, empty: str, total: Sequence[str] = ()
) -> None:
    """Print a table on a terminal, with `total` at its foot, or `empty` without rows; elsewhere tab-separated lines."""
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


def print_json(values: Iterable[Mapping[str, object]]) -> None:
    """Print one JSON object a line."""
    for value in values:
        print(json.dumps(value, ensure_ascii=False))


def in_terminal() -> bool:
    """Whether stdout is a terminal."""
    return sys.stdout.isatty()


def safe(text: str) -> str:
    """`text` with a picture for each control character but line ends and tabs."""
    return _CONTROL.sub(lambda match: _picture(ord(match[0])), text)


def on_one_line(text: str) -> str:
    """`text` without line ends, tabs and control characters."""
    return safe(" ".join(text.split()))


def time_text(unix_ms: int, precision: Literal["minutes", "seconds"] = "minutes") -> str:
    """Local time with its offset: `2026-11-01 09:30+01:00`."""
    return datetime.fromtimestamp(unix_ms / 1000).astimezone().isoformat(sep=" ", timespec=precision)


def count(number: int, noun: str) -> str:
    """`1 entry`, `2 entries`, `10,000 sessions`."""
    plural = f"{noun[:-1]}ies" if noun.endswith("y") else f"{noun}s"
    return f"{number:,} {noun if number == 1 else plural}"


def unique_prefixes(ids: Sequence[str]) -> dict[str, str]:
    """For each of the sorted `ids`, its shortest prefix of at least eight characters that no other id has."""
    lengths = dict.fromkeys(ids, _SHORTEST_PREFIX)
    for pair in pairwise(ids):
        differs = (at for at, (one, other) in enumerate(zip(*pair, strict=False)) if one != other)
        length = next(differs, min(map(len, pair))) + 1
        for name in pair:
            lengths[name] = max(lengths[name], length)
    return {name: name[:length] for name, length in lengths.items()}


def _picture(code: int) -> str:
    return chr(0x2400 + code) if code < 0x20 else "␡" if code == 0x7F else "\ufffd"
