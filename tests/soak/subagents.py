"""Random orders of ends, cancels, loads and kills of subagents, in the real process. Prints what was done.

`python -m tests.soak.subagents [ORDERS] [SEED]`
"""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from random import Random

from tests.support.acp_client import CrowProcess
from tests.support.fake_endpoint import FakeEndpoint
from tests.support.random_tasks import Orders

ROOT = Path(__file__).parents[2]
BATCH = 10


async def batch(directory: Path, seed: int, *, is_shown: bool) -> Counter[str]:
    place, home = directory / "work", directory / "home"
    place.mkdir(parents=True)

    def start(*, endpoint: FakeEndpoint) -> CrowProcess:
        env = {
            "PATH": os.environ["PATH"],
            "PYTHONPATH": str(ROOT),
            "CROW_HOME": str(home),
            "CROW_SANDBOX": "off",
            "OPENAI_BASE_URL": endpoint.base_url,
            "OPENAI_API_KEY": "sk-test-0123456789",
            "CROW_MODEL": "fake-model",
        }
        return CrowProcess(None, env=env, cwd=place)

    async with FakeEndpoint() as endpoint:
        orders = Orders(
            crow=start,
            endpoint=endpoint,
            place=place,
            database=home / "crow.db",
            chance=Random(seed),
            offered={"subagents": {}} if is_shown else {},
        )
        await orders.run(BATCH)
    return orders.done


def main(orders: int, seed: int) -> None:
    since, done = time.monotonic(), Counter[str]()
    for number in range(max(1, orders // BATCH)):
        with tempfile.TemporaryDirectory() as directory:
            try:
                done += asyncio.run(batch(Path(directory), seed + number, is_shown=number % 2 == 0))
            except BaseException:
                print(f"failed with seed {seed + number}", file=sys.stderr)
                raise
        print(f"\r{done['orders']} orders", end="", file=sys.stderr, flush=True)
    counts = ", ".join(f"{count} {name}" for name, count in sorted(done.items()))
    print(f"\r{counts}; nothing lost, in {time.monotonic() - since:.0f} s (seeds from {seed})")


if __name__ == "__main__":
    main(*(int(each) for each in sys.argv[1:3]), *(1_000, 1)[len(sys.argv) - 1 :])
