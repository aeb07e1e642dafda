"""Rows read from pages are those that SQLite gives, in any file that it writes."""

from __future__ import annotations

import math
import sqlite3
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crow.store.sqlite.pages import Pages, Value, wal_pages

VALUES = st.one_of(
    st.none(),
    st.integers(-(2**63), 2**63 - 1),
    st.sampled_from([0, 1, 127, 128, -129, 32_768, 2**31, -(2**31), 2**47, -(2**47)]),
    st.floats(allow_nan=False),
    st.text(max_size=40).filter(lambda text: "\0" not in text and text.isprintable()),
    st.binary(max_size=60),
    st.sampled_from([bytes(size) for size in (4_000, 4_061, 4_062, 4_100, 9_000, 70_000)]),
)
ROWS = st.lists(st.tuples(VALUES, VALUES, VALUES), min_size=1, max_size=40)


def made(path: Path, rows: Sequence[tuple[Value, ...]], *, vacuum: str, page_bytes: int) -> None:
    """A database with these rows in a table and in its index, and every third row deleted again."""
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute(f"PRAGMA page_size = {page_bytes}")
        connection.execute(f"PRAGMA auto_vacuum = {vacuum}")
        connection.execute("CREATE TABLE t (a, b, c)")
        connection.execute("CREATE INDEX i ON t (a, b, c)")
        connection.executemany("INSERT INTO t VALUES (?, ?, ?)", rows)
        connection.execute("DELETE FROM t WHERE rowid % 3 = 0")


def comparable(rows: Sequence[Sequence[Value]]) -> list[str]:
    """SQLite stores a float without a fraction as a whole number, in indexes too."""
    return sorted(
        repr([int(value) if isinstance(value, float) and value.is_integer() else value for value in row])
        for row in rows
        if not any(isinstance(value, float) and math.isinf(value) for value in row)
    )


@settings(max_examples=60, deadline=None)
@given(rows=ROWS, vacuum=st.sampled_from(["NONE", "INCREMENTAL"]), page_bytes=st.sampled_from([512, 4096, 65536]))
def test_rows_from_pages_are_those_that_sqlite_reads(
    tmp_path_factory: pytest.TempPathFactory, rows: list[tuple[Value, ...]], vacuum: str, page_bytes: int
):
    path = tmp_path_factory.mktemp("pages") / "x.db"
    made(path, rows, vacuum=vacuum, page_bytes=page_bytes)
    pages = Pages(path.read_bytes())
    with closing(sqlite3.connect(path)) as connection:
        truth = connection.execute("SELECT rowid, a, b, c FROM t").fetchall()
    found = [(row.rowid, *row.values) for row in pages.table_rows() if len(row.values) == 3]
    assert comparable(found) == comparable(truth)
    indexed = [(row.values[-1], *row.values[:-1]) for row in pages.index(pages.roots["i"])]
    assert comparable(indexed) == comparable(truth)
    assert comparable([(row.values[-1], *row.values[:-1]) for row in pages.index_rows()]) == comparable(truth)


def test_pages_of_the_write_ahead_log_replace_those_of_the_file(tmp_path: Path):
    path = tmp_path / "x.db"
    made(path, [(number, "before", bytes(9_000)) for number in range(9)], vacuum="INCREMENTAL", page_bytes=4096)
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA wal_autocheckpoint = 0")
        connection.execute("UPDATE t SET b = 'after', c = zeroblob(20000)")
        connection.execute("DELETE FROM t WHERE rowid = 1")
        connection.execute("BEGIN")
        connection.execute("UPDATE t SET b = 'not committed'")
        file, log = path.read_bytes(), Path(f"{path}-wal").read_bytes()  # before the last one to close empties the log
        newer, size = wal_pages(log)
        connection.execute("ROLLBACK")
        truth = connection.execute("SELECT rowid, a, b, c FROM t").fetchall()
    found = [(row.rowid, *row.values) for row in Pages(file, newer, size).table_rows() if len(row.values) == 3]
    assert sorted(found) == truth
    assert wal_pages(log[:-1])[1] is not None
    torn = wal_pages(log[:5_000])
    assert [row.values[1] for row in Pages(file, *torn).table_rows() if len(row.values) == 3] == ["before"] * 6
    assert wal_pages(b"") == wal_pages(b"x" * 100) == ({}, None)


@settings(max_examples=100, deadline=None)
@given(content=st.binary(max_size=20_000), header=st.booleans())
def test_no_bytes_are_too_odd(content: bytes, header: bool):
    pages = Pages((b"SQLite format 3\0\x10\0" if header else b"") + content)
    list(pages.table_rows())
    list(pages.index_rows())
    list(pages.index(1))
    assert pages.count >= 0
    wal_pages(content)
