"""Starts `crow` by forking a process that has already imported everything.

This saves half a second per test. The child has its own arguments, environment, directory and pipes; it differs
from a new process only in its imported modules, which it does not take down at the end. Linux only.
`python -m tests.support.fork_server SOCKET [MODULE...]` is the server; it ends when its stdin is closed.
"""

from __future__ import annotations

import ast
import asyncio
import atexit
import fcntl
import gc
import importlib
import os
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import termios
import threading
import time
import traceback
import types
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from pathlib import Path
from shlex import quote
from typing import Any, NoReturn, Self, get_args

from crow.domain.messages import WireName

__all__ = ["ForkedProcess", "ForkedProgram", "command", "forking_python", "put_on_path", "run_script", "start"]

ROOT = Path(__file__).parents[2]
REQUEST_BYTES = 1 << 20
END_S = 60.0
"""How long processes may take to end when their server ends, before they are killed."""
IMPORTED_LATER = (
    "anyio._backends._asyncio",
    "concurrent.futures.thread",
    "crow.agent.sessions.runner",
    "crow.app",
    "crow.bridge.resident",
    "crow.cli.acp",
    "crow.cli.admin",
    "crow.cli.arguments",
    "crow.cli.checks",
    "crow.cli.config",
    "crow.cli.imports",
    "crow.cli.reference",
    "crow.cli.run",
    "crow.cli.sessions",
    "crow.cli.tokens",
    "crow.demo",
    "crow.llm.client",
    "crow.llm.offline",
    "crow.serve.server",
    "crow.store.postgres.store",
    "crow.settings.write",
    "crow.store.sqlite.admin",
    "crow.store.sqlite.store",
    "crow.tools.mcp.client",
    "crow.tools.sandbox.confiner",
    "crow.tools.sandbox.landlock",
    "crow.terminal.chat",
    "crow.terminal.run",
    "crow.tools.workspace",
    "encodings.utf_16_le",
    "openai.resources.chat.completions",
    "resource",
    "rich.progress",
)
"""What a running crow imports only when it needs it."""
ALSO_IMPORTED: list[str] = []
"""Other modules that scripts of the tests import. Fill it before the first process is started."""
WAITS = {
    "crow.agent.history.titles": ("REST_S", 0.05),
    "crow.llm.offline": ("PIECE_DELAY_S", 0.0),
    "crow.llm.stream": ("_FIRST_WAIT_S", 0.02),
}
"""Pauses of crow, as modules and their constants, and how long they are in forked processes, in seconds."""


