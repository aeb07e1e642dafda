"""Shortens the output of commands to what a terminal would show in the end, and keeps long output in files."""

from __future__ import annotations

import re
from itertools import groupby
from pathlib import Path

import anyio.to_thread

from crow.tools.temporary import TemporaryDirectory

MAX_CHARS = 8_000
"""The model sees at most this many characters of an output, about 2,000 tokens."""
_MIN_REPEATS = 4
_MIN_PASSED = 8
"""If at least this many lines in a row only report passed tests, all but the first of them are left out."""
_MAX_FILES = 20
"""The outputs of at most this many commands are kept. The oldest are removed first."""

# An escape string without an end is taken to end with its line, so that it does not hide the output after it.
_ESCAPES = re.compile(
    r"\x1b(?:\[[0-?]*[ -/]*[@-~]"  # colours and cursor movements
    r"|\](?:[^\x07\x1b]*(?:\x07|\x1b\\)|[^\x07\x1b\n]*)"  # titles, links, the clipboard
    r"|[PX^_](?:[^\x1b]*\x1b\\|[^\x1b\n]*)"  # other strings for the terminal, such as images
    r"|[ -/]*[0-~])"
)
_PASSED = re.compile(
    r"\S+::.* PASSED(?: +\[ *\d+%\])?"  # pytest -v
    r"|(?:test\w*(?: \(.*\))?|test .+) \.\.\. ok"  # unittest -v, cargo test
    r"|\s*(?:=== (?:RUN|PAUSE|CONT|NAME) .*|--- PASS: .*)"  # go test -v
    r"|\s*(?:[✓✔√] .*|ok \d+ (?!.*#).*)"  # vitest, jest, mocha, TAP
)
_UNREADABLE = re.compile("[\0-\x07\x0e-\x1a\x1c-\x1f\x7f\ufffd]")
_MIN_UNREADABLE = 8
_REDRAWN = re.compile(r"[^\r\n]\r+[^\r\n]")


def as_shown(output: str) -> str:
    """Return the output as a terminal would show it in the end: without escape sequences, with only the last state of
    lines that were drawn again and again, and with repeated lines counted. Notes say where something was left out."""
    if "\x1b" in output:
        output = _ESCAPES.sub("", output)
    output = output.replace("\r\n", "\n")
    lines = [_last_state(line) for line in output.split("\n")]
    shown: list[str] = []
    for line, group in groupby(lines):
        count = sum(1 for _ in group)
        if count < _MIN_REPEATS or not line:
            shown += [line] * count
        else:
            shown += [line, f"[the line above came {count:,} times in a row]"]
    if _REDRAWN.search(output):
        shown.append("[lines drawn again after \\r are shown only in their last state]")
    return "\n".join(shown)


def _without_passed_tests(text: str) -> str:
    """Return the text with only the first line of each long run of lines that report passed tests."""
    lines: list[str] = []
    for has_passed, group in groupby(text.split("\n"), key=lambda line: _PASSED.fullmatch(line) is not None):
        run = list(group)
        if has_passed and len(run) >= _MIN_PASSED:
            run[1:] = [f"[{len(run) - 1:,} more lines of passed tests]"]
        lines += run
    return "\n".join(lines)


def _last_state(line: str) -> str:
    strange = len(_UNREADABLE.findall(line))
    if strange >= _MIN_UNREADABLE and strange * 3 > len(line):
        return "[binary data]"
    if "\r" in line:
        line = next((state for state in reversed(line.split("\r")) if state), "")
    if "\b" in line:
        kept: list[str] = []
        for character in line:
            if character != "\b":
                kept.append(character)
            elif kept:
                kept.pop()
        line = "".join(kept)
    return line


class OutputFiles:
    """The files with whole outputs of a session's commands. `remove` must be called at the end of the session."""

    def __init__(self) -> None:
        self._directory: TemporaryDirectory | None = None
        self._count = 0

    async def shown(self, output: str) -> str:
        """Return `output` as a terminal would show it, without lines that only report passed tests. If the model will
        see only a part of it, keep the whole output in a file, and name this file in the last line."""
        is_short = len(output) <= MAX_CHARS
        whole = as_shown(output) if is_short else await anyio.to_thread.run_sync(as_shown, output)
        text = (
            _without_passed_tests(whole) if is_short else await anyio.to_thread.run_sync(_without_passed_tests, whole)
        )
        if len(text) <= MAX_CHARS and text == whole:
            return whole
        path = await anyio.to_thread.run_sync(self._keep, whole)
        return whole if path is None else f"{text}\n[the whole output is in {path}; use read_file or grep]"

    def contains(self, path: Path) -> bool:
        """Return whether `path`, with links resolved, is one of these files."""
        return self._directory is not None and path.parent == self._directory.path

    def remove(self) -> None:
        """Delete all files."""
        if self._directory is not None:
            self._directory.remove()
            self._directory = None

    def _keep(self, output: str) -> Path | None:
        """Write a file. Return None if that is not possible, for example because the disk is full."""
        try:
            if self._directory is None:
                self._directory = TemporaryDirectory.create("output")
            self._count += 1
            path = self._directory.path / f"{self._count}.txt"
            path.touch(0o600)
            path.write_text(output, "utf-8", errors="replace")
            (self._directory.path / f"{self._count - _MAX_FILES}.txt").unlink(missing_ok=True)
        except OSError:
            return None
        return path
