"""Remembers which title, mode, options and cost of a session its clients know."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from crow.domain.events import ContextMeasured, Event, ModeChanged, OptionsChanged, TitleChanged
from crow.store import SessionRow

_SHOWN_KEYS = ("thought_level", "auto_compact")
"""The keys of a session's configuration that are shown to clients as config options."""


@dataclass(slots=True)
class Told:
    """The values of a session's row that its clients were told last."""

    title: str | None
    mode: str
    options: tuple[object, ...]
    """The model and the other values that config options show."""
    cost: float | None = None
    """In USD. None if no cost was sent."""

    @classmethod
    def of(cls, row: SessionRow) -> Told:
        """Return the values that clients get when they open the session."""
        return cls(row.title, row.mode, _options_of(row))

    def note(self, event: Event, row: SessionRow) -> None:
        """Take over the values in an event that is being sent to the clients."""
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
        """Yield an event for each value of `row` that the clients do not know yet, except for the cost."""
        if row.title != self.title:
            yield TitleChanged(title=row.title)
        if row.mode != self.mode:
            yield ModeChanged(mode=row.mode)
        if _options_of(row) != self.options:
            yield OptionsChanged()


def _options_of(row: SessionRow) -> tuple[object, ...]:
    return row.model, *(row.config.get(name) for name in _SHOWN_KEYS)