class ForkedProcess:
    """The part of :class:`asyncio.subprocess.Process` that tests use."""

    def __init__(
        self,
        pid: int,
        server: socket.socket,
        stdin: asyncio.StreamWriter,
        outputs: Sequence[tuple[asyncio.StreamReader, asyncio.ReadTransport]],
    ) -> None:
        self.pid, self.stdin = pid, stdin
        (self.stdout, _), (self.stderr, _) = outputs
        self._outputs = outputs
        self.returncode: int | None = None
        self._server = server
        self._ended = asyncio.Event()
        asyncio.get_running_loop().add_reader(server.fileno(), self._end)

    async def wait(self) -> int:
        """Wait for the exit. Returns the exit code, or the negative number of the signal that ended the process."""
        await self._ended.wait()
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send a signal, unless the process has ended."""
        if self.returncode is None:
            with suppress(ProcessLookupError):  # it has ended, and the server has not yet said so
                os.kill(self.pid, number)

    def kill(self) -> None:
        """Send SIGKILL."""
        self.send_signal(signal.SIGKILL)

    def close(self) -> None:
        """Stop reading, also if another process still holds the outputs open."""
        for _, transport in self._outputs:
            transport.close()

    def _end(self) -> None:
        asyncio.get_running_loop().remove_reader(self._server.fileno())
        with self._server:
            self.returncode = int(self._server.recv(16))
        self.stdin.close()
        self._ended.set()


async def start(
    arguments: Sequence[str],
    *,
    env: Mapping[str, str],
    cwd: Path,
    limit: int,
    program: str = "crow.cli",
    before: str = "",
) -> ForkedProcess:
    """Start `crow` with these arguments; `limit` is the buffer limit of the streams in bytes. `program` is the module
    with the function `main` that gets the arguments; the code `before` is run before it."""
    (child_in, stdin), (stdout, child_out), (stderr, child_err) = os.pipe(), os.pipe(), os.pipe()
    request = {"arguments": list(arguments), "env": dict(env), "cwd": str(cwd), "program": program, "before": before}
    pid, server = _fork(request, child_in, child_out, child_err)
    server.setblocking(False)
    outputs = [await _reader(fd, limit) for fd in (stdout, stderr)]
    return ForkedProcess(pid, server, await _writer(stdin), outputs)


def _fork(request: Mapping[str, object], *fds: int) -> tuple[int, socket.socket]:
    """Fork a process that gets these files as stdin, stdout and stderr; close them here. Return its id, and the socket
    that will receive its exit code."""
    server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    server.connect(_address())
    socket.send_fds(server, [repr(request).encode()], fds)
    for fd in fds:
        os.close(fd)
    return int(server.recv(16)), server


class ForkedProgram:
    """The part of :class:`subprocess.Popen` that tests of the command line use. Leaving the context waits for the end.

    Runs `crow` with these arguments, or the Python code `script`: with pipes, or in the terminal whose file is
    `terminal`. `stdout` may be a file.
    The descriptors `closed` are closed, as if before the process started; `encoding` is that of its texts.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        *,
        env: Mapping[str, str],
        cwd: Path,
        stdin: int = subprocess.DEVNULL,
        stdout: int = subprocess.PIPE,
        terminal: int | None = None,
        closed: Sequence[int] = (),
        encoding: str = "utf-8",
        script: str = "",
    ) -> None:
        command = {"terminal": terminal is not None, "closed": list(closed), "encoding": encoding, "script": script}
        request = {"arguments": list(arguments), "env": dict(env), "cwd": str(cwd), "command": command}
        self.stdin = self.stdout = self.stderr = None
        if terminal is not None:
            theirs = (os.dup(terminal), os.dup(terminal), os.dup(terminal))
        else:
            child_in, child_out = os.open(os.devnull, os.O_RDONLY), stdout
            if stdin == subprocess.PIPE:
                os.close(child_in)
                child_in, ours = os.pipe()
                self.stdin = open(ours, "wb")  # noqa: SIM115
            if stdout == subprocess.PIPE:
                ours, child_out = os.pipe()
                self.stdout = open(ours, "rb")  # noqa: SIM115
            else:
                child_out = os.dup(stdout)
            ours, child_err = os.pipe()
            self.stderr = open(ours, "rb")  # noqa: SIM115
            theirs = (child_in, child_out, child_err)
        self.pid, self._server = _fork(request, *theirs)
        self.returncode: int | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._close_files()
        self.wait()

    def communicate(self, data: bytes = b"", timeout: float = 120) -> tuple[bytes, bytes]:
        """Send `data`, and read until the end. Return stdout and stderr."""
        with ThreadPoolExecutor(2) as threads:
            outputs = [threads.submit(file.read if file else bytes) for file in (self.stdout, self.stderr)]
            if self.stdin is not None:
                with suppress(BrokenPipeError):  # it has ended without reading
                    self.stdin.write(data)
                with suppress(BrokenPipeError):
                    self.stdin.close()
            out, err = (output.result(timeout) for output in outputs)
        self._close_files()
        self.wait(timeout)
        return out, err

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the exit. Return the exit code, or the negative number of the signal that ended the process."""
        if self.returncode is None:
            self._server.settimeout(timeout)
            with self._server:
                self.returncode = int(self._server.recv(16))
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send a signal, unless the process has ended."""
        if self.returncode is None:
            with suppress(ProcessLookupError):  # it has ended, and the server has not yet said so
                os.kill(self.pid, number)

    def kill(self) -> None:
        """Send SIGKILL."""
        self.send_signal(signal.SIGKILL)

    def _close_files(self) -> None:
        for file in (self.stdin, self.stdout, self.stderr):
            if file is not None:
                file.close()


COMMAND = """
import os, signal, socket, sys
server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
server.connect(sys.argv[1])
command = {"terminal": False, "closed": [], "encoding": "utf-8", "script": sys.argv[2]}
request = {"arguments": sys.argv[3:], "env": dict(os.environ), "cwd": os.getcwd(), "command": command, "is_tied": True}
socket.send_fds(server, [repr(request).encode()], (0, 1, 2))
pid = int(server.recv(16))
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, lambda number, _: os.kill(pid, number))
code = int(server.recv(16))
if code < 0:
    os.kill(os.getpid(), -code)
sys.exit(code)
"""
"""Forks `crow` with its own arguments, environment, directory and files, and exits as that does. It imports little, and
no json, because many tests wait for its start."""


