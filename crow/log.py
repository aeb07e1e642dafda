"""Writes crow's log to a file. The log does not go to stdout, because the protocol uses stdout. It does not go to
stderr either, because editors show stderr to the user. Only `crow serve` may write its log to stderr."""

from __future__ import annotations

import datetime
import json
import logging
import logging.handlers
import os
from collections.abc import Iterable
from io import TextIOWrapper
from pathlib import Path
from typing import TextIO

from crow.domain.rendering import SecretMask
from crow.domain.text import safe_json
from crow.domain.trace_context import current_trace_context

_MAX_BYTES = 2_000_000
_MAX_JSON_BYTES = 50_000_000
_OLD_FILES = 2
_MAX_ADDED = 200


def start_logging(file: Path, level: str, secrets: Iterable[str] = ()) -> None:
    """Start the log in `file`. The log contains crow's records at `level` and above, and the warnings and errors of
    libraries.

    The text of `secrets` is masked. The file has mode 0600 and is rotated at 2 MB. If the file cannot be written,
    logging stops silently, because a problem with the log must never break a session. If this function already started
    another log, that log ends. If `log_as_json` started a log, that log continues, and only its level and its secrets
    change.
    """
    handlers = logging.getLogger().handlers
    json_log = next((each for each in handlers if isinstance(each.formatter, _JsonFormatter)), None)
    if json_log is None:
        _install(_LogFile(file), _MaskingFormatter(secrets), level)
    else:
        json_log.setFormatter(_JsonFormatter(secrets))
        logging.getLogger("crow").setLevel(level.upper())


def log_as_json(file: Path | None, level: str, secrets: Iterable[str] = ()) -> None:
    """Start the log as JSON, with one object per line. The log goes to `file`, or to stderr if `file` is None. See
    `start_logging`.

    The file is rotated at 50 MB.
    """
    handler = _StderrLog() if file is None else _LogFile(file, max_bytes=_MAX_JSON_BYTES)
    _install(handler, _JsonFormatter(secrets), level)


def _install(handler: logging.Handler, formatter: logging.Formatter, level: str) -> None:
    handler.setFormatter(formatter)
    root = logging.getLogger()
    old, root.handlers[:] = root.handlers[:], [handler]
    for each in old:
        if isinstance(each, _LogFile):
            each.close()
    root.setLevel(logging.WARNING)
    logging.getLogger("crow").setLevel(level.upper())
    logging.captureWarnings(True)


def mask_in_log(secrets: Iterable[str]) -> None:
    """From now on, also mask these secrets in the log. Such a secret is, for example, the token of a login."""
    for handler in logging.getLogger().handlers:
        if isinstance(handler.formatter, _MaskingFormatter):
            handler.formatter.add(secrets)


class _StderrLog(logging.StreamHandler[TextIO]):
    """Logs to stderr. Errors while writing are ignored, because a closed stderr must not break a session."""

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - the base class names it
        """Do nothing."""


class _LogFile(logging.handlers.RotatingFileHandler):
    """A log file that is created when the first record is written. A process that logs nothing creates no file."""

    def __init__(self, file: Path, *, max_bytes: int = _MAX_BYTES) -> None:
        super().__init__(file, maxBytes=max_bytes, backupCount=_OLD_FILES, delay=True)
        self._is_broken = False

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record. If the file could not be opened for an earlier record, do nothing."""
        if not self._is_broken:
            super().emit(record)

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: ARG002, N802 - the base class names it
        """Print nothing. The base class would print a traceback, for example if the disk is full, and editors would
        show the traceback."""
        self._is_broken = self.stream is None

    def _open(self) -> TextIOWrapper:
        Path(self.baseFilename).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(self.baseFilename, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        return open(descriptor, "a", encoding="utf-8", errors="backslashreplace")


class _MaskingFormatter(logging.Formatter):
    """Formats records with the trace context of the client's request. Replaces every secret with `…`, even in
    tracebacks."""

    def __init__(self, secrets: Iterable[str]) -> None:
        super().__init__("%(asctime)s %(process)d %(levelname)s %(name)s:%(trace)s %(message)s")
        self._secrets = tuple(secrets)
        self._added: tuple[str, ...] = ()
        self._mask = SecretMask(self._secrets)

    def add(self, secrets: Iterable[str]) -> None:
        """Mask more secrets. Of the secrets that were added with this method, only the newest are masked, because
        tokens are renewed all the time."""
        self._added = (*self._added, *secrets)[-_MAX_ADDED:]
        self._mask = SecretMask((*self._secrets, *self._added))

    def format(self, record: logging.LogRecord) -> str:
        """Format the record, with its secrets masked."""
        record.trace = "".join(f" {name}={value}" for name, value in current_trace_context().items())
        return self._mask(super().format(record))


_PLAIN = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}
"""The attributes that every log record has. All other attributes come from the `extra` of the logging call."""


class _JsonFormatter(_MaskingFormatter):
    """Formats a record as one JSON object with its time, level, logger, message and trace context, and the values in
    `extra`."""

    def format(self, record: logging.LogRecord) -> str:
        """Format the record, with its secrets masked."""
        time = datetime.datetime.fromtimestamp(record.created, datetime.UTC)
        values = {
            "time": time.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **{name: value for name, value in vars(record).items() if name not in _PLAIN},
            **current_trace_context(),
        }
        if record.exc_info:
            values["traceback"] = self.formatException(record.exc_info)
        masked = {name: self._mask(value) if isinstance(value, str) else value for name, value in values.items()}
        return safe_json(json.dumps(masked, ensure_ascii=False, default=str))
