"""Random sessions of the real process, each built again from its log, with its case file.

Run by `make soak-replay`. SOAK_SESSIONS (1000) and SOAK_SEED (1000) change it.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.stdio.conftest import StartCrow, crow, home, place
from tests.stdio.test_replay import Commands, check_session, run

__all__ = ["crow", "home", "place", "run"]

SESSIONS = int(os.environ.get("SOAK_SESSIONS", "1000"))
SEED = int(os.environ.get("SOAK_SEED", "1000"))


@pytest.mark.parametrize("number", range(SESSIONS))
async def test_every_request_is_identical(
    crow: StartCrow,
    home: Path,
    tmp_path: Path,
    run: Commands,
    number: int,
) -> None:
    wire = ("chat", "responses", "messages")[number % 3]
    await check_session(crow, home, tmp_path, run, wire=wire, seed=SEED + number)
