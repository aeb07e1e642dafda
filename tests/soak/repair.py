"""Repairs every damaged file of the corpus: `python -m tests.soak.repair [ROUNDS] [SEED]`.

Each round damages other cells, pages and frames. A round takes about three minutes.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections import Counter
from pathlib import Path

import anyio

from tests.store.damaged_files import build_whole, check, corpus, with_log


async def main(rounds: int, seed: int) -> int:
    """Return the number of files for which something did not hold."""
    directory = Path(tempfile.mkdtemp(prefix="crow-soak-"))
    outcomes: Counter[str] = Counter()
    failures = 0
    try:
        whole = await build_whole(directory / "whole.db", turns=16)
        logged = await with_log(directory / "logged.db", whole, *(f"<{90_000 + turn}> logged" for turn in range(6)))
        small = await build_whole(directory / "small.db", turns=4)
        other = await with_log(directory / "other.db", small, "<95000> other")
        for number in range(rounds):
            for damaged in corpus(whole, logged, other, seed=seed + number):
                path = directory / "damaged" / "crow.db"
                path.parent.mkdir()
                try:
                    done = await check(path, damaged, logged if damaged.of_logged else whole)
                    outcomes[done.outcome if done else "refused"] += 1
                except Exception as error:  # noqa: BLE001  counted and shown
                    failures += 1
                    print(
                        f"seed {seed + number}, {damaged.name}: {type(error).__name__}: {str(error)[:500]}", flush=True
                    )
                shutil.rmtree(path.parent)
            print(f"seed {seed + number}: {dict(outcomes)}, {failures} failed", flush=True)
    finally:
        shutil.rmtree(directory)
    return failures


if __name__ == "__main__":
    rounds, seed = ([int(argument) for argument in sys.argv[1:]] + [3, 1][len(sys.argv) - 1 :])[:2]
    sys.exit(bool(anyio.run(main, rounds, seed)))
