"""The command line of crow, which runs the command given in the arguments.

Each command imports only the packages that it needs, because imports are slow: the protocol's SDK 300 ms, openai and
mcp 700 ms, asyncio 30 ms, rich 20 ms. If a command fails, crow prints one sentence on stderr. The exit code is then 2
if the user can correct the cause, and 1 otherwise. `crow run` also uses other exit codes.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from crow.cli.arguments import Command, command_parser
from crow.domain.errors import ArgumentError, CrowError, UserError

if TYPE_CHECKING:
    from collections.abc import Coroutine
    from typing import TypeVar

    from crow.settings import Loaded

    T = TypeVar("T")

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line and return the exit code. If `arguments` is None, use the arguments of the process."""
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = command_parser(arguments, _COMMANDS)
    options = parser.parse_args(arguments)
    command: Command | None = _login if options.setup else options.command
    if command is None and (sys.stdin is None or sys.stdin.isatty()):
        parser.print_help()
        return 0
    try:
        return (command or _acp)(options) or 0
    except UserError as error:
        return _fail(error, 2)
    except CrowError as error:
        return _fail(error, 1)
    except BrokenPipeError:
        # The reader of our output has exited (`crow sessions | head`). The interpreter must not complain about it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        return 130


def whole_parser() -> argparse.ArgumentParser:
    """Return the parser with the arguments of every command."""
    return command_parser(tuple(_COMMANDS), _COMMANDS)


def _run_async(work: Coroutine[object, object, T]) -> T:
    import asyncio

    return asyncio.run(work)


def _fail(error: Exception | str, code: int) -> int:
    from crow.domain.rendering import safe

    print(f"crow: {safe(str(error))}", file=sys.stderr)
    return code


def _load(options: argparse.Namespace) -> Loaded:
    from crow.runtime import importing

    with importing():
        from crow.settings import load_settings

        flags = {
            "model.name": "model",
            "model.base_url": "base_url",
            "permissions.mode": "mode",
            "log.level": "log_level",
            "serve.listen": "listen",
            "serve.tls_cert": "tls_cert",
            "serve.tls_key": "tls_key",
            "serve.log_file": "log_file",
        }
        given = {key: getattr(options, name, None) or "" for key, name in flags.items()}
        return load_settings(given, os.environ)


def _load_and_log(options: argparse.Namespace) -> Loaded:
    from crow.log import start_logging

    loaded = _load(options)
    start_logging(loaded.paths.log_file, loaded.settings.log.level, loaded.settings.secrets())
    return loaded


def _acp(options: argparse.Namespace) -> int:
    if getattr(options, "connect", None) is not None:  # absent if crow was started without a command
        return _connect(options)
    from crow.runtime import importing

    loaded = _load_and_log(options)
    if loaded.settings.serve.autostart and (exit_code := _with_resident(options)) is not None:
        return exit_code
    try:
        with importing():
            from crow.app import serve

        offers_v2 = getattr(options, "experimental_v2", False)  # absent if crow was started without a command
        return _run_async(serve(loaded, lambda: _load(options), offers_v2=offers_v2))
    except CrowError:
        raise
    except Exception as error:  # editors show stderr to their users: the traceback belongs in the log
        import logging

        logging.getLogger(__name__).exception("crow acp ended")
        kind = type(error).__name__
        return _fail(f"internal error: {kind}: {error}; for more, see the log {loaded.paths.log_file}", 1)


def _with_resident(options: argparse.Namespace) -> int | None:
    """Connect the editor to the resident server (`crow serve --user`), and start this server if it is not running.
    Return the exit code, or None if this process has to serve the editor itself."""
    import logging

    from crow.bridge import connect_to_resident, start_resident
    from crow.bridge.resident import OWN_PROCESS, running_socket

    options_given = any(getattr(options, name, None) for name in ("model", "base_url", "mode", "experimental_v2"))
    if options_given or any(os.environ.get(name) for name in OWN_PROCESS):
        return None  # they apply to one process
    log = logging.getLogger(__name__)
    problem = start_resident()
    path = None if problem else running_socket(os.environ)
    if path is None:
        log.warning("This process serves by itself: the server of this user could not be started: %s", problem)
        return None
    exit_code = connect_to_resident(path)
    if exit_code is None:
        log.warning(
            "This process serves by itself: the server of this user is another version of crow. Run `crow serve --user "
            "--stop` to replace it."
        )
    return exit_code


