"""Checks that shown text is stored, replayed and sent back: `python -m tests.soak.shown [SESSIONS] [SEED]`.

Like `tests/agent/turns/test_shown_text.py`, with every cut of every fixture, and with more sessions. Half of their
streams are mutated. A failure prints its seed.
"""

from __future__ import annotations

import asyncio
import random
import sys
import tempfile
import time
import traceback
from pathlib import Path

from tests.llm.streams import FIXTURES
from tests.soak.parser import LARGEST, mutated, pieces
from tests.support.shown_text import Stream, check_draft, check_session

SESSIONS = 200
PROMPTS = 50


async def every_cut() -> int:
    """Cut each fixture after each byte, and let a later stream repeat it. Returns the number of cuts."""
    cuts = 0
    chance = random.Random(0)
    for fixture in FIXTURES:
        for at in range(len(fixture.stream) if len(fixture.stream) < LARGEST else 0):
            cuts += 1
            cut = Stream(pieces=pieces(fixture.stream[:at], chance), is_cut=True)
            shown = await check_draft(cut, fixture.tools)
            if at % 10 == 0:
                await check_draft(Stream(pieces=pieces(fixture.stream, chance)), fixture.tools, before=shown)
    return cuts


async def sessions(count: int, seed: int) -> int:
    """Run random sessions. Returns how many failed."""
    short = [fixture for fixture in FIXTURES if 0 < len(fixture.stream) < LARGEST]
    failures = 0
    for number in range(count):
        chance = random.Random(f"{seed} {number}")
        chosen = [mutated(chance, short) if chance.random() < 0.5 else chance.choice(short) for _ in range(PROMPTS)]
        streams = [(fixture.stream, fixture.tools) for fixture in chosen if fixture.stream]
        try:
            with tempfile.TemporaryDirectory() as directory:
                await check_session(Path(directory), streams, chance)
        except Exception:  # noqa: BLE001  that is what is looked for
            failures += 1
            print(f"session {number} of seed {seed}:")
            traceback.print_exc()
    return failures


def main(count: int, seed: int) -> int:
    began = time.monotonic()
    failures = asyncio.run(sessions(count, seed))
    print(
        f"{count:,} sessions of {PROMPTS} prompts in {time.monotonic() - began:.0f} s, {failures} failures", flush=True
    )
    began = time.monotonic()
    cuts = asyncio.run(every_cut())
    print(f"{cuts:,} cuts in {time.monotonic() - began:.0f} s")
    return 1 if failures else 0


if __name__ == "__main__":
    arguments = [int(argument) for argument in sys.argv[1:3]]
    sys.exit(main(*(arguments + [SESSIONS, 1][len(arguments) :])))
