"""What was used: tokens and cost, by session, model and day.

Strategy: sums over entries, each of which exists once however many forks share it, so that nothing is counted twice;
the result of a task, which repeats what its sub-agent used, is left out. What a session used is what it wrote itself
and what its sub-agents did; what only deleted sessions had is gone at once. Days are those of the local clock. Reads
only.
"""

# ruff: noqa: S608  # statements are put together from constants; values are parameters

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from crow.store import Scope

__all__ = ["GROUPS", "Group", "Total", "totals"]

Group: TypeAlias = Literal["session", "model", "day"]

GROUPS: tuple[Group, ...] = ("session", "model", "day")


@dataclass(frozen=True, slots=True, kw_only=True)
class Total:
    """A sum. `session` (its id), `model` and `day` (`2026-11-20`) are None where the sum is over all of them; `session`
    is empty for what deleted sessions left in forks. `cost` in US dollars, None if no price was known."""

    session: str | None = None
    title: str | None = None
    model: str | None = None
    day: str | None = None
    requests: int
    tokens_in: int
    tokens_out: int
    tokens_cached: int
    cost: float | None


def totals(connection: sqlite3.Connection, by: Sequence[Group], scope: Scope) -> tuple[Total, ...]:
    """Sums by the groups in `by`, which may be none: then one sum of all. Days ascend, else the largest come first."""
    chosen = {
        "session": ("session", "coalesce(p.id, s.id, '')"),
        "model": ("model", "e.model"),
        "day": ("day", "date(e.created_ms / 1000, 'unixepoch', 'localtime')"),
    }
    keys = [chosen[group] for group in GROUPS if group in by]
    columns = ", ".join(f"{sql} AS g_{name}" for name, sql in keys)
    names = ", ".join(f"g_{name}" for name, _ in keys)
    order = "g_day, 3 DESC" if "day" in by else "sum(e.input_tokens) DESC"
    rows = connection.execute(
        f"SELECT coalesce(p.title, s.title), count(*), coalesce(sum(e.input_tokens), 0),"
        " coalesce(sum(e.output_tokens), 0), coalesce(sum(e.cached_tokens), 0), sum(e.cost)"
        f"{', ' + columns if columns else ''}"
        " FROM entries e LEFT JOIN sessions s ON s.id = e.session AND s.conversation = e.conversation"
        " AND s.deleted_ms IS NULL"
        " LEFT JOIN sessions p ON p.id = s.parent_id AND p.deleted_ms IS NULL"
        " WHERE e.kind <> 'tool' AND e.conversation IN (SELECT conversation FROM sessions WHERE deleted_ms IS NULL)"
        " AND (e.input_tokens IS NOT NULL OR e.output_tokens IS NOT NULL OR e.cost IS NOT NULL)"
        " AND (:cwd IS NULL OR coalesce(p.cwd, s.cwd) = :cwd)"
        " AND (:model IS NULL OR instr(lower(e.model), lower(:model)) > 0)"
        " AND (:since IS NULL OR e.created_ms >= :since) AND (:before IS NULL OR e.created_ms < :before)"
        f"{f' GROUP BY {names} ORDER BY {order}' if names else ''}",
        {"cwd": scope.cwd, "model": scope.model, "since": scope.since_ms, "before": scope.before_ms},
    )
    found = []
    for title, requests, tokens_in, tokens_out, tokens_cached, cost, *groups in rows:
        values = dict(zip((name for name, _ in keys), groups, strict=True))
        found.append(
            Total(
                **values,
                title=title if "session" in values else None,
                requests=requests,
                tokens_in=tokens_in,
                tokens_out=tokens_out,
                tokens_cached=tokens_cached,
                cost=cost,
            )
        )
    return tuple(found)
