"""How settings are shown in a sentence: values without secrets, keys as TOML writes them."""

from __future__ import annotations

import json
import re

__all__ = ["shown", "shown_key"]

_SECRET = frozenset({"api_key", "headers", "extra_body"})
_URLS = frozenset({"base_url", "proxy"})
_BARE = re.compile(r"[A-Za-z0-9_-]+\Z")


def shown(name: str, value: object) -> str:
    """The value of a setting called `name` (its last part), as a sentence may show it."""
    if name in _SECRET:
        return "something else (not shown: it may be secret)"
    if name in _URLS and isinstance(value, str) and ("@" in value or "?" in value):
        return "one that may hold a secret (not shown)"
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 120 else text[:119] + "…"


def shown_key(kind: str, name: str) -> str:
    """`kind.name`, quoted where TOML needs it."""
    return f"{kind}.{name if _BARE.match(name) else json.dumps(name, ensure_ascii=False)}"
