"""Copies the figures of the last `make bench` into BENCHMARKS.md: `python -m benchmarks.write [DIR]`.

It replaces the text between the two marks. Benchmarks without a file in the directory lose their figures.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from benchmarks.rows import ROOT, Row, number

__all__ = ["BEGIN", "END", "figures", "written"]

BEGIN, END = "<!-- figures: begin -->\n", "<!-- figures: end -->\n"
ORDER = ("process", "pure", "llm", "store", "upkeep", "tools", "retention", "working_set")
"""The rest is sorted by name."""


def figures(directory: Path) -> str:
    """The machine and one Markdown table for each benchmark.

    :raises FileNotFoundError: there are no figures.
    """
    files = sorted(directory.glob("*.json"), key=lambda file: ((*ORDER, file.stem).index(file.stem), file.stem))
    if not files:
        raise FileNotFoundError(f"No figures in {directory}. Run `make bench` first.")
    contents = [json.loads(file.read_text("utf-8")) for file in files]
    parts = [machines([content["machine"] for content in contents])]
    for file, content in zip(files, contents, strict=True):
        rows = [Row(**{key: value for key, value in row.items() if key != "is_over"}) for row in content["rows"]]
        parts.append(f"### {file.stem}\n\n" + "\n".join(markdown(rows)))
    return "\n" + "\n\n".join(parts) + "\n\n"


def machines(found: list[dict[str, Any]]) -> str:
    first = found[0]
    flushes, loads = [each["flush_ms"] for each in found], [each["load"] for each in found]
    return (
        f"{first['system']}, {first['cores']} cores, Python {first['python']}, SQLite {first['sqlite']}; flushing one"
        f" page to disk took {between(flushes)} ms; load average {between(loads)} when a benchmark ended."
    )


def between(values: list[float]) -> str:
    low, high = f"{min(values):.2g}", f"{max(values):.2g}"
    return low if low == high else f"{low} to {high}"


def markdown(rows: list[Row]) -> list[str]:
    """A Markdown table without empty columns."""
    columns = [
        ("median", [number(row.median) + (f" {row.unit}" if row.unit else "") for row in rows]),
        ("worst", [number(row.worst) for row in rows]),
        ("limit", ["" if row.limit is None else f"{row.limit:g}{' **over**' if row.is_over else ''}" for row in rows]),
        ("floor", [number(row.floor) for row in rows]),
        ("SDKs", [number(row.sdk) for row in rows]),
        ("CPU, ms", [number(row.cpu) for row in rows]),
    ]
    columns = [column for column in columns if any(column[1])]
    lines = ["| | " + " | ".join(name for name, _ in columns) + " |", "|---|" + "--:|" * len(columns)]
    for at, row in enumerate(rows):
        what = row.what if not row.what.startswith(" ") else f"… {row.what.strip()}"
        lines.append(f"| {what} | " + " | ".join(cells[at] for _, cells in columns) + " |")
    return lines


def written(text: str, new: str, first: str = BEGIN, last: str = END) -> str:
    """The document with these figures. :raises ValueError: it has no marks."""
    before, begin, rest = text.partition(first)
    _, end, after = rest.partition(last)
    if not begin or not end:
        raise ValueError(f"BENCHMARKS.md has no lines {first.strip()} and {last.strip()} to write between.")
    return before + begin + new + end + after


def main() -> None:
    directory = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "build" / "bench"
    document = ROOT / "BENCHMARKS.md"
    document.write_text(written(document.read_text("utf-8"), figures(directory)), "utf-8")


if __name__ == "__main__":
    main()
