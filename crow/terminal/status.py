"""The line that the chat shows at the bottom while a turn runs, and the notification when it has ended."""

from __future__ import annotations

from rich.cells import cell_len

from crow.domain.text import safe
from crow.terminal.render import cut

_HINTS = ("Esc stops · type to queue or steer", "Esc stops", "")
_LABEL_COLUMNS = 24
"""A label gets at least this many columns if it needs them. Other parts of the line are left out for it."""


def status_line(label: str, columns: int, *, seconds: float, tokens: int, mode: str, is_stopping: bool) -> str:
    """Return the line: `label`, which says what the turn does, the duration of the turn, the number of tokens in the
    model's context, the mode, and the keys that work now.

    The line has at most `columns` columns. If it is too long, the keys are shortened or left out first, then the other
    parts. `tokens` is 0 if the number is not known. If `is_stopping` is true, the label already names the keys.
    """
    label = label or "Working"
    facts = [_duration(seconds), f"{_count(tokens)} tokens" if tokens else "", mode]
    wanted = min(cell_len(label), _LABEL_COLUMNS)
    tails = [_joined([*facts, hint]) for hint in ("",) * is_stopping or _HINTS]
    tails += [_joined(facts[:2]), facts[0], ""]
    tail = next(each for each in tails if not each or wanted + 3 + cell_len(each) <= columns)
    room = columns - cell_len(tail) - 3 if tail else columns
    return _joined([cut(label, max(1, room)), tail])


def notification(words: str, terminal: str, *, has_styles: bool) -> str:
    """Return the control characters with which a terminal of the kind `terminal` (TERM) calls the user: the bell and,
    with styles, a notification with these words. A terminal without notifications ignores that part."""
    if not has_styles or terminal == "linux":
        return "\a"
    return f"\x1b]9;{safe(words)}\x07\a"


def _joined(parts: list[str]) -> str:
    return " · ".join(filter(None, parts))


def _duration(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes} min {rest:02} s" if minutes else f"{rest} s"


def _count(tokens: int) -> str:
    return f"{tokens / 1000:.1f}k" if tokens >= 1000 else str(tokens)
