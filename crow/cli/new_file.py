"""A file that is there whole or not at all, and never in the place of another.

Strategy: written under another name beside the wanted one, flushed to disk, then renamed. Readable by its owner alone.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

from crow.domain.errors import ArgumentError

__all__ = ["NewFile"]


class NewFile:
    """A context: leaving it in peace puts the file at `path`; `size` is then its bytes."""

    def __init__(self, path: Path) -> None:
        """:raises ArgumentError: `path` exists."""
        if path.exists() or path.is_symlink():
            raise ArgumentError(f"{path} exists already. Name a file that does not, so that nothing is overwritten.")
        self.path = path
        self.size = 0
        self._part = path.with_name(f"{path.name}.part-{os.getpid()}")
        self._file: BinaryIO | None = None

    def __enter__(self) -> NewFile:
        """:raises ArgumentError: it cannot be made."""
        try:
            number = os.open(self._part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        except OSError as error:
            raise self._unwritable(error) from error
        self._file = open(number, "wb")  # it is closed when this context is left
        return self

    def write(self, data: bytes) -> None:
        """:raises ArgumentError: it cannot be written."""
        assert self._file is not None
        try:
            self._file.write(data)
        except OSError as error:
            raise self._unwritable(error) from error

    def __exit__(self, kind: type[BaseException] | None, _: BaseException | None, __: TracebackType | None) -> None:
        """:raises ArgumentError: it cannot be written."""
        assert self._file is not None
        try:
            if kind is None:
                self._file.flush()
                os.fsync(self._file.fileno())
                self.size = self._file.tell()
            self._file.close()
            if kind is None:
                self._part.rename(self.path)
        except OSError as error:
            raise self._unwritable(error) from error
        finally:
            with suppress(OSError):
                self._part.unlink()

    def _unwritable(self, error: OSError) -> ArgumentError:
        return ArgumentError(f"{self.path} cannot be written: {error.strerror}.")
