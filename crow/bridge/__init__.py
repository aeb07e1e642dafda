"""`crow acp --connect`: connects an editor on stdin and stdout to a server that is already running.

This package must start almost as fast as Python itself. So its modules import only each other and a few modules of the
standard library. Some of these are the C modules under the public ones: importing `signal`, `socket`, `json`, `hashlib`
and `typing` takes almost three times as much processor time as starting Python, and importing the C modules takes a
tenth of the time of starting Python. Importing `argparse` alone takes as long as starting Python, so `run_if_asked`
reads its two options itself.
"""

from __future__ import annotations

import os
import stat

TYPE_CHECKING = False  # like `typing.TYPE_CHECKING`; importing `typing` would take 10 ms
if TYPE_CHECKING:
    from collections.abc import Sequence

    from crow.bridge.loop import Bridge
    from crow.bridge.websocket import Address

__all__ = [
    "UnusableServer",
    "connect_editor",
    "connect_to_resident",
    "run_if_asked",
    "run_with_resident",
    "server_at",
    "start_resident",
]

FAILED, USERS_FAULT = 1, 2
"""The exit codes after an error. `USERS_FAULT` means that the user can correct the cause."""

_MAX_TOKEN_BYTES = 4096


def run_if_asked(arguments: Sequence[str]) -> int | None:
    """Run `acp --connect ADDRESS [--token-file FILE]` and return the exit code. Return None for any other arguments.

    The argument parser of `crow.cli` is not used here, because building it takes as long as starting Python.
    """
    if not arguments or arguments[0] != "acp":
        return None
    given: dict[str, str] = {}
    rest = list(arguments[1:])
    while rest:
        name, equals, value = rest.pop(0).partition("=")
        if name not in ("--connect", "--token-file") or name in given or not (equals or rest):
            return None
        given[name] = value if equals else rest.pop(0)
    if "--connect" not in given or any(value.startswith("-") for value in given.values()):
        return None
    return connect_editor(given["--connect"], given.get("--token-file"))


def run_with_resident(arguments: Sequence[str]) -> int | None:
    """Run `acp` with the resident server if `serve.autostart` is true and a server of this version is running.

    Return the exit code. Return None if `acp` must run without the server. In that case, nothing was read from stdin.
    """
    from crow.bridge.resident import OWN_PROCESS, running_socket, wants_autostart

    if list(arguments) not in ([], ["acp"]) or any(os.environ.get(name) for name in OWN_PROCESS) or os.isatty(0):
        return None
    path = running_socket(os.environ)
    return connect_to_resident(path) if path is not None and wants_autostart(os.environ) else None


def connect_to_resident(path: str) -> int | None:
    """Carry messages between the editor on stdin and stdout and the resident server whose socket is `path`.

    Return the exit code, or None if no server of this version that runs as this user listens there.
    """
    from crow.bridge.loop import Bridge, Times, first_headers
    from crow.bridge.websocket import Address
    from crow.bridge.wire import NotConnected, connect
    from crow.version import __version__

    address = Address(path)
    try:
        wire = connect(address, first_headers(""), Times.connect)
    except NotConnected:
        return None
    if wire.response.headers.get("crow-version") != __version__ or not wire.belongs_to_this_user:
        wire.close()
        return None
    return _run(Bridge(address, wire=wire, start_server=start_resident, handles_signals=True))


def start_resident() -> str:
    """Start the resident server if it is not running. Return an empty string if the server now runs. Otherwise return
    the reason why it did not start."""
    import subprocess  # takes 10 ms, and is needed only if the server has ended

    from crow.runtime import own_command  # imports ctypes

    command = own_command("serve", "--user", "--start")
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, check=False)  # noqa: S603  our own
    return done.stderr.decode(errors="replace").strip().removeprefix("crow: ") if done.returncode else ""


def connect_editor(address: str, token_file: str | None) -> int:
    """Carry messages between the editor on stdin and stdout and the server at `address`. Return the exit code."""
    from crow.bridge.loop import Bridge

    try:
        os.fstat(0), os.fstat(1)
    except OSError:
        return _fail("stdin or stdout is closed. An editor must start `crow acp` with a pipe for each of them.")
    try:
        place, token = server_at(address, token_file)
    except UnusableServer as error:
        return _fail(str(error))
    return _run(Bridge(place, token=token, handles_signals=True))


def server_at(address: str, token_file: str | None) -> tuple[Address, str]:
    """Return the parsed address of a server, and the token to send to that server. The token may be empty.

    :raises UnusableServer: the address or the token cannot be used.
    """
    from crow.bridge.websocket import Address, BadAddress

    try:
        place = Address(address)
    except BadAddress as error:
        raise UnusableServer(str(error)) from None
    token = _token(token_file)
    if token and not place.is_tls and not place.is_loopback:
        raise UnusableServer(f"The token would travel to {address} unencrypted. Use wss://, or a tunnel to 127.0.0.1.")
    return place, token


def _run(bridge: Bridge) -> int:
    """Run the bridge to its end, and return the exit code. If an error ended the bridge, print the error to stderr."""
    exit_code = bridge.run()
    if exit_code:
        _fail(bridge.problem)
    return exit_code


class UnusableServer(Exception):
    """The address of a server or the token for it cannot be used."""


def _token(file: str | None) -> str:
    """Read the token from `file`, or from CROW_TOKEN if `file` is None. Return an empty string if there is no token.

    :raises UnusableServer: the file cannot be read, others can read it, or it does not hold a token.
    """
    if file is None:
        source, token = "CROW_TOKEN", os.environ.get("CROW_TOKEN", "").strip()
    else:
        source, token = file, _read_token(file)
    if not all("!" <= character <= "~" for character in token):
        raise UnusableServer(f"{source} does not hold a token: a token is one word in plain ASCII.")
    return token


def _read_token(file: str) -> str:
    try:
        fd = os.open(os.path.expanduser(file), os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            status = os.fstat(fd)
            mode = stat.S_IMODE(status.st_mode)
            if not stat.S_ISREG(status.st_mode):
                raise UnusableServer(f"{file} is not a file; name the file that holds the token.")
            if mode & 0o077:
                raise UnusableServer(f"{file} can be read by others (mode {mode:o}); run chmod 600 {file}.")
            token = os.read(fd, _MAX_TOKEN_BYTES + 1)
        finally:
            os.close(fd)
    except OSError as error:
        raise UnusableServer(f"The token file {file} cannot be read: {error.strerror}.") from error
    if not token.strip() or len(token) > _MAX_TOKEN_BYTES or not token.isascii():
        raise UnusableServer(f"{file} does not hold a token: a token is one word in plain ASCII.")
    return token.decode().strip()


def _fail(problem: str) -> int:
    from crow.domain.text import safe

    words = safe(problem).replace("\n", "\n      ")
    os.write(2, f"crow: {words}\n".encode(errors="replace"))
    return USERS_FAULT
