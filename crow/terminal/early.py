"""Collects the keys that the user presses while `crow chat` starts.

This module runs before everything else is imported, so it imports only modules that
load at once.
"""

from __future__ import annotations

import os
import select
from collections.abc import Sequence
from contextlib import suppress

TYPE_CHECKING = False  # like `typing.TYPE_CHECKING`; importing `typing` would take 10 ms
if TYPE_CHECKING:
    from typing import Any

_MAX_BYTES = 4096
"""A terminal keeps at most this many bytes that no program has read."""


class _EarlyKeys:
    """Keeps the keys that are typed before the line editor reads keys itself.

    Otherwise, the terminal would show these keys in the middle of other text, and would turn Enter into Ctrl-J, which
    the line editor takes as a line break.
    """

    def __init__(self) -> None:
        self._before: list[Any] | None = None
        self._typed = b""

    def keep(self) -> None:
        """From now on, let the terminal keep typed keys as they are, without showing them. Call `restore` at the end.
        If stdin or stdout is not a terminal, do nothing."""
        try:
            import termios  # not available on Windows
        except ImportError:
            return
        with suppress(OSError, termios.error):
            if not (os.isatty(0) and os.isatty(1)):
                return
            before, changed = termios.tcgetattr(0), termios.tcgetattr(0)
            changed[0] &= ~termios.ICRNL
            changed[3] &= ~(termios.ECHO | termios.ICANON)
            termios.tcsetattr(0, termios.TCSANOW, changed)
            self._before = list(before)
            if select.select([0], [], [], 0)[0]:
                # These keys went through the terminal's own line editing, which wrote Enter as a line feed.
                self._typed = os.read(0, _MAX_BYTES).replace(b"\n", b"\r")

    def take(self) -> str:
        """Return the keys that were typed before `keep`, and forget them. The terminal still holds the keys that were
        typed since then."""
        typed, self._typed = self._typed, b""
        return typed.decode("utf-8", "replace")

    def restore(self) -> None:
        """Set the terminal back to how it was before `keep`."""
        before, self._before = self._before, None
        if before is not None:
            import termios

            with suppress(OSError, termios.error):
                termios.tcsetattr(0, termios.TCSANOW, before)


EARLY_KEYS = _EarlyKeys()
"""The keys of this process's terminal."""


def opens_line_editor(arguments: Sequence[str]) -> bool:
    """Return whether this command line opens a chat whose prompt has a line editor, as far as the arguments tell."""
    has_words = any(each.startswith(("-h", "--h", "--p")) for each in arguments)  # argparse accepts shortened options
    is_simple = os.environ.get("TERM", "dumb") in ("", "dumb")
    is_chat = not arguments or arguments[0] == "chat" or arguments[0].startswith("--")
    return is_chat and not has_words and not is_simple
