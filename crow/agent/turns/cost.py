"""Stops turns that cost too much."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from crow.agent.history.branch import Branch
from crow.agent.turns.adapters import SessionSettings
from crow.domain.entries import Assistant
from crow.llm import ModelInfo


class Budget:
    """Compares the cost of a session, and the cost of each turn, with the user's limits. Subagents share the budget of
    their session.

    When the session has reached its limit, the turn stops. The next turn starts a new allowance of the same amount. A
    session that has already reached its limit when it is opened also starts with a new allowance.
    """

    def __init__(
        self,
        branch: Branch,
        settings: Callable[[], SessionSettings],
        report: Callable[[str, str], Awaitable[None]],
    ) -> None:
        self._branch = branch
        self._settings = settings
        self._report = report
        self._opened_at = branch.row.cost
        """The cost of the session when it was opened. This cost and the next two are in USD."""
        self._turn_start = branch.row.cost
        """The cost of the session when the turn began."""
        self._session_start: float | None = None
        """The cost of the session when its present allowance began. None until the first allowance is used up."""
        self._has_reached_session_limit = False
        self._has_told_unknown_prices = False

    def begin_turn(self) -> None:
        """Remember the cost of the session before this turn."""
        self._turn_start = self._branch.row.cost
        if self._has_reached_session_limit:
            self._session_start, self._has_reached_session_limit = self._branch.row.cost, False

    async def why_stop(self, branch: Branch, info: ModelInfo) -> str:
        """If the turn has to stop before its next request, return a sentence that tells the user why. Otherwise return
        an empty string. `branch` is the branch of the session or of a subagent, and `info` describes its model."""
        settings = self._settings()
        per_turn, per_session = settings.cost_per_turn, settings.cost_per_session
        if per_turn is None and per_session is None:
            return ""
        if branch is not self._branch:
            await self._branch.refresh_cost()
        await self._tell_unknown_prices(branch, info)
        spent = self._branch.row.cost - self._turn_start
        if words := self._session_words():
            return f"Stopped: {words}"
        if per_turn is not None and spent >= per_turn:
            return (
                f"Stopped: this turn has cost {_dollars(spent)}, and limits.cost_per_turn is {per_turn:g}. "
                "Send another prompt to continue."
            )
        return ""

    def is_spent(self) -> bool:
        """Return whether the session has reached its cost limit, or the last turn has reached the limit for one turn.
        If so, crow makes no request until the next prompt."""
        per_turn = self._settings().cost_per_turn
        if per_turn is not None and self._branch.row.cost - self._turn_start >= per_turn:
            return True
        return self._has_reached_session_limit or self._is_session_spent()

    async def end_turn(self) -> None:
        """If the last request of the turn brought the session to its limit, tell the user."""
        if not self._has_reached_session_limit and (words := self._session_words()):
            await self._report("Cost limit reached", words[0].upper() + words[1:])

    def _is_session_spent(self) -> bool:
        limit, start = self._settings().cost_per_session, self._session_start
        if limit is None:
            return False
        if start is None:
            start = self._opened_at if self._opened_at >= limit else 0.0
        return self._branch.row.cost - start >= limit

    def _session_words(self) -> str:
        if not self._is_session_spent():
            return ""
        self._has_reached_session_limit = True
        limit = self._settings().cost_per_session or 0.0
        return (
            f"this session has cost {_dollars(self._branch.row.cost)}, and limits.cost_per_session is {limit:g}. "
            f"Send another prompt to spend up to {_dollars(limit)} more."
        )

    async def _tell_unknown_prices(self, branch: Branch, info: ModelInfo) -> None:
        """Tell the user, once per session, that requests to a model with unknown prices do not count towards the
        limits."""
        if self._has_told_unknown_prices or (info.input_price is not None and info.output_price is not None):
            return
        # The prices may become known with the first answer, because crow then reads the endpoint's list of models.
        if any(isinstance(entry.body, Assistant) and entry.body.endpoint == info.endpoint for entry in branch.entries):
            self._has_told_unknown_prices = True
            await self._report(
                f"The prices of {info.name} are unknown",
                "Requests to this model do not count towards limits.cost_per_turn and limits.cost_per_session. Set "
                "input_price and output_price in [model] or [models.NAME].",
            )


def _dollars(cost: float) -> str:
    """Format a cost in USD."""
    return f"${cost:.4f}" if cost < 1 else f"${cost:.2f}"
