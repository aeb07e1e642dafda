"""Permission requests as `crow chat` shows them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from crow.terminal.connection import Params
from crow.terminal.markdown import inline
from crow.terminal.render import Look, diff_of

QUESTION_LINES = 1_000
"""The maximum number of lines that a permission question shows. If a call has more lines, the question offers only the
options for this one call."""


def question_of(look: Look, params: Params) -> tuple[str, list[Mapping[str, Any]]]:
    """Return the text to show for a permission request, and the options to offer."""
    call, options = params["toolCall"], list(params["options"])
    left = QUESTION_LINES
    shown = [look.paint("bold", f"Allow this? {plain_title(call['title'])}") + "\n"]
    hidden = 0
    for part in call.get("content") or ():
        match part:
            case {"type": "content", "content": {"type": "text", "text": str(text)}}:
                lines = _question_lines(look, text)
                shown += lines[:left]
                hidden += max(0, len(lines) - left)
                left -= min(left, len(lines))
            case {"type": "diff"}:
                diff, more = diff_of(look, part, most=left)
                shown.append(diff)
                hidden += more
                left -= min(left, diff.count("\n"))
    if hidden:
        shown.append(look.paint("bold", f"{hidden} lines are not shown.") + "\n")
        options = [option for option in options if option["kind"].endswith("_once")]
    return "".join(shown), options


def _question_lines(look: Look, text: str) -> list[str]:
    """Return the lines to show for a text in a permission question. A bar before each line of code replaces the fences,
    so that no line of code looks like an option."""
    fence, lines = "", []
    bar = look.paint("dim", "" if look.has_words else "│ " if look.has_styles else "| ")
    for line in text.splitlines():
        ticks = len(line) - len(line.lstrip("`"))
        if not fence and ticks >= 3:
            fence = "`" * ticks
        elif fence and line == fence:
            fence = ""
        elif fence:
            lines.append(f"  {bar}{look.paint('code', line)}\n")
        elif line:
            lines.append(f"  {look.paint('dim', line)}\n")
    return lines


def keys_of(options: Sequence[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """Map each key that the user can press to the option that it selects."""
    letters = {"allow_once": "y", "allow_always": "aw", "reject_once": "n", "reject_always": "dr"}
    keys: dict[str, Mapping[str, Any]] = {}
    for number, option in enumerate(options, 1):
        free = [key for key in letters.get(option["kind"], "") if key not in keys]
        keys[free[0] if free else str(number)] = option
    return keys


def plain_title(title: str) -> str:
    """Return the title of a call without Markdown."""
    return "".join(text for _, text in inline(title)[0])
