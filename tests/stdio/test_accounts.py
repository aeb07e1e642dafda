"""Tokens and cost, compared with the accounts that an endpoint keeps."""

from __future__ import annotations

import os
from pathlib import Path

import anyio

from tests.stdio.conftest import StartCrow
from tests.support.fake_endpoint import FakeEndpoint
from tests.support.ledger import SETTINGS, Driver, stats_of


async def test_every_request_is_counted_once_as_the_endpoint_reports_it(
    crow: StartCrow, home: Path, place: Path, endpoint: FakeEndpoint
) -> None:
    await anyio.Path(home).mkdir()
    await anyio.Path(home / "config.toml").write_text(SETTINGS)
    async with crow(endpoint=endpoint, env={"CROW_MODEL": "alpha"}) as agent:
        await agent.initialize()
        driver = Driver(agent, endpoint, home, place, seed=5)
        await driver.run(26)
        for mark in ("s0", "s1", "s2"):
            await driver.check_command(mark)
    driver.check_sums(await stats_of({**os.environ, "CROW_HOME": str(home)}))
    assert driver.estimated > 0
