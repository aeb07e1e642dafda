"""Benchmark rows: limits, and the tables in BENCHMARKS.md."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import write
from benchmarks.__main__ import NAMES, rows_over
from benchmarks.rows import ROOT, Row, of_times, report, table

ROWS = [
    of_times("a step", [0.004, 0.006, 0.009], limit=5, floor=0.25),
    of_times("  of which the disk", [0.001]),
    Row("text that is not exact", 0, 0, "", 0),
]


def test_a_row_is_over_its_limit_when_its_median_is() -> None:
    assert [row.is_over for row in ROWS] == [True, False, False]
    assert [line.split() for line in table(ROWS)] == [
        ["median", "worst", "limit", "floor"],
        ["a", "step", "6.00", "9.00", "ms", "5", "over", "0.25"],
        ["of", "which", "the", "disk", "1.00", "1.00", "ms"],
        ["text", "that", "is", "not", "exact", "0", "0", "0"],
    ]


def test_rows_written_as_json_come_back_and_stand_in_the_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report(ROWS, tmp_path / "made" / "process.json")
    capsys.readouterr()
    assert rows_over(tmp_path / "made" / "process.json") == ROWS[:1]
    page = write.written(f"above\n{write.BEGIN}old\n{write.END}below\n", write.figures(tmp_path / "made"))
    assert page.startswith(f"above\n{write.BEGIN}\n")
    assert page.endswith(f"\n{write.END}below\n")
    assert "| a step | 6.00 ms | 9.00 | 5 **over** | 0.25 |" in page
    assert "| … of which the disk | 1.00 ms | 1.00 |  |  |" in page
    assert "old" not in page


def test_the_page_has_a_place_for_figures_and_tells_of_every_benchmark() -> None:
    text = (ROOT / "BENCHMARKS.md").read_text("utf-8")
    assert write.written(text, "").count(write.BEGIN + write.END) == 1
    assert [name for name in NAMES if f"**{name}**" not in text] == []
