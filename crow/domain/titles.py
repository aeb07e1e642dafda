"""Names, patterns and commands inside the title of a call.

Strategy: several editors draw titles as Markdown, where `src/__init__.py` or `**/*.py` would lose characters; what
Markdown would eat stands in backticks, everything else as it is, for the editors that draw plain text.
"""

from __future__ import annotations

import re

__all__ = ["code", "in_title"]

_EATEN = re.compile(r"[*`~<\\]|\]\s?[(\[]|&#?\w+;|(?:^|[^\w])_.*_(?:[^\w]|$)", re.DOTALL)


def in_title(text: str) -> str:
    """`text` as a title shows it: plain, or as code where Markdown would change it."""
    return code(text) if _EATEN.search(text) else text


def code(text: str) -> str:
    """`text` as Markdown code on one line, backticks in it included."""
    line = " ".join(text.split("\n"))
    if "`" not in line:
        return f"`{line}`"
    fence = "`" * (max(len(run) for run in re.findall("`+", line)) + 1)
    return f"{fence} {line} {fence}"
