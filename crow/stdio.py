"""Replaces standard output, so that each command says in one sentence why its output could not be written."""

from __future__ import annotations

import errno
import io
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer


class OutputError(OSError):
    """Standard output cannot be written. `errno` says why."""


def run_with_output(run: Callable[[], int]) -> int:
    """Run a command, write the rest of its output, and return the exit code.

    If the output cannot be written, the exit code is 1. The reason is printed on stderr, unless the reader has gone, as
    in `crow sessions | head`. Characters that the encoding of stdout lacks are written as escapes.
    """
    was = sys.stdout
    _occupy_closed_descriptors()
    sys.stdout = io.TextIOWrapper(
        io.BufferedWriter(_StdoutFile(1, "wb", closefd=False)),
        encoding="utf-8" if was is None else was.encoding,
        errors="backslashreplace",
        line_buffering=was is not None and bool(was.line_buffering),
    )
    try:
        try:
            code = run()
        finally:
            sys.stdout.flush()  # also if argparse has printed its help and exits
    except OutputError as error:
        return fail(error)
    return code


def _occupy_closed_descriptors() -> None:
    """Put a file in place of each standard stream that is closed. Otherwise the next file that is opened, such as the
    database, would become that stream, and prints would write to it. Reading stdin and writing stdout still fail."""
    streams = ((sys.stdin, os.O_WRONLY), (sys.stdout, os.O_RDONLY), (sys.stderr, os.O_WRONLY))
    for fd, (stream, mode) in enumerate(streams):
        if stream is None and (null := os.open(os.devnull, mode)) != fd:
            os.close(null)  # the descriptor itself is open, although the interpreter has no stream for it
    if sys.stderr is None:
        sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115  until the process ends


class _StdoutFile(io.FileIO):
    """The descriptor of standard output. Its errors can be told from those of other files."""

    def write(self, data: ReadableBuffer, /) -> int:
        try:
            return super().write(data)
        except OSError as error:
            raise OutputError(error.errno, error.strerror) from None


def write_all(file: TextIO, data: bytes) -> None:
    """Write what `file` has buffered, and then `data`. :raises OutputError: `file` is stdout and cannot be written."""
    try:
        file.flush()
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(file.fileno(), rest) :]
    except OSError as error:
        if file is not sys.stdout:
            raise
        raise OutputError(error.errno, error.strerror) from None


def fail(error: OSError) -> int:
    """Report that stdout cannot be written, and return the exit code. Output that was not written yet is discarded."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # at its exit, the interpreter would try to write again, and complain
    if error.errno != errno.EPIPE:
        reason = "it is closed" if error.errno == errno.EBADF else error.strerror
        with suppress(OSError):
            sys.stderr.write(f"crow: standard output cannot be written: {reason}\n")
    return 1
