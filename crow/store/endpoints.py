"""What was learned about endpoints: one JSON object for each base URL and model."""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping

from crow.store.codec import from_json, to_json

__all__ = ["learn", "learned"]


def learned(connection: sqlite3.Connection, base_url: str, model: str) -> Mapping[str, object]:
    """The facts; empty if there are none."""
    row = connection.execute(
        "SELECT learned FROM endpoints WHERE base_url = ? AND model = ?", (base_url, model)
    ).fetchone()
    facts: Mapping[str, object] = from_json(row[0], {}) if row else {}
    return facts


def learn(connection: sqlite3.Connection, base_url: str, model: str, facts: Mapping[str, object]) -> None:
    """Merge `facts`; a key replaces the one there was."""
    connection.execute(
        "INSERT INTO endpoints (base_url, model, learned) VALUES (?, ?, ?)"
        " ON CONFLICT (base_url, model) DO UPDATE SET learned = excluded.learned",
        (base_url, model, to_json({**learned(connection, base_url, model), **facts})),
    )
