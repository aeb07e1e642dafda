"""The output of commands: as a terminal would show it in the end, and in a file if the model gets only a part."""

from __future__ import annotations

import re
import secrets
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

import anyio.to_thread

from crow.tools.temporary import TemporaryDirectory

MAX_CHARS = 8_000
"""The model sees at most this many characters of an output, about 2,000 tokens."""
_MIN_REPEATS = 4
_MIN_PASSED = 8
"""At least this many lines in a row that only report passed tests are left out, but for the first."""
_MAX_FILES = 20
"""The output of older commands is forgotten."""
_MAX_PIPES = 3
"""At most this many earlier pipes with a failure are reported."""
_SIGPIPE_CODE = 128 + 13
"""What bash reports for a command that wrote to a pipe which nobody read any more, as in `... | head`."""

# A string without an end is taken to end with its line, so that it does not hide the output after it.
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


def as_shown(output: str) -> str:
    """Return the output as a terminal would show it in the end: without escape sequences, with only the last state of
    lines that were drawn again and again, and with repeated lines counted."""
    if "\x1b" in output:
        output = _ESCAPES.sub("", output)
    lines = [_last_state(line) for line in output.replace("\r\n", "\n").split("\n")]
    shown: list[str] = []
    for line, group in groupby(lines):
        count = sum(1 for _ in group)
        if count < _MIN_REPEATS or not line:
            shown += [line] * count
        else:
            shown += [line, f"[the line above came {count:,} times in a row]"]
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


class PipeStatuses:
    """Lets bash report the exit codes of all commands in pipes, so that a failure is noticed although the last command
    of its pipe succeeded."""

    def __init__(self, command: str) -> None:
        self._mark = f"crow-{secrets.token_hex(8)}"
        # After `exec 2>FILE`, the report would go to a file of the user.
        if "|" in command and not re.search(r"\bexec\b", command):
            report = f's="${{PIPESTATUS[*]}}"; printf "\\n%s %s|%s\\n" {self._mark} "$s" "$crow_pipes" >&2'
            # Before each command, look at the pipe that ran before it. `set -x` would print that each time.
            is_traced = re.search(r"\bset\s+-\w*[xo]", command) is not None
            look = "" if is_traced else f" && trap '{_LOOK}' DEBUG"
            command = f"[ \"$BASH\" ] && trap '{report}' EXIT{look}; {command}"
        self.command = command
        """The command line to run instead."""

    def split(self, output: str) -> tuple[str, tuple[int, ...], tuple[tuple[int, ...], ...]]:
        """Return the output without the report, the exit codes of the last pipe, and those of earlier pipes with a
        failure. There are none if bash has not reported them."""
        before, mark, report = output.rpartition(f"\n{self._mark} ")
        if not mark:
            return output, (), ()
        codes, _, after = report.partition("\n")
        last, _, earlier = codes.partition("|")
        return before + after, _codes(last), tuple(map(_codes, filter(None, earlier.split(";"))))

    def note(self, codes: Sequence[int], earlier: Sequence[Sequence[int]] = ()) -> str:
        """Return a line for the model if a command in front of the last one of a pipe failed, or an empty string."""
        is_last = _hides_failure(codes)
        others = [each for each in earlier if _hides_failure(each) and not (is_last and tuple(each) == tuple(codes))]
        shown = [f"exit codes in the last pipe: {', '.join(map(str, codes))}"] if is_last else []
        shown += [f"exit codes in an earlier pipe: {', '.join(map(str, each))}" for each in others[:_MAX_PIPES]]
        return f"[{'; '.join(shown)}]" if shown else ""


_LOOK = (
    'crow_codes="${PIPESTATUS[*]}"; case "$crow_codes" in *[1-9]*" "*) case ";$crow_pipes;" in *";$crow_codes;"*) ;; '
    '*) [ ${#crow_pipes} -gt 200 ] || crow_pipes="$crow_pipes${crow_pipes:+;}$crow_codes";; esac;; esac'
)


def _codes(report: str) -> tuple[int, ...]:
    return tuple(int(code) for code in report.split() if code.isdecimal())


def _hides_failure(codes: Sequence[int]) -> bool:
    return any(code not in (0, _SIGPIPE_CODE) for code in codes[:-1])


class OutputFiles:
    """The files with whole outputs of a session's commands. `remove` must be called at the end of the session."""

    def __init__(self) -> None:
        self._directory: TemporaryDirectory | None = None
        self._count = 0

    async def shown(self, output: str) -> str:
        """Return `output` as a terminal would show it, without lines that only report passed tests. If the model will
        see only a part, keep it in a file and name the file in the last line."""
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
