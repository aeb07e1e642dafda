"""Compares crow's accounts with those of an endpoint over many random turns. Run with `make soak-accounts`.

SOAK_TURNS is the number of turns on each wire (1000), SOAK_SEED the seed of the random choices (1), SOAK_WIRES the
wires (all three), SOAK_MINUTES the most that each wire may take (40; a busy machine needs 6 to 15).
"""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from pathlib import Path

from tests.support.acp_client import CrowProcess
from tests.support.fake_endpoint import FakeEndpoint
from tests.support.ledger import Driver, settings_for, stats_of

ROOT = Path(__file__).parents[2]


async def compare(folder: Path, wire: str, turns: int, seed: int) -> None:
    """Run `turns` turns on a wire in one process, with 8 sessions, and print what was compared."""
    home, place = folder / "home", folder / "work"
    for directory in (home, place):
        directory.mkdir()
    (place / "README.md").write_text("# Nest\nTwigs and string.\n")
    (home / "config.toml").write_text(settings_for(wire))
    env = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), "CROW_HOME": str(home), "CROW_SANDBOX": "off"}
    began = time.monotonic()
    async with FakeEndpoint() as endpoint:
        chosen = {"OPENAI_BASE_URL": endpoint.base_url, "OPENAI_API_KEY": "sk-test-0123456789", "CROW_MODEL": "alpha"}
        async with CrowProcess(None, env=env | chosen, cwd=place) as agent:
            await agent.initialize()
            driver = Driver(agent, endpoint, home, place, seed)
            await driver.run(turns, sessions=8)
            for number in range(8):
                await driver.check_command(f"s{number}")
    driver.check_sums(await stats_of(env))
    charges = driver.ledger.charges
    kinds = ", ".join(f"{name} {count}" for name, count in sorted(driver.kinds.items()))
    print(f"{wire}: {driver.turns} turns in {time.monotonic() - began:.0f} s: {kinds}")
    print(
        f"{len(charges)} requests that the endpoint charged for, all counted once; "
        f"{driver.estimated} not or not wholly reported, all marked as estimated"
    )
    for name in ("alpha", "beta"):
        own = [charge for charge in charges if charge.model == name]
        sent, made = sum(charge.sent for charge in own), sum(charge.made for charge in own)
        print(f"{name}: {len(own)} requests, {sent:,} tokens in, {made:,} out in the ledger")


if __name__ == "__main__":
    turns, seed = int(os.environ.get("SOAK_TURNS", "1000")), int(os.environ.get("SOAK_SEED", "1"))
    minutes = float(os.environ.get("SOAK_MINUTES", "40"))
    for wire in os.environ.get("SOAK_WIRES", "chat responses messages").split():
        with tempfile.TemporaryDirectory() as name:
            asyncio.run(asyncio.wait_for(compare(Path(name), wire, turns, seed), minutes * 60))
