"""The command `crow serve`."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import sys

from crow.cli.loading import load
from crow.cli.tokens import run_token_command
from crow.domain.errors import ArgumentError, CrowError, UserError
from crow.runtime import importing
from crow.serve import resident

logger = logging.getLogger(__name__)


def serve_clients(options: argparse.Namespace) -> int:
    """`crow serve`: serve clients over WebSocket, or run one of its commands."""
    if options.token_command is not None:
        return asyncio.run(run_token_command(load(options), options))
    if options.action and not options.user:
        raise ArgumentError(f"--{options.action} works only with --user: crow serve --user --{options.action}")
    if options.user:
        for name in ("listen", "tls_cert", "tls_key"):
            if getattr(options, name):
                flag = f"--{name.replace('_', '-')}"
                raise ArgumentError(
                    f"{flag} cannot be used with --user, because that server listens on its own Unix socket."
                )
        if options.action:
            return _resident(options)
        options.listen = str(resident.own_socket(os.environ))
        if not options.log_file and not sys.stderr.isatty():
            options.log_file = str(load(options).paths.log_file.with_name("serve.log"))
    for name in ("tls_cert", "tls_key", "log_file"):
        if getattr(options, name):  # the settings resolve relative paths against their own directory
            setattr(options, name, os.path.abspath(getattr(options, name)))
    loaded = load(options)
    try:
        with importing():
            from crow.serve.server import serve  # needs packages that may be missing
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in {"starlette", "uvicorn", "websockets"}:
            raise
        raise UserError(
            f"crow serve needs the package {package}, which is not installed. In a clone of crow, run: "
            "pipx install --force '.[serve]'"
        ) from error
    work = serve(loaded, lambda: load(options), offers_v2=options.experimental_v2, is_resident=options.user)
    try:
        return asyncio.run(work)
    except CrowError:
        raise
    except Exception as error:
        logger.exception("crow serve ended")
        raise CrowError(f"internal error: {type(error).__name__}: {error}") from None


def _resident(options: argparse.Namespace) -> int:
    """Run `crow serve --user` with `--start`, `--stop` or `--status`."""
    if options.action == "start":
        resident.start(os.environ)
        return 0
    if options.action == "stop":
        timeout_s = load(options).settings.serve.drain_timeout_s + resident.START_S
        stopped = resident.stop(os.environ, timeout_s=timeout_s)
        print("No server of this user runs." if stopped is None else f"The server (process {stopped.pid}) has ended.")
        return 0
    running = resident.find(os.environ)
    print("No server of this user runs." if running is None else running.describe())
    return 0 if running is not None else 1
