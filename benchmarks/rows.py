"""Benchmark figures as a table and as JSON.

Rows over their limit are marked. Limits are for an idle machine with two cores; the floor shows how idle it was.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sqlite3
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

__all__ = ["ROOT", "Row", "arguments", "flush_ms", "of_times", "report", "table"]

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class Row:
    """A figure. `limit` is the maximum of the median, None if only the ratio counts. `cpu` is the CPU time in ms,
    which a busy machine or slow disk hardly changes. `floor` is the same work in the same run without crow, `sdk`
    by the smallest agent on the SDKs of the protocol and the endpoint."""

    what: str
    median: float
    worst: float
    unit: str
    limit: float | None = None
    cpu: float | None = None
    floor: float | None = None
    sdk: float | None = None

    @property
    def is_over(self) -> bool:
        return self.limit is not None and self.median > self.limit


def of_times(what: str, seconds: Sequence[float], *, limit: float | None = None, **more: float | None) -> Row:
    """Median and worst of times, in ms."""
    return Row(what, statistics.median(seconds) * 1e3, max(seconds) * 1e3, "ms", limit, **more)


def table(rows: Sequence[Row]) -> list[str]:
    """The rows as lines, without empty columns."""
    columns: list[tuple[str, int, Callable[[Row], str]]] = [
        ("median", 10, lambda row: number(row.median)),
        ("worst", 10, lambda row: number(row.worst)),
        ("", 5, lambda row: row.unit),
        ("limit", 8, lambda row: "" if row.limit is None else f"{row.limit:g}"),
        ("", 4, lambda row: "over" if row.is_over else ""),
        ("floor", 9, lambda row: number(row.floor)),
        ("SDKs", 9, lambda row: number(row.sdk)),
        ("cpu", 8, lambda row: number(row.cpu)),
    ]
    columns = [column for column in columns if any(column[2](row) for row in rows)]
    lines = [" " * 58 + "".join(f" {name:>{width}}" for name, width, _ in columns)]
    lines += [f"{row.what:58}" + "".join(f" {cell(row):>{width}}" for _, width, cell in columns) for row in rows]
    return [line.rstrip() for line in lines]


def number(value: float | None) -> str:
    """The number with enough digits to compare."""
    if value is None:
        return ""
    if isinstance(value, int):
        return f"{value:,}"
    return (
        f"{value:,.0f}" if abs(value) >= 1000 or value == 0 else f"{value:.2f}" if abs(value) < 100 else f"{value:.1f}"
    )


def arguments(about: str | None) -> argparse.ArgumentParser:
    """A parser with the options of every benchmark."""
    parser = argparse.ArgumentParser(description=(about or "").partition("\n")[0])
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the rows as JSON too")
    return parser


def report(rows: Sequence[Row], file: Path | None) -> None:
    """Print the table and write it as JSON to `file`, with a description of the machine."""
    print("\n".join(table(rows)))
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        content = {"machine": machine(), "rows": [asdict(row) | {"is_over": row.is_over} for row in rows]}
        file.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", "utf-8")


def machine() -> dict[str, Any]:
    """The facts about the machine that figures depend on."""
    with tempfile.TemporaryDirectory() as directory:
        return {
            "system": f"{platform.system()} {platform.machine()}",
            "cores": os.cpu_count(),
            "python": platform.python_version(),
            "sqlite": sqlite3.sqlite_version,
            "flush_ms": round(statistics.median(flush_ms(Path(directory))), 3),
            "load": round(os.getloadavg()[0], 2),
        }


def flush_ms(directory: Path, times: int = 50, *, rest_s: float = 0) -> list[float]:
    """Milliseconds that the disk takes to flush one page after this rest. Every durable write takes at least one
    flush."""
    taken = []
    with (directory / "page").open("wb", buffering=0) as file:
        for _ in range(times):
            time.sleep(rest_s)
            since = time.perf_counter()
            file.write(b"x" * 4096)
            os.fdatasync(file.fileno())
            taken.append((time.perf_counter() - since) * 1e3)
    return taken
