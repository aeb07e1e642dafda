"""What the model has seen of files, so that it changes none that changed behind its back.

Strategy: a fingerprint of the text as it was last read or written by a tool, kept in memory for as long as the tools
are open. A file never read is no matter of ours: an edit must match its text anyway. Knows no file.
"""

from __future__ import annotations

from pathlib import Path

from crow.domain.errors import ArgumentError

__all__ = ["Seen"]


class Seen:
    """Texts by path, as fingerprints."""

    def __init__(self) -> None:
        self._prints: dict[Path, tuple[int, int]] = {}

    def note(self, path: Path, text: str) -> None:
        """The model knows that the file at `path` holds `text`."""
        self._prints[path] = fingerprint(text)

    def check(self, path: Path, text: str | None, *, tool: str, name: str) -> None:
        """Whether `text` (None: no file any more) is what the model knows.

        :raises ~crow.domain.errors.ArgumentError: it was read, and changed since.
        """
        known = self._prints.get(path)
        if known is None or (text is not None and fingerprint(text) == known):
            return
        what = "changed" if text is not None else "was removed"
        raise ArgumentError(f"{tool}: {name} {what} since it was read; read it again first")


def fingerprint(text: str) -> tuple[int, int]:
    """Length and hash; the hash is seeded anew in every process, and nothing is kept longer."""
    return len(text), hash(text)
