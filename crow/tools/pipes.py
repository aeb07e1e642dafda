"""Notices failures in shell pipes that the exit code of the command line hides."""

from __future__ import annotations

import re
import secrets
from collections.abc import Sequence

_MAX_PIPES = 3
"""At most this many earlier pipes with a failure are reported."""
_EXEC = re.compile(r"(?:^|[;&|(){}!\n]|\b(?:then|do|else|command|builtin)\b)\s*exec\b")
"""A command `exec`. After `exec 2>FILE`, the report would go to a file of the user."""
_SIGPIPE_CODE = 128 + 13
"""The exit code that bash reports for a command that wrote to a pipe which nobody read any more, as in `... | head`."""


class PipeStatuses:
    """Lets bash report the exit codes of all commands in pipes, so that a failure is noticed although the last command
    of its pipe succeeded."""

    def __init__(self, command: str) -> None:
        self._mark = f"crow-{secrets.token_hex(8)}"
        if "|" in command and not _EXEC.search(command):
            report = f'printf "\\n%s %s|%s\\n" {self._mark} "$crow_last" "$crow_pipes" >&2'
            traps = f"trap '{_LAST}; {report}' EXIT && trap '{_LOOK}' DEBUG"
            command = f'[ "$BASH" ] && crow_pipes= && {traps}; {command}'
        self.command = command
        """The command line to run instead."""

    def without_report(self, output: str) -> tuple[str, str]:
        """Return the output without the report of bash, and the report with its line ends. The report is empty if bash
        has not printed it."""
        before, mark, report = output.rpartition(f"\n{self._mark} ")
        if not mark:
            return output, ""
        codes, end, after = report.partition("\n")
        return before + after, mark + codes + end

    def split(self, output: str) -> tuple[str, tuple[int, ...], tuple[tuple[int, ...], ...]]:
        """Return the output without the report, the exit codes of the last pipe, and those of earlier pipes with a
        failure. There are none if bash has not reported them."""
        text, report = self.without_report(output)
        last, _, earlier = report.removeprefix(f"\n{self._mark} ").partition("|")
        return text, _codes(last), tuple(map(_codes, filter(None, earlier.split(";"))))

    def note(self, codes: Sequence[int], earlier: Sequence[Sequence[int]]) -> str:
        """Return a text for the model about the pipes in which a command other than the last one failed. Return an
        empty string if there are none. See `split` for the arguments."""
        is_last = _hides_failure(codes)
        others = [each for each in earlier if _hides_failure(each) and not (is_last and tuple(each) == tuple(codes))]
        shown = [f"exit codes in the last pipe: {', '.join(map(str, codes))}"] if is_last else []
        shown += [f"exit codes in an earlier pipe: {', '.join(map(str, each))}" for each in others[:_MAX_PIPES]]
        return "; ".join(shown)


# Under `set -x`, bash prints the commands of traps as well. So the output of the traps goes nowhere.
_LAST = '{ crow_last="${PIPESTATUS[*]}"; set +x; } 2>/dev/null'
_LOOK = (
    '{ crow_codes="${PIPESTATUS[*]}"; case "$crow_codes" in *[1-9]*" "*) case ";$crow_pipes;" in *";$crow_codes;"*) ;; '
    '*) [ ${#crow_pipes} -gt 200 ] || crow_pipes="$crow_pipes${crow_pipes:+;}$crow_codes";; esac;; esac; } 2>/dev/null'
)
"""Looks at the pipe that ran before the next command. If a command of it other than the last one failed, the exit codes
of the pipe are added to `crow_pipes`, once, and up to about 200 characters in all."""


def _codes(report: str) -> tuple[int, ...]:
    return tuple(int(code) for code in report.split() if code.isdecimal())


def _hides_failure(codes: Sequence[int]) -> bool:
    return any(code not in (0, _SIGPIPE_CODE) for code in codes[:-1])
