"""Runs the command that publishes a page."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

from crow.domain.errors import ArgumentError
from crow.domain.text import on_one_line, shorten
from crow.programs import CommandFailed, named_program, output_of

_TIMEOUT_S = 300.0
_URL = re.compile(r"https?://[!-~]{1,2000}")


def publish(command: Sequence[str], page: Path, folder: Path) -> str:
    """Run `share.command` with the path of the page, and return the URL that it prints. This function blocks. A program
    named without a slash is looked up in the absolute directories on PATH. A relative path is relative to `folder`.

    :raises ArgumentError: the command fails, takes too long, or prints no URL. The message says where the page is.
    """
    rest = f"The page is in {page}."
    name = os.path.expanduser(command[0])
    program = named_program(str(folder / name) if os.path.dirname(name) else name)
    if program is None:
        raise ArgumentError(f"share.command: there is no program {on_one_line(command[0])}. {rest}")
    try:
        printed = output_of([program, *command[1:], str(page.absolute())], timeout_s=_TIMEOUT_S)
    except CommandFailed as error:
        raise ArgumentError(f"share.command {shorten(on_one_line(str(error)), 350)}. {rest}") from error
    urls = [word for word in printed.split() if _URL.fullmatch(word)]
    if not urls:
        raise ArgumentError(f"share.command printed no http or https URL. {rest}")
    return urls[-1]
