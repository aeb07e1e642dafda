"""Reads files of other tools. These files may be damaged or hostile. They are never changed."""

from __future__ import annotations

import errno
import json
import math
import os
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, BinaryIO

from crow.domain.errors import ArgumentError
from crow.domain.text import on_one_line
from crow.store.codec import mend

MAX_LINE_BYTES = 64 * 1024 * 1024
"""Longer lines are skipped."""

_MAX_DOCUMENT_BYTES = 64 * 1024 * 1024
"""Longer JSON files are skipped."""

_PEEK_LINES = 40
_NAMED = 20
"""The number of problems that are described. The others are only counted."""
_PIECE_BYTES = 1024 * 1024
_SECONDS_BELOW = 100_000_000_000
"""A time below this number is in seconds. (In milliseconds, the time would be before 1974.) Other times are in
milliseconds."""

_MAX_TIME_MS = 253_402_300_799_000  # the last second of the year 9999
_MAX_COUNT = 2**53


@dataclass(frozen=True, slots=True)
class Problem:
    """Something that could not be imported."""

    place: str
    """The file, and where in the file: the line, the message or the row."""
    words: str
    """The reason."""

    def __str__(self) -> str:
        return on_one_line(f"{mend(self.place)}: {self.words}")


@dataclass(slots=True)
class Problems:
    """The lines and files that could not be imported."""

    lines: int = 0
    """The number of skipped lines, messages and other parts of files."""
    files: int = 0
    """The number of skipped files."""
    named: list[Problem] = field(default_factory=list)
    """The first 20 problems."""
    _place: str = field(default="", compare=False)
    """The line or message that is being imported; see `importing`."""

    @contextmanager
    def importing(self, place: str) -> Iterator[None]:
        """The block imports the line or message at `place`. If that fails because the JSON is nested too deeply, report
        the problem and continue after the block."""
        self._place = place
        try:
            yield
        except RecursionError:
            self.skip("its JSON is nested too deeply")

    def skip(self, words: str) -> None:
        """Report the line or message that is being imported, or a part of it."""
        self.skip_line(self._place, words)

    def skip_line(self, place: str, words: str) -> None:
        """Report a line, or another part of a file such as a message, that is skipped."""
        self.lines += 1
        self._name(Problem(place, words))

    def skip_file(self, path: Path | str, words: str) -> None:
        """Report a file that is skipped."""
        self.files += 1
        self._name(Problem(str(path), words))

    def _name(self, problem: Problem) -> None:
        if len(self.named) < _NAMED:
            self.named.append(problem)


class Damaged(ValueError):
    """A line or file is not in the format of the other tool."""


def open_regular(path: Path) -> BinaryIO:
    """Open a regular file for reading. Pipes, devices and symbolic links are refused. A pipe is refused at once, even
    if no program is writing to it.

    :raises OSError: the file cannot be read.
    :raises Damaged: it is not a regular file.
    """
    flags = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    try:
        handle = os.open(path, flags)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise OSError(errno.ELOOP, "it is a symbolic link, which is not followed") from error
        raise
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise Damaged("it is not a regular file")
    return open(handle, "rb")