def command(code: str = "") -> list[str]:
    """Return the start of a command line that does what `crow` does, or what this code does, for tests that run it from
    a shell or as a `subprocess`. SIGINT and SIGTERM reach the forked process, and it does not outlive the command."""
    if sys.platform != "linux":
        return [sys.executable, *(("-c", code) if code else ("-m", "crow"))]
    return [sys.executable, "-I", "-S", "-c", COMMAND, _address(), code]


def put_on_path(directory: Path) -> None:
    """Write `command` into the directory as the program `crow`."""
    directory.mkdir(exist_ok=True)
    (directory / "crow").write_text(f'#!/bin/sh\nexec {" ".join(map(quote, command()))} "$@"\n', "utf-8")
    (directory / "crow").chmod(0o755)


def forking_python(directory: Path) -> Path:
    """Write a program that stands for `sys.executable` where crow starts itself. What it starts is forked, and crow
    that runs there starts itself in the same way. Return its path."""
    program = directory / "python"
    code = f"import sys\nsys.executable = {str(program)!r}\nfrom crow.__main__ import main\nsys.exit(main())"
    start = " ".join(map(quote, command(code)))
    program.write_text(f'#!/bin/sh\nshift 3  # -P -m crow\nexec {start} "$@"\n', "utf-8")
    program.chmod(0o755)
    return program


def run_script(
    code: str, *arguments: str, env: Mapping[str, str] | None = None, check: bool = True
) -> subprocess.CompletedProcess[bytes]:
    """Run Python code in the directory of this project, and wait for its end. With `check`, it must not fail.

    It costs much less than a new interpreter that imports crow."""
    if sys.platform != "linux":
        new = None if env is None else dict(env)
        command = [sys.executable, "-c", code, *arguments]
        return subprocess.run(command, cwd=ROOT, env=new, check=check, capture_output=True)
    with ForkedProgram(arguments, env=os.environ if env is None else env, cwd=ROOT, script=code) as process:
        out, err = process.communicate(timeout=300)
    ended = process.wait()
    assert ended == 0 or not check, f"it ended with {ended}: {err.decode()}"
    return subprocess.CompletedProcess(["-c", *arguments], ended, out, err)


async def _reader(fd: int, limit: int) -> tuple[asyncio.StreamReader, asyncio.ReadTransport]:
    reader = asyncio.StreamReader(limit=limit)
    loop = asyncio.get_running_loop()
    transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(fd, "rb", 0))
    return reader, transport


async def _writer(fd: int) -> asyncio.StreamWriter:
    loop = asyncio.get_running_loop()
    transport, protocol = await loop.connect_write_pipe(
        lambda: asyncio.StreamReaderProtocol(asyncio.StreamReader()), os.fdopen(fd, "wb", 0)
    )
    return asyncio.StreamWriter(transport, protocol, None, loop)


