"""Cuts, half-closes, stalls, delays and splits connections of a bridge: `python -m tests.soak.bridge`.

SOAK_CUTS faults (1000) from SOAK_SEED (1) with a small server of the tests, as many with `crow serve`, and as many with
`crow serve` and an editor that speaks version 2 of the protocol. After each round, the transcripts are compared with
the log.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from collections import Counter
from functools import partial
from pathlib import Path

from tests.bridge.test_faults import run_real_turns, run_turns

ROUND, REAL_ROUND = 100, 25


async def main() -> None:
    cuts, seed = int(os.environ.get("SOAK_CUTS", "1000")), int(os.environ.get("SOAK_SEED", "1"))
    for server, run, each in (
        ("the small server", lambda folder, **more: run_turns(folder / "crow.sock", **more), ROUND),
        ("crow serve", run_real_turns, REAL_ROUND),
        ("crow serve, version 2", partial(run_real_turns, is_v2=True), REAL_ROUND),
    ):
        since, faults = time.monotonic(), Counter[str]()
        while faults.total() < cuts:
            wanted = min(each, cuts - faults.total())
            with tempfile.TemporaryDirectory(prefix="crow-") as directory:
                faults += Counter(await run(Path(directory), seed=seed, faults=wanted))
            print(f"{server}, seed {seed}: {faults.total()} faults in {time.monotonic() - since:.0f} s", flush=True)
            seed += 1
        print(f"{server}: {dict(faults)}")
    print("every transcript equals its log; every prompt and command ran once; every permission was shown once")


if __name__ == "__main__":
    asyncio.run(main())
