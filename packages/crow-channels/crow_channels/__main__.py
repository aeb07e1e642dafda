"""The command line: `crow-channels CONFIG`."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from crow_channels import __version__
from crow_channels.app import make_chat, run
from crow_channels.config import Config, read_config
from crow_channels.errors import ChatRefused, ConfigError, StateError

FAILED, USERS_FAULT = 1, 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    parser = argparse.ArgumentParser(prog="crow-channels", description="Connects chats to crow.")
    parser.add_argument("config", metavar="CONFIG", type=Path, help="the configuration, a TOML file")
    parser.add_argument("--check", action="store_true", help="check the configuration, and exit")
    parser.add_argument("--version", action="version", version=__version__)
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(message)s")
    try:
        config = read_config(options.config, os.environ)
        if options.check:
            for each in config.chats:
                make_chat(each)
            print("The configuration is valid.")
            return 0
        return asyncio.run(_run(config))
    except (ConfigError, StateError) as error:
        print(f"crow-channels: {error}", file=sys.stderr)
        return USERS_FAULT


async def _run(config: Config) -> int:
    """Run until SIGTERM or SIGINT."""
    serving = asyncio.ensure_future(run(config))
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, serving.cancel)
    try:
        await serving
    except asyncio.CancelledError:
        return 0
    except ExceptionGroup as group:
        known, _ = group.split((ChatRefused, ConfigError, StateError))
        if known is None:
            raise
        first: BaseException = known
        while isinstance(first, BaseExceptionGroup):
            first = first.exceptions[0]
        print(f"crow-channels: {first}", file=sys.stderr)
        return FAILED
    return 0


if __name__ == "__main__":
    sys.exit(main())
