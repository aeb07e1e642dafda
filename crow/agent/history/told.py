"""What the clients of a session were last told of its row."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from crow.domain.events import ContextMeasured, Event, ModeChanged, OptionsChanged, TitleChanged
from crow.store import SessionRow

SHOWN_KEYS = ("thought_level", "auto_compact")
"""The keys of a session's configuration that are shown to clients as config options."""


@dataclass(slots=True)
class Told:
    """What the clients of a session were last told of its row."""

    title: str | None
    mode: str
    options: tuple[object, ...]
    """The model and the other values that config options show."""
    cost: float | None = None
    """In USD. None if no cost was sent."""

    @classmethod
    def of(cls, row: SessionRow) -> Told:
        """Return what clients learn when they open the session."""
        return cls(row.title, row.mode, _options_of(row))

    def note(self, event: Event, row: SessionRow) -> None:
        """Note an event that the clients are told now."""
        match event:
            case ContextMeasured(cost=cost):
                self.cost = cost
            case TitleChanged(title=title):
                self.title = title
            case ModeChanged(mode=mode):
                self.mode = mode
            case OptionsChanged():
                self.options = _options_of(row)

    def missing(self, row: SessionRow) -> Iterator[Event]:
        """Yield what the clients do not know of `row` yet, except for its cost."""
        if row.title != self.title:
            yield TitleChanged(title=row.title)
        if row.mode != self.mode:
            yield ModeChanged(mode=row.mode)
        if _options_of(row) != self.options:
            yield OptionsChanged()


def _options_of(row: SessionRow) -> tuple[object, ...]:
    return row.model, *(row.config.get(name) for name in SHOWN_KEYS)
