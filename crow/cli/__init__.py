"""The command line of crow, which runs the command given in the arguments.

Only the module of the given command is imported, because imports are slow: the protocol's SDK takes 300 ms, openai and
mcp 700 ms, asyncio 30 ms, rich 20 ms. If a command fails, crow prints one sentence on stderr. The exit code is then 2
if the user can correct the cause, and 1 otherwise. `crow run` also uses other exit codes.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib import import_module
from typing import TypeAlias, cast

from crow.cli.arguments import command_parser
from crow.domain.errors import ArgumentError, CrowError, UserError
from crow.domain.text import safe
from crow.runtime import importing

_Command: TypeAlias = Callable[[argparse.Namespace], int | None]
"""A function that runs a command and returns the exit code. A return value of None means 0."""

_COMMANDS = {
    "run": "crow.cli.run:run",
    "chat": "crow.cli.chat:chat",
    "acp": "crow.cli.acp:serve_editor",
    "serve": "crow.cli.serve:serve_clients",
    "login": "crow.cli.chat:log_in",
    "demo": "crow.cli.chat:run_demo",
    "sessions": "crow.cli.sessions:run_command",
    "replay": "crow.cli.replay:run_replay",
    "doctor": "crow.cli.checks:doctor",
    "models": "crow.cli.checks:models",
    "mcp": "crow.cli.mcp:run_command",
    "config": "crow.cli.config:print_settings",
    "trace": "crow.cli.trace:run_trace",
    "completion": "crow.cli.reference:print_completion",
    "man": "crow.cli.reference:print_manual",
}
"""The module and the function of each command."""

_OWN_OPTIONS = ("--help", "--version", "--setup")
"""The long options of `crow` itself. In a terminal, any other option is one of `crow chat`."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line and return the exit code. If `arguments` is None, use the arguments of the process."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if _means_chat(arguments):
        arguments = ["chat", *arguments]
    with importing():
        parser = command_parser(arguments)
    options = parser.parse_args(arguments)
    if options.command is None and not options.setup and (sys.stdin is None or sys.stdin.isatty()):
        parser.print_help()
        return 0
    name = "login" if options.setup else options.command or "acp"
    try:
        return _command(name)(options) or 0
    except UserError as error:
        return _fail(error, 2)
    except CrowError as error:
        return _fail(error, 1)
    except FileNotFoundError:
        if _is_in_a_directory():
            raise
        return _fail(ArgumentError("The current directory no longer exists. Change to another one: cd ~"), 2)
    except KeyboardInterrupt:
        return 130


def _means_chat(arguments: Sequence[str]) -> bool:
    """Return whether this command line opens a chat although it names no command: stdin and stdout are terminals, and
    there are at most options of `crow chat`, such as `--continue`."""
    is_ours = bool(arguments) and (not arguments[0].startswith("--") or arguments[0] in _OWN_OPTIONS)
    return not is_ours and all(file is not None and file.isatty() for file in (sys.stdin, sys.stdout))


def _command(name: str) -> _Command:
    module, _, function = _COMMANDS[name].partition(":")
    with importing():
        return cast(_Command, getattr(import_module(module), function))


def _fail(error: Exception, code: int) -> int:
    with suppress(OSError):  # stderr may be closed
        print("crow: " + safe(str(error)).replace("\n", "\n      "), file=sys.stderr)
    return code


def _is_in_a_directory() -> bool:
    try:
        os.getcwd()
    except FileNotFoundError:
        return False
    return True
