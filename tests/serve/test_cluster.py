"""Three servers on one PostgreSQL database, with faults under load.

`make soak-cluster` does the same for longer. It also fails if a client shows something other than the log.
"""

from __future__ import annotations

import pytest

from tests.soak.cluster import run_round
from tests.support.postgres import OwnServer


@pytest.mark.long
@pytest.mark.timeout(900)  # it takes a quarter of a minute, but has ten processes that need the processor
async def test_servers_on_one_database_lose_nothing_and_run_no_command_twice_whatever_fails() -> None:
    async with OwnServer.open() as server:
        report = await run_round(server, seed=3, faults=6, slow=5, pause_s=0.2, lease_s=2, sessions=3)
    assert report.failures == []
    assert report.faults.total() >= 6
    assert report.counts["prompts answered"] >= 3
