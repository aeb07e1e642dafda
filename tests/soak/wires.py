"""Random turns on all wires, through kills, compactions, undo and changed models and wires: `make soak-wires`.

SOAK_TURNS is the number of turns (1000), SOAK_SEED the seed of the random choices (1).
"""

from __future__ import annotations

import asyncio
import os
import random
import tempfile
import time
from pathlib import Path

from tests.support.acp_client import CrowProcess
from tests.support.checking_endpoint import CheckingEndpoint, RandomTurns, write_settings

ROOT = Path(__file__).parents[2]
SESSION_TURNS = 50


async def check(folder: Path, turns: int, seed: int) -> None:
    """Run `turns` turns in sessions of `SESSION_TURNS`, and print what came back to the endpoint."""
    chance, began = random.Random(seed), time.monotonic()
    place, home = folder / "work", folder / "home"
    place.mkdir()
    (place / "README.md").write_text("# Nest\n" + "Twigs and string.\n" * 100)
    env = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), "CROW_HOME": str(home), "CROW_SANDBOX": "off"}
    async with CheckingEndpoint(chance) as endpoint:
        write_settings(home, endpoint.base_url)
        for start in range(0, turns, SESSION_TURNS):
            session = RandomTurns(lambda: CrowProcess(None, env=env, cwd=place), endpoint, place, chance)
            await session.run(min(SESSION_TURNS, turns - start))
            assert endpoint.faults == [], endpoint.faults[:3]
    kinds = ", ".join(f"{kind} {count}" for kind, count in sorted(endpoint.kinds.items()))
    print(f"{turns} turns in {time.monotonic() - began:.0f} s: {kinds}")
    for wire in endpoint.wires:
        print(f"{wire}: {endpoint.returned[wire]} answers came back whole, {endpoint.plain[wire]} without items")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        asyncio.run(check(Path(name), int(os.environ.get("SOAK_TURNS", "1000")), int(os.environ.get("SOAK_SEED", "1"))))
