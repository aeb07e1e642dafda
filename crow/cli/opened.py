"""What a command on sessions works with: its options, the settings, the open database."""

from __future__ import annotations

import argparse
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

if TYPE_CHECKING:
    from crow.settings import Loaded
    from crow.store.sqlite import SqliteStore
    from crow.store.upkeep import Upkeep

__all__ = ["Act", "Opened"]


class Opened(NamedTuple):
    """Closed by whoever opened it."""

    options: argparse.Namespace
    loaded: Loaded
    store: SqliteStore
    upkeep: Upkeep

    @property
    def cwd(self) -> str | None:
        """The directory that `--cwd` names, absolute; None if it was not given."""
        given: str | None = getattr(self.options, "cwd", None)
        return str(Path(given).resolve()) if given else None

    async def found(self) -> list[str]:
        """The ids of the sessions that the command line names, each once.

        :raises ~crow.domain.errors.ArgumentError: one names none, or several.
        """
        return list(dict.fromkeys([await self.upkeep.find(name) for name in self.options.ids]))


Act: TypeAlias = Callable[[Opened], Awaitable[None]]
