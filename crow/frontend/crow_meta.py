"""What clients may say to crow alone, under `_meta.crow`, since the protocol has no word for it.

Strategy: what is not said is None or false; what is said and cannot be used is an error that names it, as it would do
something else than was asked. Decides nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from crow.domain.errors import ArgumentError

__all__ = ["alias_named", "entry_named", "wants_archived"]

ALIAS_CHARS = 200


def alias_named(params: Mapping[str, Any]) -> str | None:
    """`alias`: the name of the session to open, or to make. :raises ArgumentError: no usable name."""
    alias = _said(params).get("alias")
    if alias is None:
        return None
    if not isinstance(alias, str) or not alias.strip() or len(alias) > ALIAS_CHARS or not alias.isprintable():
        raise ArgumentError(
            f'_meta.crow.alias: expected a name of 1 to {ALIAS_CHARS} characters, such as "cli:default".'
        )
    return alias


def entry_named(params: Mapping[str, Any]) -> int | None:
    """`entry`: the id of the entry to fork from. :raises ArgumentError: no whole number above 0."""
    entry = _said(params).get("entry")
    if entry is None:
        return None
    if not isinstance(entry, int) or isinstance(entry, bool) or not 0 < entry < 2**63:
        raise ArgumentError(f"_meta.crow.entry is {entry!r}; expected the id of an entry, a whole number above 0.")
    return entry


def wants_archived(params: Mapping[str, Any]) -> bool:
    """`archived`: list the archived sessions instead of the others."""
    return _said(params).get("archived") is True


def _said(params: Mapping[str, Any]) -> Mapping[str, Any]:
    meta = params.get("_meta")
    said = meta.get("crow") if isinstance(meta, dict) else None
    return said if isinstance(said, dict) else {}
