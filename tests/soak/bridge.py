"""Cuts, half-closes, stalls, delays and splits connections of a bridge: `python -m tests.soak.bridge`.

SOAK_CUTS faults (1000) from SOAK_SEED (1). After each hundred, the transcripts are compared with the log.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from collections import Counter
from pathlib import Path

from tests.bridge.test_faults import run_turns

ROUND = 100


async def main() -> None:
    cuts, seed = int(os.environ.get("SOAK_CUTS", "1000")), int(os.environ.get("SOAK_SEED", "1"))
    since, faults = time.monotonic(), Counter[str]()
    with tempfile.TemporaryDirectory(prefix="crow-soak-") as directory:
        while faults.total() < cuts:
            wanted = min(ROUND, cuts - faults.total())
            faults += Counter(await run_turns(Path(directory) / f"{seed}.sock", seed=seed, faults=wanted))
            seed += 1
            print(f"{faults.total()} faults in {time.monotonic() - since:.0f} s: {dict(faults)}", flush=True)
    print("every transcript equals its log, every prompt ran once, every permission was shown once")


if __name__ == "__main__":
    asyncio.run(main())
