"""Processes killed at hundreds of statements leave a consistent database."""

from __future__ import annotations

from pathlib import Path

from tests.support.killing import killed


def test_a_process_killed_at_any_statement_loses_nothing_that_was_reported_as_stored(tmp_path: Path) -> None:
    report = killed(tmp_path, create=3, log=5, turn=1, intake=4, compaction=23)
    assert report.failures == []
    assert report.kills.keys() == {"create", "log", "turn", "intake", "compaction"}
    assert sum(report.kills.values()) >= 200
