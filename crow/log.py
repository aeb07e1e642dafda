"""The log file of this user; stdout belongs to the protocol, stderr to the editor."""

from __future__ import annotations

import logging
import logging.handlers
import os
from collections.abc import Iterable
from io import TextIOWrapper
from pathlib import Path

from crow.domain.rendering import SecretMask

_MAX_BYTES = 2_000_000
_OLD_FILES = 2


def start_logging(file: Path, level: str, secrets: Iterable[str] = ()) -> None:
    """Log to `file` from `level` up (libraries: warnings and errors), in place of any earlier log.

    `secrets` are masked. The file has mode 0600 and is rotated at 2 MB. A log that cannot be written is given up
    without a word: it must never break a session.
    """
    handler = _LogFile(file)
    handler.setFormatter(_MaskingFormatter(secrets))
    root = logging.getLogger()
    old, root.handlers[:] = root.handlers[:], [handler]
    for each in old:
        if isinstance(each, _LogFile):
            each.close()
    root.setLevel(logging.WARNING)
    logging.getLogger("crow").setLevel(level.upper())
    logging.captureWarnings(True)


class _LogFile(logging.handlers.RotatingFileHandler):
    """Opened by the first record, so that a quiet process makes no file."""

    def __init__(self, file: Path) -> None:
        super().__init__(file, maxBytes=_MAX_BYTES, backupCount=_OLD_FILES, delay=True)
        self._is_broken = False

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record, unless an earlier one failed to open the file."""
        if not self._is_broken:
            super().emit(record)

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: ARG002, N802 - the base class names it
        """Stay silent: a full disk must not print a traceback into the editor."""
        self._is_broken = self.stream is None

    def _open(self) -> TextIOWrapper:
        Path(self.baseFilename).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(self.baseFilename, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        return open(descriptor, "a", encoding="utf-8", errors="backslashreplace")


class _MaskingFormatter(logging.Formatter):
    """Replaces every secret by `…`, in tracebacks too."""

    def __init__(self, secrets: Iterable[str]) -> None:
        super().__init__("%(asctime)s %(process)d %(levelname)s %(name)s: %(message)s")
        self._mask = SecretMask(secrets)

    def format(self, record: logging.LogRecord) -> str:
        """The text as it is written."""
        return self._mask(super().format(record))
