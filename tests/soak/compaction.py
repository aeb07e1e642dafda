"""Compacts random sessions: `python -m tests.soak.compaction [POINTS] [SEED] [PROCESSES]`.

Like `tests/agent/compaction/test_laws.py`, with more and longer sessions and windows of 4,000 to 2 million tokens. It
runs until there were that many decision points. A decision point is a moment at which crow decides whether to compact
and how; after each of them, and before every request, the laws are checked. Every tenth session is followed by one
against an endpoint whose window changes; its prompts are counted separately. A failure prints its seed.
"""

from __future__ import annotations

import asyncio
import itertools
import multiprocessing
import os
import random
import sys
import time
import traceback
from collections import Counter
from dataclasses import dataclass, field

from tests.agent.compaction.test_endpoints import HABITS, Habit, check_phases
from tests.agent.compaction.test_laws import check_all, described, replayed_differently
from tests.support.compaction import AnsweringModel, Simulation, flaky

POINTS = 1_000_000
MAX_FAILURES = 5
BATCH = 20
"""Sessions that a process runs before it reports."""

LENGTHS = (10, 40, 40, 40, 120)
FAILURE_RATES = (0.0, 0.1, 0.5, 0.9, 1.0)
OUTPUTS = (None, 1, 500, 4_000, 32_000, 10_000_000)


@dataclass
class Tally:
    """What was done. `counts` are printed."""

    sessions: int = 0
    points: int = 0
    requests: int = 0
    prompts: int = 0
    counts: dict[str, Counter[str]] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)

    def add(self, other: Tally) -> None:
        self.sessions += other.sessions
        self.points += other.points
        self.requests += other.requests
        self.prompts += other.prompts
        self.failures += other.failures
        for name, counter in other.counts.items():
            self.counts.setdefault(name, Counter()).update(counter)


def simulation(seed: int, number: int, ways: Counter[str]) -> tuple[Simulation, int]:
    """The session number `number` and its number of steps. Half of the windows are at most 64k, half are larger."""
    chance = random.Random(f"{seed} {number}")
    is_configured = chance.random() < 0.5
    doublings = chance.uniform(0 if is_configured else -4, 4) if chance.random() < 0.6 else chance.uniform(4, 9)
    window = min(2_000_000, round(4_000 * 2**doublings))
    info = described(window, chance.choice(OUTPUTS), is_configured=is_configured)
    compact_model: AnsweringModel | None = None
    if chance.random() < 0.2:
        small = described(chance.choice([4_000, 32_000]), chance.choice(OUTPUTS))
        compact_model = flaky(chance.choice(FAILURE_RATES), chance, small, ways)
    made = Simulation(
        seed=chance.randrange(2**32),
        window=window,
        model=flaky(chance.choice(FAILURE_RATES), chance, info, ways),
        compact_model=compact_model,
        ratio=chance.uniform(0.5, 3.5),
    )
    return made, chance.randrange(1, chance.choice(LENGTHS))


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


async def run_sessions(seed: int, first: int) -> Tally:
    """Run the sessions with the numbers from `first` on, one batch."""
    tally, ways = Tally(), Counter[str]()
    windows, outcomes, events = Counter[str](), Counter[str](), Counter[str]()
    for number in range(first, first + BATCH):
        made, steps = simulation(seed, number, ways)
        try:
            await made.run(steps, check_all)
            assert not replayed_differently(list(made.path())), "the replay differs"
            tally.prompts += await talk(seed, number) if number % 10 == 0 else 0
        except Exception:  # noqa: BLE001  that is what is looked for
            tally.failures.append(f"session {number} of seed {seed}:\n{traceback.format_exc()}")
        tally.sessions += 1
        tally.points += made.points
        tally.requests += len(made.requests)
        outcomes.update(done.result.outcome for done in made.passes)
        events.update(made.events)
        windows[band(made.window)] += made.points
    tally.counts = {
        "points by window": windows,
        "passes": outcomes,
        "in between": events,
        "answers to requests for a summary": ways,
    }
    return tally


def band(window: int) -> str:
    highest = next(limit for limit in (4, 16, 64, 256, 1_024, 2_000) if window <= limit * 1_000)
    return f"≤ {highest:>4}k"


def batch(job: tuple[int, int]) -> Tally:
    return asyncio.run(run_sessions(*job))


def main(points: int, seed: int, processes: int) -> int:
    """Run them. Returns the exit code."""
    total, began = Tally(), time.monotonic()
    jobs = ((seed, first) for first in itertools.count(0, BATCH))
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        waiting = [pool.apply_async(batch, (job,)) for job in itertools.islice(jobs, 2 * processes)]
        while total.points < points and len(total.failures) < MAX_FAILURES:
            done = waiting.pop(0).get()
            waiting.append(pool.apply_async(batch, (next(jobs),)))
            for failure in done.failures:
                print(failure, flush=True)
            if (total.points + done.points) * 10 // points > total.points * 10 // points:
                print(f"{total.points + done.points:,} points after {time.monotonic() - began:.0f} s", flush=True)
            total.add(done)
    seconds = time.monotonic() - began
    print(
        f"{total.points:,} decision points ({total.points / seconds:,.0f}/s) in {total.sessions:,} sessions with "
        f"{total.requests:,} requests, and {total.prompts:,} prompts to windows that change, in {seconds:.0f} s: "
        f"{len(total.failures)} failures"
    )
    for name, counter in total.counts.items():
        print(f"{name}: " + ", ".join(f"{key} {count:,}" for key, count in sorted(counter.items())))
    return 1 if total.failures else 0


if __name__ == "__main__":
    arguments = [int(argument) for argument in sys.argv[1:4]]
    sys.exit(main(*(arguments + [POINTS, 1, os.cpu_count() or 1][len(arguments) :])))