@cache
def _address() -> str:
    """The socket of this process's server; the first call starts it."""
    directory = tempfile.TemporaryDirectory(prefix="crow-tests-")
    address = f"{directory.name}/server"
    program = subprocess.Popen(
        [sys.executable, "-m", __name__, address, *ALSO_IMPORTED],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=ROOT,
        env={"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT)},
        start_new_session=True,  # what ends the tests does not end it before its children
    )
    assert program.stdin is not None
    assert program.stdout is not None
    assert program.stdout.read() == b"ready"

    def stop() -> None:
        program.communicate()
        directory.cleanup()

    atexit.register(stop)
    return address


def serve(address: str, *modules: str) -> NoReturn:
    """Import crow and these modules. Fork a `crow` for each connection and tell it the exit code, until stdin ends."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener, selectors.DefaultSelector() as selector:
        listener.bind(address)
        listener.listen()
        _import_all(*modules)
        os.write(1, b"ready")
        os.dup2(2, 1)
        selector.register(listener, selectors.EVENT_READ)
        selector.register(0, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fileobj == 0:
                    _end_all(list({each.data[0] for each in selector.get_map().values() if each.data}))
                    sys.exit(0)
                if key.data is None:
                    client, _ = listener.accept()
                    data, fds, _, _ = socket.recv_fds(client, REQUEST_BYTES, 3)
                    request = ast.literal_eval(data.decode())
                    if (pid := os.fork()) == 0:
                        selector.close()
                        listener.close()
                        client.close()
                        _run(request, fds)
                    for fd in fds:
                        os.close(fd)
                    client.send(str(pid).encode())
                    selector.register(os.pidfd_open(pid), selectors.EVENT_READ, (pid, client))
                    if "is_tied" in request:
                        selector.register(client, selectors.EVENT_READ, (pid, client))
                elif key.fileobj is key.data[1]:  # the command was killed
                    selector.unregister(key.fileobj)
                    os.kill(key.data[0], signal.SIGKILL)
                    os.waitid(os.P_PID, key.data[0], os.WEXITED | os.WNOWAIT)
                else:
                    pid, client = key.data
                    if client in selector.get_map():
                        selector.unregister(client)
                    selector.unregister(key.fileobj)
                    os.close(key.fd)
                    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                    with client, suppress(BrokenPipeError):  # a killed command does not listen
                        client.send(str(code).encode())


def _end_all(children: Sequence[int]) -> None:
    """End the processes that still run, because a test failed or its process was killed."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        for child in children:
            os.kill(child, number)  # its id stays until somebody waits for it
        end = time.monotonic() + END_S
        while children and time.monotonic() < end:
            children = [child for child in children if os.waitpid(child, os.WNOHANG)[0] == 0]
            time.sleep(0.01)


def _import_all(*modules: str) -> None:
    """Import everything that crow may import later, and build the models that it would build on first use."""
    gc.disable()  # what is imported stays
    for module in (*IMPORTED_LATER, *modules):
        importlib.import_module(module)
    for module, (name, seconds) in WAITS.items():
        assert hasattr(sys.modules[module], name)
        setattr(sys.modules[module], name, seconds)
    from crow.adapters import prepare_calls
    from crow.cli.arguments import command_parser
    from crow.llm.wires import wire_named
    from crow.protocol.connection import MODELS
    from crow.settings.load import load_settings
    from crow.settings.types import Section

    prepare_calls()
    for wire in get_args(WireName):
        wire_named(wire)
    for model in (*MODELS.values(), *_below(Section)):
        model.model_rebuild()
    load_settings({}, {"CROW_HOME": os.devnull, "CROW_MODEL": "offline"})
    command_parser(["acp"])
    gc.freeze()
    gc.enable()


def _below(kind: type[Any]) -> list[type[Any]]:
    """The subclasses of a class, and theirs."""
    return [each for child in kind.__subclasses__() for each in (child, *_below(child))]


def _run(request: dict[str, object], fds: Sequence[int]) -> NoReturn:
    """In the child: run `crow` with these arguments and exit."""
    for number, fd in enumerate(fds):
        os.dup2(fd, number)
        os.close(fd)
    for fd in range(3, 64):  # the pipes of other children
        try:
            os.close(fd)
        except OSError:
            continue
    os.chdir(str(request["cwd"]))
    os.environ.clear()
    os.environ.update(request["env"])  # type: ignore[call-overload]
    time.tzset()
    arguments = request["arguments"]
    assert isinstance(arguments, list)
    sys.argv = ["crow", *arguments]
    if "command" in request:
        code = _run_command(**request["command"])  # type: ignore[arg-type]
    else:
        exec(str(request["before"]), {})
        code = importlib.import_module(str(request["program"])).main(arguments)
    _end(code)


def _end(code: int) -> NoReturn:
    """In the child: exit as Python does, but leave the imported modules alone.

    Python would take each of them down. That copies nearly all pages that the child shares with the server: 0.1 s.
    """
    threading._shutdown()  # type: ignore[attr-defined]  # multiprocessing ends its forks like this, too
    atexit._run_exitfuncs()
    gc.collect()  # an object that complains when it is collected does so on stderr, as at a usual exit
    try:
        for file in (sys.stdout, sys.stderr):
            if file is not None:
                file.flush()
    except OSError:
        sys.exit(code)  # Python has its own words and exit code for this
    os._exit(code)


def _run_command(*, terminal: bool, closed: Sequence[int], encoding: str, script: str) -> int:
    """In the child: do what `python -m crow` does, or `python -c SCRIPT`."""
    if terminal:
        os.setsid()
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    # The server's own files know neither their encoding nor whether they lead to a terminal.
    text: dict[str, Any] = {"encoding": encoding, "closefd": False}
    sys.stdin = open(0, errors="surrogateescape", **text)  # noqa: SIM115
    sys.stdout = open(1, "w", errors="surrogateescape", **text)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, errors="backslashreplace", **text)  # noqa: SIM115
    for fd in closed:
        os.close(fd)
        setattr(sys, ("stdin", "stdout", "stderr")[fd], None)
    if script:
        return _run_script(script)
    return int(importlib.import_module("crow.__main__").main())


def _run_script(code: str) -> int:
    module = types.ModuleType("__main__")
    sys.modules["__main__"] = module
    try:
        exec(compile(code, "<script>", "exec"), module.__dict__)
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # noqa: BLE001  as Python does at the end of a program
        traceback.print_exc()
        return 1
    return 0


if __name__ == "__main__":
    serve(*sys.argv[1:])
