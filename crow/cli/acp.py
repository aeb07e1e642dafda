"""The command `crow acp`."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os

from crow.bridge import connect_editor, connect_to_resident, start_resident
from crow.bridge.resident import OWN_PROCESS, running_socket
from crow.cli.loading import load, load_and_log
from crow.domain.errors import ArgumentError, CrowError
from crow.runtime import importing

logger = logging.getLogger(__name__)


def serve_editor(options: argparse.Namespace) -> int:
    """`crow acp`: serve an editor on stdin and stdout, in this process or through a server."""
    if getattr(options, "connect", None) is not None:  # absent if crow was started without a command
        return _connect(options)
    loaded = load_and_log(options)
    if loaded.settings.serve.autostart and (exit_code := _with_resident(options)) is not None:
        return exit_code
    try:
        with importing():
            from crow.app import serve  # takes 300 ms, and is not needed if a server does the work

        offers_v2 = getattr(options, "experimental_v2", False)  # absent if crow was started without a command
        return asyncio.run(serve(loaded, lambda: load(options), offers_v2=offers_v2))
    except CrowError:
        raise
    except Exception as error:  # editors show stderr to their users: the traceback belongs in the log
        logger.exception("crow acp ended")
        kind = type(error).__name__
        raise CrowError(f"internal error: {kind}: {error}; for more, see the log {loaded.paths.log_file}") from None


def _with_resident(options: argparse.Namespace) -> int | None:
    """Connect the editor to the resident server (`crow serve --user`), and start this server if it is not running.
    Return the exit code, or None if this process has to serve the editor itself."""
    options_given = any(getattr(options, name, None) for name in ("model", "base_url", "mode", "experimental_v2"))
    if options_given or any(os.environ.get(name) for name in OWN_PROCESS):
        return None  # such options and variables apply to one process
    problem = start_resident()
    path = None if problem else running_socket(os.environ)
    if path is None:
        logger.warning("This process serves by itself: the server of this user could not be started: %s", problem)
        return None
    exit_code = connect_to_resident(path)
    if exit_code is None:
        logger.warning(
            "This process serves by itself: the server of this user is another version of crow. Run `crow serve --user "
            "--stop` to replace it."
        )
    return exit_code


def _connect(options: argparse.Namespace) -> int:
    """Run `crow acp --connect`. This function handles only command lines that need a parser. `crow.bridge.run_if_asked`
    runs the usual form of the command without one."""
    for name in ("model", "base_url", "mode", "log_level", "experimental_v2"):
        if getattr(options, name):
            flag = f"--{name.replace('_', '-')}"
            raise ArgumentError(
                f"{flag} has no effect with --connect: the settings of the server apply. Leave out {flag}."
            )
    return connect_editor(options.connect, options.token_file)
