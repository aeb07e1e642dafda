"""Finds and hides the passwords in the URLs of databases."""

from __future__ import annotations

import re
from urllib.parse import unquote

_USER_INFO = re.compile(r"(?<=://)(?:(?:(?![?&]\w+=).)*@|.*@)", re.DOTALL)
"""Matches the user and password, up to the last `@` before the options, or if there is none, up to the last `@`. So it
also matches passwords with characters that should have been escaped."""
_PASSWORD_OPTION = re.compile(r"[?&](?:ssl)?password=([^&#]*)", re.IGNORECASE)


def _password_spans(url: str) -> list[tuple[int, int]]:
    """Return where the passwords in the URL of a database begin and end. The spans may overlap if it is not clear which
    part of the URL is a password."""
    spans = [found.span(1) for found in _PASSWORD_OPTION.finditer(url)]
    if (user := _USER_INFO.search(url)) and (colon := url.find(":", *user.span())) >= 0:
        spans.append((colon + 1, user.end() - 1))
    return sorted(spans)


def database_passwords(url: str) -> tuple[str, ...]:
    """Return the passwords in the URL of a database. Each password is returned as it is written in the URL. If it
    contains %XX, it is also returned decoded."""
    found = [url[start:end] for start, end in _password_spans(url)]
    return tuple(dict.fromkeys(each for text in found for each in (text, unquote(text)) if each))


def without_passwords(url: str) -> str:
    """Return the URL of a database with `…` in place of its passwords."""
    shown, shown_to = "", 0
    for start, end in _password_spans(url):
        if start >= shown_to:
            shown += f"{url[shown_to:start]}…"
        shown_to = max(shown_to, end)
    return shown + url[shown_to:]
