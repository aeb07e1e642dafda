"""Logging, to a file of the user's alone and nowhere else: stdout is the protocol's, stderr the editor's to show.

Strategy: one handler on the root logger, so that the libraries' records and Python's warnings go the same way; the
file is made at the first record. Secrets are masked in the finished text, tracebacks included. A log that cannot be
written is given up in silence: it is never a reason to fail.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterable
from io import TextIOWrapper
from pathlib import Path

__all__ = ["MASK", "SecretMask", "start_logging"]

MASK = "…"

_MAX_BYTES = 2_000_000
_OLD_FILES = 2
_LOOKS_SECRET = re.compile(r"(?i)\b(?:sk-[a-z0-9_-]{8,}|(?<=bearer )[^\s\"',]+)")


def start_logging(file: Path, level: str, secrets: Iterable[str] = ()) -> None:
    """Send every record from `level` up (libraries: warnings and errors) to `file`; replaces what was set before.

    `secrets` never appear in it. The file is readable by the user alone and is rotated at 2 MB; two old ones stay.
    """
    handler = LogFile(file)
    handler.setFormatter(MaskingFormatter(secrets))
    root = logging.getLogger()
    old, root.handlers[:] = root.handlers[:], [handler]
    for each in old:
        if isinstance(each, LogFile):
            each.close()
    root.setLevel(logging.WARNING)
    logging.getLogger("crow").setLevel(level.upper())
    logging.captureWarnings(True)


class LogFile(logging.Handler):
    """Writes records to a rotating file, which is opened by the first of them."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self._file = file
        self._writer: logging.Handler | None = None

    def emit(self, record: logging.LogRecord) -> None:
        """Write one record, or nothing."""
        try:
            if self._writer is None:
                self._writer = self._open()
            self._writer.handle(record)
        except OSError:
            self._writer = logging.NullHandler()

    def close(self) -> None:
        """Close the file."""
        if self._writer is not None:
            self._writer.close()
        super().close()

    def _open(self) -> logging.Handler:
        from logging.handlers import RotatingFileHandler  # 13 ms that a quiet process saves

        class PrivateFile(RotatingFileHandler):
            def _open(self) -> TextIOWrapper:
                descriptor = os.open(self.baseFilename, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
                return open(descriptor, "a", encoding="utf-8", errors="backslashreplace")

            def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 (the name is the base class's)
                """A full disk must not print a traceback into the editor."""

        self._file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        writer = PrivateFile(self._file, maxBytes=_MAX_BYTES, backupCount=_OLD_FILES)
        writer.setFormatter(self.formatter)
        return writer


class MaskingFormatter(logging.Formatter):
    """Formats a record and its traceback, with `…` in place of every secret."""

    def __init__(self, secrets: Iterable[str]) -> None:
        super().__init__("%(asctime)s %(process)d %(levelname)s %(name)s: %(message)s")
        self._mask = SecretMask(secrets)

    def format(self, record: logging.LogRecord) -> str:
        """The text as it is written."""
        return self._mask(super().format(record))


class SecretMask:
    """Replaces secrets in a text: the given ones, and whatever looks like one."""

    def __init__(self, secrets: Iterable[str]) -> None:
        self._secrets = sorted({secret for secret in secrets if len(secret) >= 4}, key=len, reverse=True)

    def __call__(self, text: str) -> str:
        """The text with `MASK` in place of every secret."""
        for secret in self._secrets:
            text = text.replace(secret, MASK)
        return _LOOKS_SECRET.sub(MASK, text)
