"""The form in which one request is sent. It adapts to the endpoint's refusals."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import reduce

from crow.domain.messages import WireName
from crow.llm.dialect import Dialect, is_wire
from crow.llm.errors import ErrorBody
from crow.llm.facts import Refusal


@dataclass(slots=True, kw_only=True)
class RequestForm:
    """The form in which one request is sent. It changes until the endpoint accepts the request.

    The request leaves out the parts in `refused`, and those in `known` that are in neither `tested` nor `restored`. A
    part that the endpoint refuses by name is added to `refused`. After a refusal that names no part, all parts in
    `tested` move to `doubted`; if there are none, parts in `known` are added to `restored`.
    """

    session: str
    """The cache key of the session."""
    configured: Dialect
    """The endpoint's dialect as configured, before any refusal."""
    known: dict[str, Refusal]
    """The refusals that apply to the session."""
    tested: set[str] = field(default_factory=set)
    """Parts in `known` that this request contains anyway, to test whether the endpoint still refuses them."""
    refused: dict[str, Refusal] = field(default_factory=dict)
    """The parts that the endpoint has refused in this request."""
    doubted: set[str] = field(default_factory=set)
    """Parts that were being tested when the endpoint refused the request without a usable reason. The request no longer
    contains them."""
    restored: set[str] = field(default_factory=set)
    """Parts in `known` that were left out when the endpoint refused the request. The request now contains them, because
    the endpoint may require them."""
    moved: tuple[ErrorBody, WireName] | None = None
    """The first refusal of a whole wire, and this wire. None if no wire was refused."""
    is_back: bool = False
    """Whether the request returned to the wire of `moved`, because the endpoint refused all other wires, too."""
    is_settled: bool = False
    """Whether crow has learned from this request."""

    def left_out(self) -> tuple[Refusal, ...]:
        """Return the refusals whose parts this request leaves out, oldest first."""
        sent = self.tested | self.restored
        return (*(each for each in self.known.values() if each.part not in sent), *self.refused.values())

    @property
    def dialect(self) -> Dialect:
        """The dialect of this request."""
        return self.dialect_without()

    def dialect_without(self, *parts: str) -> Dialect:
        """Return the dialect that this request would have if it also left out `parts`."""
        # The wire comes first, because the other parts belong to one wire.
        found = sorted((*(each.part for each in self.left_out()), *parts), key=is_wire, reverse=True)
        return reduce(Dialect.refusing, found, self.configured)

    @property
    def max_output(self) -> int | None:
        """The largest output limit that the endpoint is known to accept."""
        return min((each.limit for each in self.left_out() if each.limit is not None), default=None)

    def revert(self, words: str) -> bool:
        """Change the form after a refusal that names no part to leave out. If parts are being tested, leave them out
        again. Otherwise, send again the left-out parts that `words`, the text of the refusal, mentions, or all left-out
        parts if it mentions none. Return False if there is nothing to change."""
        if self.tested:
            self.doubted, self.tested = self.doubted | self.tested, set()
            return True
        absent = self.known.keys() - self.refused.keys() - self.doubted - self.restored
        # The name of a part may begin with its wire.
        self.restored |= {part for part in absent if part.rpartition(".")[2] in words} or absent
        return bool(absent)

    def go_back(self) -> ErrorBody | None:
        """Return to the first wire that was refused, to try other forms of the request on it. Return the refusal of
        that wire. Return None if no wire was refused, or if the request has returned before."""
        if self.moved is None or self.is_back:
            return None
        self.is_back = True
        self.refused = {part: each for part, each in self.refused.items() if not is_wire(part)}
        return self.moved[0]

    @property
    def in_question(self) -> frozenset[str]:
        """The parts in `known` that this request contains. If the endpoint accepts the request, it no longer refuses
        these parts."""
        return frozenset(self.tested | self.restored) - self.refused.keys()
