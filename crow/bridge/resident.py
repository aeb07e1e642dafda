"""Finds the user's resident server, `crow serve --user`, in a few milliseconds.

Every `crow acp` runs this module before it imports anything else. So the code that starts and stops the server is in
:mod:`crow.serve.resident`, whose imports are slow. This module also reads the one setting that it needs,
`serve.autostart`, without :mod:`crow.settings`. If this module does not understand the configuration file,
:mod:`crow.settings` reads the file later and decides.
"""

from __future__ import annotations

import os
import stat
import sys

from crow.bridge.websocket import short_hash

TYPE_CHECKING = False  # like `typing.TYPE_CHECKING`; importing `typing` would take 10 ms
if TYPE_CHECKING:
    from collections.abc import Mapping

OWN_PROCESS = ("CROW_TRACE",)
"""If one of these environment variables is set, `crow acp` does not use the resident server. The reason is that each of
these variables applies only to the process in which it is set."""

PLACES = ("CROW_HOME", "CROW_CONFIG")
"""The environment variables that choose the configuration file and the data directory."""

_MAX_CONFIG_BYTES = 1024 * 1024


def socket_path(env: Mapping[str, str]) -> str:
    """Return the path of the server's socket. Each combination of values of CROW_HOME and CROW_CONFIG has its own
    server."""
    chosen = [absolute(path) if path else "" for path in map(env.get, PLACES)]
    name = f"serve-{short_hash(chr(0).join(chosen).encode())}.sock" if any(chosen) else "serve.sock"
    return os.path.join(_runtime_directory(env), name)


def absolute(path: str) -> str:
    """Return `path` as an absolute path, in the same way as `crow.settings` does."""
    return os.path.abspath(os.path.expanduser(path))


def _runtime_directory(env: Mapping[str, str]) -> str:
    uid = os.getuid()
    # Some editors start crow without XDG_RUNTIME_DIR. With and without it, crow must find the same directory.
    for directory in (env.get("XDG_RUNTIME_DIR", ""), f"/run/user/{uid}"):
        if os.path.isabs(directory) and is_private(directory):
            return os.path.join(directory, "crow")
    return os.path.join(env.get("TMPDIR") or "/tmp", f"crow-{uid}")  # noqa: S108  checked by `is_private`


def is_private(directory: str) -> bool:
    """Return whether the directory belongs to this user and nobody else can create files in it."""
    try:
        status = os.lstat(directory)
    except OSError:
        return False
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o022


def running_socket(env: Mapping[str, str]) -> str | None:
    """Return the path of the server's socket, or None if there is no such socket in a private directory."""
    path = socket_path(env)
    try:
        is_socket = stat.S_ISSOCK(os.lstat(path).st_mode)
    except OSError:
        return None
    return path if is_socket and is_private(os.path.dirname(path)) else None


def config_file(env: Mapping[str, str]) -> str | None:
    """Return the path of the user's config.toml, or None if finding the file needs `crow.settings`."""
    if env.get("CROW_CONFIG"):
        return absolute(env["CROW_CONFIG"])
    if env.get("CROW_HOME"):
        return os.path.join(absolute(env["CROW_HOME"]), "config.toml")
    home = env.get("HOME", "")
    if not os.path.isabs(home):
        return None
    if sys.platform == "darwin":
        return os.path.join(home, "Library", "Application Support", "crow", "config.toml")
    base = env.get("XDG_CONFIG_HOME", "").strip()
    return os.path.join(base if base else os.path.join(home, ".config"), "crow", "config.toml")


def wants_autostart(env: Mapping[str, str]) -> bool:
    """Return whether the user's configuration file sets `serve.autostart = true`. The result is also False if this
    function does not understand the way in which the file is written."""
    file = config_file(env)
    if file is None:
        return False
    try:
        with open(file, "rb") as opened:
            text = opened.read(_MAX_CONFIG_BYTES + 1)
    except OSError:
        return False
    if b"autostart" not in text or len(text) > _MAX_CONFIG_BYTES or b'"""' in text or b"'''" in text:
        return False
    table, found = b"", False
    for line in text.split(b"\n"):
        words = line.partition(b"#")[0].replace(b" ", b"").replace(b"\t", b"").strip()
        if words.startswith(b"["):
            table = words
        elif (table == b"[serve]" and words == b"autostart=true") or (not table and words == b"serve.autostart=true"):
            found = True
        elif b"autostart" in words:
            return False
    return found
