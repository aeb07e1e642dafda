"""The log and the plan for tools that run without a session, or whose changes nobody undoes."""

from __future__ import annotations

from pathlib import Path

from crow.domain.entries import PlanItem
from crow.tools import RecallQuery


class NoSession:
    """A :class:`crow.tools.Log` that records nothing, and a :class:`crow.tools.Plan` that is empty."""

    async def recall(self, query: RecallQuery, *, limit: int) -> str:  # noqa: ARG002
        """See :class:`crow.tools.Log`. Nothing is found."""
        return ""

    async def before_change(
        self, call_id: str, path: Path, before: bytes | None, after: bytes | None, *, mode: int | None = None
    ) -> None:
        """See :class:`crow.tools.Log`."""

    async def before_keeping(self, call_id: str, change_set: str, directory: Path) -> None:
        """See :class:`crow.tools.Log`."""

    def current(self) -> tuple[PlanItem, ...]:
        """See :class:`crow.tools.Plan`."""
        return ()


async def ignore_output(output: str) -> None:
    """Take the output of a running call, and show it to nobody."""
