"""A process that is killed at some statement leaves a consistent database; `make soak` tries every statement."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.killing import killed


@pytest.mark.long
def test_a_process_killed_at_any_statement_loses_nothing_that_was_reported_as_stored(tmp_path: Path) -> None:
    report = killed(tmp_path, create=31, log=61, turn=29, intake=61, compaction=151, compression=61)
    assert report.failures == []
    assert report.kills.keys() == {"create", "log", "turn", "intake", "compaction", "compression"}
    assert sum(report.kills.values()) >= 15


@pytest.mark.long
def test_a_process_killed_at_any_message_to_postgres_loses_nothing_that_was_reported_as_stored(tmp_path: Path) -> None:
    report = killed(tmp_path, postgres_create=47, postgres_log=97)
    assert report.failures == []
    assert report.kills.keys() == {"postgres create", "postgres log"}
    assert sum(report.kills.values()) >= 4
