"""Notices failures in shell pipes that the exit code of the command line hides."""

from __future__ import annotations

import re
import secrets
from collections.abc import Sequence

_MAX_PIPES = 3
"""At most this many earlier pipes with a failure are reported."""
_SIGPIPE_CODE = 128 + 13
"""The exit code that bash reports for a command that wrote to a pipe which nobody read any more, as in `... | head`."""


class PipeStatuses:
    """Lets bash report the exit codes of all commands in pipes, so that a failure is noticed although the last command
    of its pipe succeeded."""

    def __init__(self, command: str) -> None:
        self._mark = f"crow-{secrets.token_hex(8)}"
        # After `exec 2>FILE`, the report would go to a file of the user. `find -exec` does no harm.
        if "|" in command and not re.search(r"(?<!-)\bexec\b", command):
            report = f's="${{PIPESTATUS[*]}}"; printf "\\n%s %s|%s\\n" {self._mark} "$s" "$crow_pipes" >&2'
            # Before each command, look at the pipe that ran before it. `set -x` would print that each time.
            is_traced = re.search(r"\bset\s+-\w*[xo]", command) is not None
            look = "" if is_traced else f" && trap '{_LOOK}' DEBUG"
            command = f"[ \"$BASH\" ] && trap '{report}' EXIT{look}; {command}"
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


_LOOK = (
    'crow_codes="${PIPESTATUS[*]}"; case "$crow_codes" in *[1-9]*" "*) case ";$crow_pipes;" in *";$crow_codes;"*) ;; '
    '*) [ ${#crow_pipes} -gt 200 ] || crow_pipes="$crow_pipes${crow_pipes:+;}$crow_codes";; esac;; esac'
)


def _codes(report: str) -> tuple[int, ...]:
    return tuple(int(code) for code in report.split() if code.isdecimal())


def _hides_failure(codes: Sequence[int]) -> bool:
    return any(code not in (0, _SIGPIPE_CODE) for code in codes[:-1])
