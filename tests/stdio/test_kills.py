"""Kills the real process at random moments of a turn."""

from __future__ import annotations

from pathlib import Path
from random import Random

from tests.stdio.conftest import StartCrow
from tests.stdio.killed_process import kill_in_turns
from tests.support.amounts import IS_SOAK


async def test_a_process_killed_again_and_again_loses_nothing_that_was_shown(
    crow: StartCrow, home: Path, place: Path
) -> None:
    await kill_in_turns(crow, place, home / "crow.db", kills=5 if IS_SOAK else 3, chance=Random(4))
