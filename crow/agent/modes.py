"""The permission modes: what a session may do unasked. `permission` says what each means."""

from __future__ import annotations

from typing import Literal, TypeAlias, get_args

__all__ = ["MODES", "Mode"]

Mode: TypeAlias = Literal["ask", "accept-edits", "plan", "auto"]
MODES: tuple[Mode, ...] = get_args(Mode)
