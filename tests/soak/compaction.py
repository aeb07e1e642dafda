"""Compacts random sessions: `python -m tests.soak.compaction [SESSIONS] [SEED]`.

Like `tests/agent/compaction/test_laws.py`, with more and longer sessions and any window: random steps with an
unreliable summariser, checked after every compaction and before every request. Every tenth session is followed by
one against an endpoint whose window changes. A failure prints its seed.
"""

from __future__ import annotations

import asyncio
import random
import sys
import time
import traceback
from collections import Counter

from tests.agent.compaction.test_endpoints import HABITS, Habit, check_phases
from tests.agent.compaction.test_laws import check_all, described, replayed_differently
from tests.support.compaction import Simulation, flaky

SESSIONS = 20_000
LONGEST = 40
FAILURE_RATES = (0.0, 0.1, 0.5, 0.9, 1.0)
OUTPUTS = (None, 1, 500, 4_000, 32_000, 10_000_000)


def simulation(seed: int, number: int) -> tuple[Simulation, int]:
    """The session number `number` and its number of steps."""
    chance = random.Random(f"{seed} {number}")
    is_configured = chance.random() < 0.5
    window = round(4_000 * 2 ** chance.uniform(0 if is_configured else -4, 5))
    info = described(window, chance.choice(OUTPUTS), is_configured=is_configured)
    model = flaky(chance.choice(FAILURE_RATES), chance, info)
    made = Simulation(seed=chance.randrange(2**32), window=window, model=model, ratio=chance.uniform(0.5, 3.5))
    return made, chance.randrange(1, LONGEST)


async def talk(seed: int, number: int) -> int:
    """Talk to an endpoint whose window changes; returns the number of prompts."""
    chance = random.Random(f"{seed} window {number}")
    phases: list[tuple[int, Habit, int]] = [
        (round(4_000 * 2 ** chance.uniform(0, 6)), chance.choice(HABITS), chance.randrange(1, 12))
        for _ in range(chance.randrange(1, 6))
    ]
    return await check_phases(
        phases,
        seed=chance.randrange(2**32),
        ratio=chance.uniform(0.5, 2.0),
        reports=chance.random() < 0.5,
        burps=chance.random() < 0.5,
    )


async def main(sessions: int, seed: int) -> int:
    """Run them. Returns the exit code."""
    outcomes, failures, requests, prompts = Counter[str](), 0, 0, 0
    began = time.monotonic()
    for number in range(sessions):
        made, steps = simulation(seed, number)
        try:
            await made.run(steps, check_all)
            assert not replayed_differently(list(made.store.path("s"))), "the replay differs"
            prompts += await talk(seed, number) if number % 10 == 0 else 0
        except Exception:  # noqa: BLE001  that is what is looked for
            failures += 1
            print(f"session {number} of seed {seed}:\n{traceback.format_exc()}")
            if failures >= 5:
                break
        outcomes.update(done.result.outcome for done in made.passes)
        requests += len(made.requests)
    print(
        f"{number + 1:,} sessions with {requests:,} requests and {prompts:,} prompts to windows that change in "
        f"{time.monotonic() - began:.0f} s: {dict(outcomes)}, {failures} failures"
    )
    return 1 if failures else 0


if __name__ == "__main__":
    arguments = [int(argument) for argument in sys.argv[1:3]]
    sys.exit(asyncio.run(main(*(arguments + [SESSIONS, 1][len(arguments) :]))))
