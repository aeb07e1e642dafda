"""Runs random orders of what a session and nine subagents do: `python -m tests.soak.children [ROUNDS] [SEED]`.

The subagents work in layers of their own. In every round, processes are killed while they edit, keep and merge.
"""

from __future__ import annotations

import random
import shutil
import sys
import tempfile
import traceback
from collections import Counter
from pathlib import Path

from tests.tools.layers.interleave import check_interleaving


def main(rounds: int, seed: int) -> int:
    """Return the number of rounds in which something did not hold."""
    counts: Counter[str] = Counter()
    failures = 0
    for number in range(seed, seed + rounds):
        directory = Path(tempfile.mkdtemp(prefix="crow-soak-"))
        try:
            counts.update(check_interleaving(directory, random.Random(number)))
        except Exception:  # noqa: BLE001 - counted and shown
            failures += 1
            print(f"seed {number}\n{traceback.format_exc()[-2_000:]}", flush=True)
        finally:
            shutil.rmtree(directory, ignore_errors=True)
    for what, count in counts.most_common():
        print(f"{count:8,} {what}")
    print(f"{failures:8,} failures in {rounds:,} rounds")
    return failures


if __name__ == "__main__":
    given = [int(argument) for argument in sys.argv[1:]]
    sys.exit(min(1, main(*given, *(1_000, 1)[len(given) :])))
