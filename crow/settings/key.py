"""A key that a command prints, such as that of a password manager. The only process that settings start."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence

from crow.domain.errors import ConfigError

__all__ = ["key_from"]

_LONGEST_S = 30.0


def key_from(command: Sequence[str]) -> str:
    """The first line that `command` prints. Blocks until it ends. :raises ConfigError: it fails or prints none."""
    shown = " ".join(command)
    try:
        done = subprocess.run(  # noqa: S603  the user's own file names it
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=_LONGEST_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise ConfigError(f"api_key_command `{shown}` did not end within {_LONGEST_S:g} s.") from None
    except OSError as error:
        raise ConfigError(f"api_key_command `{shown}` cannot be started: {error.strerror or error}.") from error
    if done.returncode != 0:
        said = done.stderr.decode("utf-8", "replace").strip().splitlines()
        raise ConfigError(
            f"api_key_command `{shown}` ended with code {done.returncode}: {said[-1] if said else 'it said nothing'}"
        )
    lines = done.stdout.decode("utf-8", "replace").split()
    if not lines:
        raise ConfigError(f"api_key_command `{shown}` printed no key.")
    return lines[0]
