"""Random orders of turns, kills, takeovers, loads and broken connections: `python -m tests.soak.feed [ORDERS] [SEED]`.

After each order, every client must show what a client that loads the session then shows.
"""

from __future__ import annotations

import asyncio
import sys
import time

from tests.support.feed_orders import check_order

EACH = 1_000


def main() -> None:
    orders, first = int(sys.argv[1]) if len(sys.argv) > 1 else 10_000, int(sys.argv[2]) if len(sys.argv) > 2 else 1
    since = time.monotonic()
    for number in range(orders):
        try:
            asyncio.run(check_order(first + number))
        except BaseException:
            print(f"seed {first + number} failed", flush=True)
            raise
        if (number + 1) % EACH == 0:
            print(f"{number + 1} orders in {time.monotonic() - since:.0f} s", flush=True)
    print("every client shows what a fresh load shows: nothing twice, nothing missing")


if __name__ == "__main__":
    main()
