"""Questions and remarks of crow when a user chats for the first time."""

from __future__ import annotations

import argparse
import asyncio
import shutil
import textwrap
from collections.abc import Callable

from crow.domain.text import plural, safe
from crow.runtime import importing
from crow.settings import OFFLINE, Loaded
from crow.terminal.connection import session_ids


def choose_model(problem: str, options: argparse.Namespace, log_in: Callable[[], int]) -> bool:
    """Tell the user why no model can be used, and offer `crow login` or the built-in model. Return whether a model can
    be used afterwards."""
    print(textwrap.fill(safe(problem), shutil.get_terminal_size().columns - 1, break_on_hyphens=False) + "\n")
    print("1) crow login: choose an endpoint, a key and a model")
    print("2) look around with the built-in offline model; it needs no key")
    print("3) leave")
    while True:
        try:
            answer = input("1, 2 or 3: ").strip()
        except (EOFError, KeyboardInterrupt):
            print()
            return False
        match answer:
            case "1":
                return log_in() == 0
            case "2":
                options.model = OFFLINE
                return True
            case "3":
                return False


async def importable_sessions(loaded: Loaded) -> list[str]:
    """Return sentences that say how many sessions of other tools can be imported."""
    with importing():
        from crow.store.importers import importable  # takes 10 ms, and only the first chat needs it

    found = await asyncio.to_thread(importable, await session_ids(loaded))
    return [
        f"{plural(one.sessions, 'session')} of {one.tool} in {one.path} can be imported:"
        f" crow sessions import --from {one.tool}"
        for one in found
    ]
