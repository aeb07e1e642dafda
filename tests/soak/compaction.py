"""Random sessions, compacted again and again: `python -m tests.soak.compaction [SESSIONS] [SEED]`.

Strategy: what the tests do with two thousand sessions, with more, longer ones and any window: each is a talk of random
steps with a summariser that fails at will, and the laws of compaction are checked after every pass and before every
request. A failure prints the seed that makes its session again.
"""

from __future__ import annotations

import asyncio
import random
import sys
import time
import traceback
from collections import Counter

from tests.agent.test_compaction_laws import check_all, described, replayed_differently
from tests.support.compaction import Simulation, flaky

SESSIONS = 20_000
LONGEST = 40
FAILURE_RATES = (0.0, 0.1, 0.5, 0.9, 1.0)
OUTPUTS = (None, 1, 500, 4_000, 32_000, 10_000_000)


def simulation(seed: int, number: int) -> tuple[Simulation, int]:
    """The session number `number`, and how many steps it takes."""
    chance = random.Random(f"{seed} {number}")
    window = round(4_000 * 2 ** chance.uniform(0, 5))
    model = flaky(chance.choice(FAILURE_RATES), chance, described(window, chance.choice(OUTPUTS)))
    made = Simulation(seed=chance.randrange(2**32), window=window, model=model, ratio=chance.uniform(0.5, 3.5))
    return made, chance.randrange(1, LONGEST)


async def main(sessions: int, seed: int) -> int:
    """Run them. Returns the exit status."""
    outcomes, failures, requests = Counter[str](), 0, 0
    began = time.monotonic()
    for number in range(sessions):
        made, steps = simulation(seed, number)
        try:
            await made.run(steps, check_all)
            assert not replayed_differently(list(made.store.path("s"))), "the replay differs"
        except Exception:  # noqa: BLE001  that is what is looked for
            failures += 1
            print(f"session {number} of seed {seed}:\n{traceback.format_exc()}")
            if failures >= 5:
                break
        outcomes.update(done.result.outcome for done in made.passes)
        requests += len(made.requests)
    print(
        f"{number + 1:,} sessions with {requests:,} requests in {time.monotonic() - began:.0f} s: "
        f"{dict(outcomes)}, {failures} failures"
    )
    return 1 if failures else 0


if __name__ == "__main__":
    arguments = [int(argument) for argument in sys.argv[1:3]]
    sys.exit(asyncio.run(main(*(arguments + [SESSIONS, 1][len(arguments) :]))))
