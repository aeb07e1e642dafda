"""Runs the user's own checks, such as a type checker, after tools have changed files.

The commands of checks come from the user's settings only. They run confined and may only read, because they often run
code that the model has just written. Where commands cannot be confined, no check runs.
"""

from __future__ import annotations

import hashlib
import re
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from crow.domain.text import shorten, shorten_middle
from crow.tools import NOTHING_EXCLUDED, ExcludedPaths, Workspace
from crow.tools.builtin.output import as_shown
from crow.tools.builtin.scan import glob_expression
from crow.tools.limits import COMMANDS

_CHECK_S = 60
_MAX_CHARS = 6_000
"""The model sees about this many characters of the output of a check."""
_MAX_NAME_CHARS = 80
_FILES = "{files}"
"""Stands in a command for the changed files."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """The results of the checks that ran after a call."""

    text: str = ""
    """The text for the model. Empty if there was nothing to check."""
    ran: tuple[Mapping[str, object], ...] = ()
    """For the log: each check that ran, with its `command`, its `exit_code` (None if it was ended), and the `files`
    that it was limited to (None if it checked everything)."""


class Checks:
    """The checks of a session. `commands` maps globs to command lines: when a file that the glob matches has changed,
    the command runs. In a command, `{files}` stands for the changed files."""

    def __init__(self, commands: Mapping[str, str]) -> None:
        self._commands = [(pattern, _matcher(pattern), command) for pattern, command in commands.items()]
        self._changed: dict[str, None] = {}
        self._failures: dict[str, str] = {}
        """By command, the hash of the output of its last run, if that run failed."""
        self._is_told = False
        """Whether the model was told that checks do not run here."""

    def note(self, name: str) -> None:
        """Remember that a file was changed. `name` is its path, relative to the working directory if it is inside."""
        if any(_covers(pattern, matcher, name) for pattern, matcher, _ in self._commands):
            self._changed[name] = None

    async def run(self, workspace: Workspace, excluded: ExcludedPaths = NOTHING_EXCLUDED) -> Checked:
        """Run the checks whose files have changed since the last call. A check with `{files}` gets only the files that
        still exist, and is skipped if there are none. The commands cannot read the `excluded` files."""
        changed, self._changed = list(self._changed), {}
        if not changed:
            return Checked()
        present = [name for name in changed if await _exists(workspace, name)]
        due: dict[str, dict[str, None]] = {}
        for pattern, matcher, command in self._commands:
            files = [name for name in (present if _FILES in command else changed) if _covers(pattern, matcher, name)]
            if files:
                due.setdefault(command, {}).update(dict.fromkeys(files))
        if not due:
            return Checked()
        await workspace.sandbox_status()  # `confines` is unknown before this call
        if not workspace.confines:
            words = "" if self._is_told else "[the user's checks did not run, because commands cannot be confined here]"
            self._is_told = True
            return Checked(text=words)
        ran: list[Mapping[str, object]] = []
        texts = [await self._run(workspace, command, files, excluded, ran) for command, files in due.items()]
        return Checked(text="\n".join(texts), ran=tuple(ran))

    async def _run(
        self,
        workspace: Workspace,
        command: str,
        files: Iterable[str],
        excluded: ExcludedPaths,
        ran: list[Mapping[str, object]],
    ) -> str:
        """Run one check, and add it to `ran`. Return the text for the model."""
        line = command.replace(_FILES, " ".join(map(_quoted, files)))
        name = shorten(command, _MAX_NAME_CHARS)
        try:
            async with COMMANDS.slot(workspace):
                code, output = await workspace.run(
                    line, access="read", timeout_s=_CHECK_S, on_output=_ignore, excluded=excluded
                )
        except OSError as error:
            return f"[check `{name}` did not run: {error.strerror or error}]"
        ran.append({"command": command, "exit_code": code, "files": list(files) if _FILES in command else None})
        if code == 0:
            self._failures.pop(command, None)
            return f"[check `{name}` passed]"
        end = f"was ended after {_CHECK_S} s" if code is None else f"failed with exit code {code}"
        shown = shorten_middle(as_shown(output.strip("\n")), _MAX_CHARS)
        digest = hashlib.sha256(shown.encode(errors="replace")).hexdigest()
        if self._failures.get(command) == digest:
            return f"[check `{name}` {end}, with the same output as before]"
        self._failures[command] = digest
        hint = workspace.explain_failure("read", output)
        return "\n".join(filter(None, [f"[check `{name}` {end}]", shown, hint]))


async def _exists(workspace: Workspace, name: str) -> bool:
    try:
        return (await workspace.stat(workspace.resolve(name))).kind != "missing"
    except OSError:
        return True  # let the check say what is wrong with the file


async def _ignore(_output: str) -> None:
    """Ignore the output of a check while the check runs. Only its result is shown."""


def _matcher(pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(glob_expression(pattern), re.DOTALL)
    except re.error:
        return re.compile(re.escape(pattern))


def _covers(pattern: str, matcher: re.Pattern[str], name: str) -> bool:
    return matcher.fullmatch(name if "/" in pattern else name.rpartition("/")[2]) is not None


def _quoted(name: str) -> str:
    return shlex.quote(f"./{name}" if name.startswith("-") else name)