def read_lines(path: Path, problems: Problems) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the place and the JSON object of each line. Damaged lines are reported and skipped."""
    try:
        with open_regular(path) as file:
            number = 0
            while line := file.readline(MAX_LINE_BYTES + 1):
                number += 1
                place = f"{path}, line {number}"
                if len(line) > MAX_LINE_BYTES:
                    problems.skip_line(place, f"it is longer than {MAX_LINE_BYTES // 1024 // 1024} MB")
                    while line and not line.endswith(b"\n"):
                        line = file.readline(_PIECE_BYTES)
                    continue
                if line.isspace():
                    continue
                try:
                    yield place, parse_object(line)
                except Damaged as error:
                    problems.skip_line(place, str(error))
    except (OSError, Damaged) as error:
        problems.skip_file(path, readable(error))


def first_lines(path: Path) -> list[Mapping[str, Any]]:
    """Return the JSON objects in the first 40 lines, up to `MAX_LINE_BYTES` in total, so that the format can be
    recognised. Lines without a JSON object are left out.

    :raises OSError: the file cannot be read.
    :raises Damaged: it is not a regular file.
    """
    found = []
    left = MAX_LINE_BYTES
    with open_regular(path) as file:
        for _ in range(_PEEK_LINES):
            line = file.readline(left)
            left -= len(line)
            if not line:
                break
            with suppress(Damaged):
                found.append(parse_object(line))
    return found


def read_document(path: Path) -> Any:
    """Return the JSON value of a whole file.

    :raises OSError: the file cannot be read.
    :raises Damaged: it is not a regular file, not JSON or too large.
    """
    with open_regular(path) as file:
        data = file.read(_MAX_DOCUMENT_BYTES + 1)
    if len(data) > _MAX_DOCUMENT_BYTES:
        raise Damaged(f"it is larger than {_MAX_DOCUMENT_BYTES // 1024 // 1024} MB")
    return parse(data)


def parse(data: bytes | str) -> Any:
    """Return a JSON value. Bytes that are not UTF-8 become U+FFFD. NaN, infinities and numbers too large for a float
    become null.

    :raises Damaged: the data are not JSON, or are nested too deeply.
    """
    if isinstance(data, bytes):
        data = data.decode("utf-8-sig", "replace")
    try:
        return json.loads(data, parse_constant=lambda _: None, parse_float=_finite)
    except RecursionError:
        raise Damaged("its JSON is nested too deeply") from None
    except ValueError as error:
        raise Damaged(f"it is not JSON: {error}") from None


def _finite(digits: str) -> float | None:
    number = float(digits)
    return number if math.isfinite(number) else None


def parse_object(data: bytes | str) -> Mapping[str, Any]:
    """Return the JSON object in `data`.

    :raises Damaged: `data` is not a JSON object.
    """
    value = parse(data)
    if not isinstance(value, dict):
        raise Damaged(f"it is not a JSON object but {str(value)[:40]!r}")
    return value


def readable(error: Exception) -> str:
    """Return the reason why a file cannot be read, without the file's name."""
    return (error.strerror or str(error)) if isinstance(error, OSError) else str(error)


def text(value: Any) -> str:
    """Return `value` if it is a string, otherwise an empty string."""
    return value if isinstance(value, str) else ""


def as_object(value: Any) -> Mapping[str, Any]:
    """Return `value` if it is an object, otherwise an empty object."""
    return value if isinstance(value, dict) else {}


def items(value: Any) -> list[Any]:
    """Return `value` if it is a list, otherwise an empty list."""
    return value if isinstance(value, list) else []


def objects(value: Any) -> list[Mapping[str, Any]]:
    """Return the items of `value` that are objects. Return an empty list if `value` is not a list."""
    return [item for item in items(value) if isinstance(item, dict)]


def count(value: Any) -> int | None:
    """Return `value` if it is a whole number from 0 to below 2**53, otherwise None."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return value if type(value) is int and 0 <= value < _MAX_COUNT else None


def cost(value: Any) -> float | None:
    """Return `value` if it is a number from 0 to below a billion US dollars, otherwise None."""
    return float(value) if type(value) in (int, float) and 0 <= value < 1e9 else None


def total(*parts: Any) -> int | None:
    """Return the sum of the `parts` that `count` accepts, or None if `count` accepts no part."""
    known = [number for part in parts if (number := count(part)) is not None]
    return count(sum(known)) if known else None


def time_ms(value: Any) -> int | None:
    """Return a time (an ISO date and time, or Unix seconds or milliseconds) as Unix milliseconds, or None if `value` is
    not a time."""
    if isinstance(value, str):
        try:
            moment = datetime.fromisoformat(value.strip()[:64])
            if moment.tzinfo is None:
                moment = moment.replace(tzinfo=UTC)
            value = moment.timestamp() * 1000
        except (ValueError, OverflowError, OSError):
            return None
    elif type(value) in (int, float) and 0 < value < _SECONDS_BELOW:
        value *= 1000
    if type(value) not in (int, float) or not 0 < value <= _MAX_TIME_MS:
        return None
    return int(value)


def modified_ms(path: Path) -> int:
    """Return the time of the file's last change in Unix milliseconds, or 0 if the time is unknown."""
    try:
        return path.stat().st_mtime_ns // 1_000_000
    except OSError:
        return 0


def real_path(path: Path) -> Path:
    """Return the absolute path of a file or directory that the user named, without symbolic links.

    :raises ArgumentError: the path does not exist.
    """
    try:
        return path.expanduser().resolve(strict=True)
    except (OSError, RuntimeError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise ArgumentError(f"{path} cannot be read: {reason}.") from error