def _connect(options: argparse.Namespace) -> int:
    """Run `crow acp --connect`. This function handles only command lines that need a parser. `crow.bridge.run_if_asked`
    runs the usual form of the command without one."""
    from crow.bridge import connect_editor

    for name in ("model", "base_url", "mode", "log_level", "experimental_v2"):
        if getattr(options, name):
            flag = f"--{name.replace('_', '-')}"
            raise ArgumentError(
                f"{flag} has no effect with --connect: the settings of the server apply. Leave out {flag}."
            )
    return connect_editor(options.connect, options.token_file)


def _serve(options: argparse.Namespace) -> int:
    from crow.runtime import importing

    if options.token_command is not None:
        from crow.cli.tokens import run_token_command

        return _run_async(run_token_command(_load(options), options))
    if options.action and not options.user:
        raise ArgumentError(f"--{options.action} works only with --user: crow serve --user --{options.action}")
    if options.user:
        from crow.serve import resident

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
            options.log_file = str(_load(options).paths.log_file.with_name("serve.log"))
    for name in ("tls_cert", "tls_key", "log_file"):
        if getattr(options, name):  # the settings resolve relative paths against their own directory
            setattr(options, name, os.path.abspath(getattr(options, name)))
    loaded = _load(options)
    try:
        with importing():
            from crow.serve.server import serve
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in {"starlette", "uvicorn", "websockets"}:
            raise
        raise UserError(
            f"crow serve needs the package {package}, which is not installed. In a clone of crow, run: "
            "pipx install --force '.[serve]'"
        ) from error
    work = serve(loaded, lambda: _load(options), offers_v2=options.experimental_v2, is_resident=options.user)
    try:
        return _run_async(work)
    except CrowError:
        raise
    except Exception as error:
        import logging

        logging.getLogger(__name__).exception("crow serve ended")
        return _fail(f"internal error: {type(error).__name__}: {error}", 1)


def _resident(options: argparse.Namespace) -> int:
    """Run `crow serve --user` with `--start`, `--stop` or `--status`."""
    from crow.serve import resident

    if options.action == "start":
        resident.start(os.environ)
        return 0
    if options.action == "stop":
        timeout_s = _load(options).settings.serve.drain_timeout_s + resident.START_S
        stopped = resident.stop(os.environ, timeout_s=timeout_s)
        print("No server of this user runs." if stopped is None else f"The server (process {stopped.pid}) has ended.")
        return 0
    running = resident.find(os.environ)
    print("No server of this user runs." if running is None else running.describe())
    return 0 if running is not None else 1


def _run(options: argparse.Namespace) -> int:
    from crow.terminal.run import run_prompt

    _load_and_log(options)
    return run_prompt(lambda: _load(options), options)


def _chat(options: argparse.Namespace) -> int:
    from crow.login import log_in
    from crow.terminal.chat import run_chat

    _load_and_log(options)
    return run_chat(lambda: _load(options), options, lambda loaded: _run_async(log_in(loaded)))


def _login(options: argparse.Namespace) -> int:
    from crow.login import log_in

    return _run_async(log_in(_load(options)))


def _demo(_options: argparse.Namespace) -> None:
    from crow.demo import run_demo

    run_demo()


def _sessions(options: argparse.Namespace) -> None:
    from crow.cli.sessions import run_command

    run_command(options, _load(options))


def _doctor(options: argparse.Namespace) -> int:
    from crow.cli.checks import run_doctor

    return _run_async(run_doctor(_load_and_log(options), options))


def _models(options: argparse.Namespace) -> None:
    from crow.cli.checks import print_models

    _run_async(print_models(_load(options), options))


