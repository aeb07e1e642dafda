"""Opens pages in the user's browser.

Python's own module `webbrowser` is not used, because it looks up programs on PATH, where a command may have planted
one.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import threading

from crow.programs import SYSTEM_PROGRAMS, Programs, helper_environment, named_program, system_path

_OPEN_S = 5.0
_OPENERS = ("xdg-open", "wslview", "open")


def open_page(url: str, programs: Programs = SYSTEM_PROGRAMS) -> bool:
    """Open a page, and return whether a program seems to have opened it. This call blocks for at most 5 s per program
    that it tries.

    The user may name browsers in BROWSER, separated by colons. Otherwise, one of `programs` opens the page.
    """
    if sys.platform == "win32":
        os.startfile(url)  # noqa: S606 - a part of Windows opens the page
        return True
    env, _ = helper_environment(os.environ)
    commands = (_named_command(named, url) for named in os.environ.get("BROWSER", "").split(os.pathsep))
    if any(_start(command, dict(os.environ)) for command in commands if command):
        return True
    opener = next(filter(None, map(programs.find, _OPENERS)), None)
    return opener is not None and _start([opener, url], env | {"PATH": system_path()})


def _named_command(named: str, url: str) -> list[str]:
    """Return the command line of a browser that the user named; an empty list if there is no such program."""
    try:
        name, *arguments = shlex.split(named)
    except ValueError:  # it is empty, or a quote is missing
        return []
    program = named_program(name)
    if program is None:
        return []
    has_place = any("%s" in argument for argument in arguments)
    return [program, *(part.replace("%s", url) for part in arguments), *([] if has_place else [url])]


def _start(command: list[str], env: dict[str, str]) -> bool:
    """Start a browser. Return whether it has succeeded, or still runs after `_OPEN_S` seconds."""
    null = subprocess.DEVNULL
    try:
        process = subprocess.Popen(  # noqa: S603 - a program of the system, or one that the user named
            command, stdin=null, stdout=null, stderr=null, env=env, start_new_session=True
        )
    except (OSError, ValueError):
        return False
    try:
        return process.wait(_OPEN_S) == 0
    except subprocess.TimeoutExpired:
        threading.Thread(target=process.wait, name="wait for a browser", daemon=True).start()
        return True
