"""Kills at every SQL statement and at random moments of the real process, for SOAK_S seconds each."""

from __future__ import annotations

import os
import time
from collections import Counter
from pathlib import Path
from random import Random

import pytest

from tests.stdio.conftest import StartCrow, crow, home, place  # noqa: F401  (fixtures)
from tests.stdio.killed_process import kill_in_turns
from tests.support.killing import killed

SOAK_S = float(os.environ.get("SOAK_S", "120"))


def test_kills_at_every_statement(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    since, kills = time.monotonic(), Counter[str]()
    for number in range(1_000_000):
        report = killed(
            tmp_path / str(number),
            create=1,
            log=1,
            turn=1,
            intake=1,
            compaction=1,
            compression=1,
            postgres_create=1,
            postgres_log=1,
        )
        assert report.failures == []
        kills.update(report.kills)
        if time.monotonic() - since > SOAK_S:
            break
    with capsys.disabled():
        print(f"\nkilled at statements: {kills.total()} ({dict(kills)}), nothing lost")


async def test_kills_of_the_real_process(
    crow: StartCrow,  # noqa: F811
    home: Path,  # noqa: F811
    place: Path,  # noqa: F811
    capsys: pytest.CaptureFixture[str],
) -> None:
    since, kills = time.monotonic(), 0
    while time.monotonic() - since < SOAK_S:
        seed = time.time_ns()
        home.joinpath("crow.db").unlink(missing_ok=True)
        try:
            await kill_in_turns(crow, place, home / "crow.db", kills=10, chance=Random(seed))
        except AssertionError as error:
            raise AssertionError(f"seed {seed}") from error
        kills += 10
    with capsys.disabled():
        print(f"\nkilled processes: {kills}, nothing lost")