def _mcp(options: argparse.Namespace) -> int | None:
    from crow.cli import mcp

    loaded = _load_and_log(options)
    match options.mcp:
        case "add":
            mcp.add_server(loaded, options)
        case "remove":
            mcp.remove(loaded, options)
        case "login":
            return _run_async(mcp.log_in(loaded, options))
        case "logout":
            _run_async(mcp.log_out(loaded, options))
        case "test":
            return _run_async(mcp.try_servers(loaded, options))
        case _:
            mcp.list_servers(loaded, options)
    return None


def _trace(options: argparse.Namespace) -> int:
    from pathlib import Path

    from crow.trace import record, show

    if options.action == "check":
        from crow.cli.conformance import check_recording

        return check_recording(options)
    for line in show.format_recording(record.read_recording(Path(options.file))):
        print(line)
    return 0


def _acp_check(options: argparse.Namespace) -> int:
    from crow.cli.conformance import run_acp_check

    return run_acp_check(options)


def _completion(options: argparse.Namespace) -> None:
    from crow.cli.reference import completion, describe, matching_sessions

    if options.sessions is not None:  # the completion scripts run this command while the user types
        for name, title in matching_sessions(_run_async(_session_names()), options.sessions):
            print(f"{name}\t{title}")
        return
    if options.shell is None:
        raise ArgumentError("crow completion needs the name of a shell: bash, zsh or fish.")
    print(completion(options.shell, describe(whole_parser())), end="")


async def _session_names() -> list[tuple[str, str | None, str]]:
    """Return the id, alias and title of each of the newest sessions."""
    from crow.adapters import open_store_to_read
    from crow.cli.reference import MAX_SESSIONS
    from crow.domain.rendering import title_line
    from crow.settings import load_settings

    store = await open_store_to_read(load_settings({}, os.environ))
    try:
        page = await store.sessions(limit=MAX_SESSIONS)
    finally:
        await store.close()
    return [(row.id, row.alias, title_line(row.title or "", 60)) for row in page.rows]


def _man(_options: argparse.Namespace) -> None:
    from crow.cli.reference import describe, manual

    print(manual(describe(whole_parser())), end="")


def _config(options: argparse.Namespace) -> None:
    """Print the settings as TOML with masked secrets. A comment beside each value says where the value comes from."""
    loaded = _load(options)
    if loaded.problem is not None:
        raise loaded.problem
    paths = loaded.paths
    print(f"# settings   {paths.config_file}{'' if paths.config_file.exists() else ' (does not exist)'}")
    database = loaded.settings.database.shown()["url"] or paths.database
    print(f"# sessions   {database}\n# log        {paths.log_file}\n")
    width = max(map(len, loaded.sources))
    for key, value in loaded.values().items():
        if value is None:
            print(f"# {key:<{width}}  # unset")
        else:
            print(f"{f'{key:<{width}} = {_toml(value)}':<{width + 32}}  # {loaded.sources[key]}")


def _toml(value: object) -> str:
    import json

    if isinstance(value, tuple):
        return f"[{', '.join(map(_toml, value))}]"
    if isinstance(value, Mapping):
        pairs = (f"{json.dumps(str(name))} = {_toml(inner)}" for name, inner in value.items())
        return f"{{ {', '.join(pairs)} }}" if value else "{}"
    if hasattr(value, "get_secret_value"):
        secret = value.get_secret_value()
        # This shows enough to tell two keys apart.
        value = f"{secret[:3]}…{secret[-4:]}" if len(secret) >= 16 else "…"
    return json.dumps(value, ensure_ascii=False)


_COMMANDS: Mapping[str, Command] = {
    "run": _run,
    "chat": _chat,
    "acp": _acp,
    "serve": _serve,
    "login": _login,
    "demo": _demo,
    "sessions": _sessions,
    "doctor": _doctor,
    "models": _models,
    "mcp": _mcp,
    "config": _config,
    "trace": _trace,
    "acp-check": _acp_check,
    "completion": _completion,
    "man": _man,
}
