"""Runs the command that publishes a page."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path

from crow.domain.errors import ArgumentError
from crow.domain.text import on_one_line, shorten
from crow.programs import named_program

_TIMEOUT_S = 300.0
_URL = re.compile(r"https?://[!-~]{1,2000}")


def publish(command: Sequence[str], page: Path, folder: Path) -> str:
    """Run `share.command` with the path of the page, and return the URL that it prints. This function blocks. A program
    without a directory is looked up in the absolute directories on PATH, and a relative one is in `folder`.

    :raises ArgumentError: the command fails, takes too long, or prints no URL. The message says where the page is.
    """
    rest = f"The page is in {page}."
    name = os.path.expanduser(command[0])
    program = named_program(str(folder / name) if os.path.dirname(name) else name)
    if program is None:
        raise ArgumentError(f"share.command: there is no program {on_one_line(command[0])}. {rest}")
    try:
        done = subprocess.run(  # noqa: S603 - the command comes from the user's own file
            [program, *command[1:], str(page.absolute())],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_TIMEOUT_S,
            check=False,
            env=os.environ,  # the default is the initial environment, in which crow has overwritten secrets
        )
    except subprocess.TimeoutExpired:
        raise ArgumentError(f"share.command did not end within {_TIMEOUT_S:g} s. {rest}") from None
    except OSError as error:
        raise ArgumentError(f"share.command cannot be started: {error.strerror or error}. {rest}") from error
    if done.returncode != 0:
        last = done.stderr.decode("utf-8", "replace").strip().splitlines()[-1:] or ["it printed no reason"]
        words = shorten(on_one_line(last[0]), 300)
        raise ArgumentError(f"share.command ended with code {done.returncode}: {words}. {rest}")
    urls = [word for word in done.stdout.decode("utf-8", "replace").split() if _URL.fullmatch(word)]
    if not urls:
        raise ArgumentError(f"share.command printed no http or https URL. {rest}")
    return urls[-1]
