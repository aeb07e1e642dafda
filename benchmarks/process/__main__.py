"""Measures the real process as an editor would: `python -m benchmarks.process [--only NAME ...]`.

One thread starts `crow acp` like an editor and drives it line by line without an SDK. The endpoint runs in another
process and notes when requests arrive and bytes leave. The floors are measured in the same run: `import acp` alone,
and the smallest agents without packages (column floor) and on the SDKs (column SDKs), which store nothing. Needs
Linux's /proc for CPU and memory.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from benchmarks.process import cancels, starts, streams, turns
from benchmarks.process.bench import Bench
from benchmarks.process.endpoint import endpoint
from benchmarks.rows import Row, arguments, report

SCENES: Mapping[str, Callable[[Bench], list[Row]]] = {
    "start": starts.starts,
    "request": starts.first_requests,
    "resident": starts.resident,
    "new": starts.sessions,
    "history": turns.history,
    "first": turns.first_chunks,
    "stream": streams.stream,
    "chunks": streams.chunks,
    "steps": turns.steps,
    "output": turns.outputs,
    "many": streams.many,
    "paced": streams.paced,
    "cancel": cancels.cancels,
    "exit": starts.exits,
    "idle": starts.idle,
}


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--only", nargs="+", choices=SCENES, default=list(SCENES), help="measure these alone")
    options = parser.parse_args()
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="crow-bench-", ignore_cleanup_errors=True) as directory, endpoint() as fake:
        bench = Bench(fake, Path(directory).resolve())
        for name in options.only:
            since = time.monotonic()
            rows += SCENES[name](bench)
            print(f"{name}: {time.monotonic() - since:.1f} s", file=sys.stderr, flush=True)
    report(rows, options.json)


if __name__ == "__main__":
    main()
