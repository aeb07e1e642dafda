"""The page reader finds the rows that SQLite finds, in any file that SQLite writes."""

from __future__ import annotations

import math
import sqlite3
from collections.abc import Iterable, Sequence
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crow.store.sqlite.pages import Pages, Value
from tests.support.amounts import examples

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


def create_database(path: Path, rows: Sequence[tuple[Value, ...]], *, vacuum: str, page_bytes: int) -> None:
    """A database with these rows in a table and in its index, and every third row deleted again."""
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute(f"PRAGMA page_size = {page_bytes}")
        connection.execute(f"PRAGMA auto_vacuum = {vacuum}")
        connection.execute("CREATE TABLE t (a, b, c)")
        connection.execute("CREATE INDEX i ON t (a, b, c)")
        connection.executemany("INSERT INTO t VALUES (?, ?, ?)", rows)
        connection.execute("DELETE FROM t WHERE rowid % 3 = 0")


def indexed(rows: Iterable[Sequence[Value]]) -> list[tuple[Value, ...]]:
    """Rows of an index with the rowid first, as in the table."""
    return [(row[-1], *row[:-1]) for row in rows]


def comparable(rows: Sequence[Sequence[Value]]) -> list[str]:
    """SQLite stores a float without a fraction as a whole number, in indexes too."""
    return sorted(
        repr([int(value) if isinstance(value, float) and value.is_integer() else value for value in row])
        for row in rows
        if not any(isinstance(value, float) and math.isinf(value) for value in row)
    )


@settings(max_examples=examples(20))
@given(rows=ROWS, vacuum=st.sampled_from(["NONE", "INCREMENTAL"]), page_bytes=st.sampled_from([512, 4096, 65536]))
def test_pages_have_the_rows_that_sqlite_reads(
    tmp_path_factory: pytest.TempPathFactory, rows: list[tuple[Value, ...]], vacuum: str, page_bytes: int
) -> None:
    path = tmp_path_factory.mktemp("pages") / "x.db"
    create_database(path, rows, vacuum=vacuum, page_bytes=page_bytes)
    pages = Pages(path.read_bytes())
    with closing(sqlite3.connect(path)) as connection:
        truth = connection.execute("SELECT rowid, a, b, c FROM t").fetchall()
    read = list(pages.rows())
    found = [(row.rowid, *row.values) for row in read if row.rowid is not None and len(row.values) == 3]
    assert comparable(found) == comparable(truth)
    assert comparable(indexed(row.values for row in read if row.rowid is None)) == comparable(truth)
    assert comparable(indexed(row.values for row in pages.tree(pages.roots["i"]))) == comparable(truth)


@settings(max_examples=examples(20))
@given(content=st.binary(max_size=20_000), header=st.booleans())
def test_any_bytes_can_be_read_as_pages(content: bytes, header: bool) -> None:
    pages = Pages((b"SQLite format 3\0\x10\0" if header else b"") + content)
    list(pages.rows())
    list(pages.tree(1))
    assert pages.count >= 0
