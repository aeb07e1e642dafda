"""Names, patterns and commands inside the title of a call.

Several editors draw titles as Markdown, where `src/__init__.py` or `**/*.py` would lose characters; what Markdown would
eat stands in backticks, everything else as it is, for the editors that draw plain text.
"""

from __future__ import annotations

import re

__all__ = ["code", "in_title"]

_EATEN = re.compile(r"[*`~<\\]|\]\s?[(\[]|&#?\w++;")
_OPENS = re.compile(r"(?:^|[^\w])_")
_CLOSES = re.compile(r"_(?:[^\w]|$)")


def in_title(text: str) -> str:
    """`text` as a title shows it: plain, or as code where Markdown would change it."""
    opens = _OPENS.search(text)
    is_emphasis = opens is not None and _CLOSES.search(text, opens.end()) is not None
    return code(text) if is_emphasis or _EATEN.search(text) else text


def code(text: str) -> str:
    """`text` as Markdown code on one line, backticks in it included."""
    line = " ".join(text.split("\n"))
    if "`" not in line:
        return f"`{line}`"
    fence = "`" * (max(len(run) for run in re.findall("`+", line)) + 1)
    return f"{fence} {line} {fence}"
