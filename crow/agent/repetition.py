"""Notices a model that goes round in circles.

Strategy: a call counts as repeated when it gives the result that it gave before, for as long as the turn brings
nothing new; one call with a result not seen in this turn starts the counting anew. So a command that is repeated while
files change is no circle, nor is one whose output differs; two calls in turns are. Knows fingerprints alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import TypeAlias

from crow.domain.entries import ToolResult
from crow.domain.messages import ToolCall

__all__ = ["GIVE_UP", "POINT_OUT", "Repetition"]

POINT_OUT = frozenset({3, 10, 20})
"""After so many times the model is told."""

GIVE_UP = 30
"""After so many the turn ends."""

Fingerprint: TypeAlias = tuple[str, str, bool, int, int]


class Repetition:
    """The calls of one turn with their results. `count` is how often the newest step's most repeated one was made,
    and `name` its tool."""

    def __init__(self) -> None:
        self.count = 0
        self.name = ""
        self._known: set[Fingerprint] = set()
        self._times: Counter[Fingerprint] = Counter()

    def add(self, step: Iterable[tuple[ToolCall, ToolResult]]) -> None:
        """Take a step's calls and results."""
        names = {fingerprint(call, result): call.name for call, result in step}
        if not names.keys() <= self._known:
            self._times.clear()
        self._known |= names.keys()
        self._times.update(names.keys())
        self.count, self.name = max(
            ((self._times[key], name) for key, name in names.items()), default=(0, ""), key=lambda found: found[0]
        )


def fingerprint(call: ToolCall, result: ToolResult) -> Fingerprint:
    """Two calls are the same if tool, arguments and result are; Python's own hash is the quickest of a long text."""
    return call.name, call.arguments, result.is_error, len(result.text), hash(result.text)
