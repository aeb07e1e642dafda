"""A floor: the agent without packages, which also stores how each turn ended.

It writes one row in one transaction, flushed to disk by SQLite in a thread, before it answers the prompt. It shows
the part of crow's figures that the disk and the thread switch take.
"""

from __future__ import annotations

import asyncio
import os
import sqlite3
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from benchmarks.floors.raw_agent import RawAgent, serve


class KeptAgent(RawAgent):
    """Writes to a database in `CROW_HOME`."""

    def __init__(self) -> None:
        super().__init__()
        home = Path(os.environ["CROW_HOME"])
        home.mkdir(parents=True, exist_ok=True)
        self.database = sqlite3.connect(home / "kept.db", isolation_level=None, check_same_thread=False)
        self.database.execute("PRAGMA journal_mode = WAL")
        self.database.execute("PRAGMA synchronous = FULL")
        self.database.execute("PRAGMA wal_autocheckpoint = 0")
        self.database.execute("CREATE TABLE ends (id INTEGER PRIMARY KEY, session TEXT, stop TEXT)")
        self.thread = ThreadPoolExecutor(1)

    async def keep(self, session: str, stop: str) -> None:
        await asyncio.get_running_loop().run_in_executor(self.thread, self.insert, session, stop)

    def insert(self, session: str, stop: str) -> None:
        self.database.execute("INSERT INTO ends (session, stop) VALUES (?, ?)", (session, stop))


if __name__ == "__main__":
    asyncio.run(serve(KeptAgent()))
