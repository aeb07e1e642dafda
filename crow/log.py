"""The log file of this user. Nothing is logged to stdout (the protocol uses it) or stderr (editors show it)."""

from __future__ import annotations

import logging
import logging.handlers
import os
from collections.abc import Iterable
from io import TextIOWrapper
from pathlib import Path

from crow.domain.rendering import SecretMask
from crow.domain.trace_context import current_trace_context

_MAX_BYTES = 2_000_000
_OLD_FILES = 2
_MAX_ADDED = 200


def start_logging(file: Path, level: str, secrets: Iterable[str] = ()) -> None:
    """Write to `file` the log records of crow at `level` and above, and the warnings and errors of libraries. Any
    earlier log handler is replaced.

    `secrets` are masked. The file has mode 0600 and is rotated at 2 MB. If the log cannot be written, logging stops
    silently: it must never break a session.
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


def mask_in_log(secrets: Iterable[str]) -> None:
    """Mask further secrets from now on, such as the token of a login."""
    for handler in logging.getLogger().handlers:
        if isinstance(handler, _LogFile) and isinstance(handler.formatter, _MaskingFormatter):
            handler.formatter.add(secrets)


class _LogFile(logging.handlers.RotatingFileHandler):
    """A log file that is created when the first record is written. A process that logs nothing creates no file."""

    def __init__(self, file: Path) -> None:
        super().__init__(file, maxBytes=_MAX_BYTES, backupCount=_OLD_FILES, delay=True)
        self._is_broken = False

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record, unless an earlier one failed to open the file."""
        if not self._is_broken:
            super().emit(record)

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: ARG002, N802 - the base class names it
        """Print nothing. If the disk is full, the base class would print a traceback, and editors would show it."""
        self._is_broken = self.stream is None

    def _open(self) -> TextIOWrapper:
        Path(self.baseFilename).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(self.baseFilename, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        return open(descriptor, "a", encoding="utf-8", errors="backslashreplace")


class _MaskingFormatter(logging.Formatter):
    """Adds the trace context of the client's request, and replaces every secret by `…`, in tracebacks too."""

    def __init__(self, secrets: Iterable[str]) -> None:
        super().__init__("%(asctime)s %(process)d %(levelname)s %(name)s:%(trace)s %(message)s")
        self._secrets = tuple(secrets)
        self._added: tuple[str, ...] = ()
        self._mask = SecretMask(self._secrets)

    def add(self, secrets: Iterable[str]) -> None:
        """Mask these too. Only the newest ones are kept: tokens are renewed all the time."""
        self._added = (*self._added, *secrets)[-_MAX_ADDED:]
        self._mask = SecretMask((*self._secrets, *self._added))

    def format(self, record: logging.LogRecord) -> str:
        """Format the record, with its secrets masked."""
        record.trace = "".join(f" {name}={value}" for name, value in current_trace_context().items())
        return self._mask(super().format(record))
