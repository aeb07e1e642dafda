"""Runs random destructive lines in layers, undoes and redoes them: `python -m tests.soak.layers [ROUNDS] [SEED]`.

In two of three rounds, processes are killed while they keep and undo.
"""

from __future__ import annotations

import random
import shutil
import sys
import tempfile
import traceback
from collections import Counter
from pathlib import Path

from tests.tools.layers.trees import LINES, check_round


def main(rounds: int, seed: int) -> int:
    """Return the number of rounds in which something did not hold."""
    outcomes: Counter[str] = Counter()
    failures = 0
    for number in range(seed, seed + rounds):
        rng = random.Random(number)
        lines = rng.sample(LINES, rng.randint(1, 3))
        directory = Path(tempfile.mkdtemp(prefix="crow-soak-"))
        try:
            outcomes[check_round(directory, rng, "; ".join(f"({line})" for line in lines), kills=number % 3 > 0)] += 1
        except Exception:  # noqa: BLE001 - counted and shown
            failures += 1
            print(f"seed {number}: {lines}\n{traceback.format_exc()[-2_000:]}", flush=True)
        finally:
            shutil.rmtree(directory, ignore_errors=True)
    for outcome, count in outcomes.most_common():
        print(f"{count:6,} {outcome}")
    print(f"{failures:6,} failures in {rounds:,} rounds")
    return failures


if __name__ == "__main__":
    given = [int(argument) for argument in sys.argv[1:]]
    sys.exit(min(1, main(*given, *(1_000, 1)[len(given) :])))
